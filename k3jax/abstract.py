"""Steps of a model of any size without its memory: to be lowered, compiled and measured on devices that need not exist."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from k3jax import generate, sharding
from k3jax.batch import Batch
from k3jax.carry import PAGE
from k3jax.config import DTYPES, K3Config
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.model import K3


class Abstract(NamedTuple):
    """`traced.lower(...).compile()` makes the program; bytes are those of one rank."""

    traced: Any
    weights: int
    state: int  # slots and pages, which the program updates where they are
    batch: int  # what else it is given

    @property
    def bytes(self) -> int:
        return self.weights + self.state + self.batch


def decode(
    config: K3Config, mesh: Mesh, *, rows: int, context: int, packed: bool = False, dtype: str = "bfloat16"
) -> Abstract:
    """The program that takes one token from each of `rows` rows, of up to `context` tokens each, up to DECODE times."""
    _check(rows=rows, context=context)
    pages = -(-context // PAGE)
    return _traced(config, mesh, rows, pages, packed, dtype, prompt=0)


def prefill(
    config: K3Config, mesh: Mesh, *, tokens: int, slots: int = 64, packed: bool = False, dtype: str = "bfloat16"
) -> Abstract:
    """The program that reads a prompt of `tokens` tokens in one step, beside other requests' states."""
    _check(tokens=tokens, slots=slots)
    return _traced(config, mesh, slots, -(-tokens // PAGE), packed, dtype, prompt=tokens)


def _check(**counts: Any) -> None:
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}: allowed is an integer of 1 or more")


def _traced(config: K3Config, mesh: Mesh, rows: int, pages: int, packed: bool, dtype: str, prompt: int) -> Abstract:
    sharding.check(config, mesh, packed)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: allowed are {' and '.join(map(repr, DTYPES))}")
    split = mesh.shape["ep"], mesh.shape["tp"]
    model = jax.eval_shape(K3.absorb, K3.abstract(config, dtype=dtype, packed=packed))
    state = jax.eval_shape(lambda: generate.empty(model, slots=rows, pages=pages * (1 if prompt else rows)))
    held = [
        sharding.rank_bytes(a, b, *split) for a, b in ((model, sharding.named(model)), (state, generate.axes(state)))
    ]

    def on(tree: Any, specs: Any) -> Any:
        def place(a: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, tree, specs)

    def whole(*shape: int, dtype: Any = jnp.int32) -> Any:
        return on(jax.ShapeDtypeStruct(shape, dtype), jax.P())

    given = on(model, sharding.of_model(model)), on(state, sharding.specs(generate.axes(state)))
    ctx = Context(Kernels.auto(config, mesh.devices.flat[0].platform), mesh=mesh)
    if prompt:
        fields = (whole(prompt), whole(2), whole(1), whole(1), whole(1, pages), whole(1))
        program, others = generate.step, (Batch(*fields), whole(1, dtype=bool))
    else:
        program, others = generate.decode, (whole(rows), whole(rows, pages), whole())
    # Arguments that a program does not use take memory like the others.
    options: Any = dict(static_argnames=("ctx", "sampling"), donate_argnames="state", keep_unused=True)
    traced = jax.jit(program.__wrapped__, **options).trace(*given, *others, ctx)  # type: ignore[attr-defined]
    batch = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(others))
    return Abstract(traced, weights=held[0], state=held[1], batch=batch)
