"""A slice of K3 at its true width on one device and on several: the same numbers, seconds of a step, and of the sums in it.

Weights are random, the same on any mesh. On NVLink hosts leave multicast off: NCCL_NVLS_ENABLE=0, and XLA's own collective kernels off
(--xla_gpu_experimental_use_collective_kernels=) until a log proves that they make no multicast memory.

python benchmarks/mesh_steps.py [--layers 4] [--ranks 1 2] [--rows 1 8] [--prompt 2048] [--kernels auto xla] [--dtype float32] [--out DIR]
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import k3jax
from k3jax import K3Config, generate, sharding
from k3jax import carry as carries
from k3jax.batch import Batch, single
from k3jax.context import Context
from k3jax.generate import DECODE
from k3jax.io.hf import parameters_of
from k3jax.kernels import Kernels
from k3jax.model import K3, Weights
from k3jax.sampling import SamplingParams

REPEATS = 3
SUMS = 200  # in one program


@functools.cache
def maker(kind: str, shape: tuple[int, ...], dtype: Any, where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A program that makes one parameter where it lies: one for all that are alike."""

    def make(key: jax.Array) -> jax.Array:
        if kind == "scale":
            return jnp.full(shape, 127 - round(math.log2(4 * math.sqrt(32 * shape[-1]))), dtype)
        if kind == "packed":
            return jax.random.bits(key, shape, dtype)
        if kind in ("log", "bias"):
            return jax.random.uniform(key, shape, jnp.float32, -1, 1).astype(dtype)
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)

    return jax.jit(make, out_shardings=where)


def random_model(config: K3Config, mesh: Mesh, dtype: str) -> K3:
    """Packed experts whose values are those of a matrix of std in^-1/2 or so; nothing is made whole on a device."""
    model = K3.abstract(config, dtype=dtype, packed=True)
    for i, (name, p) in enumerate(parameters_of(model).items()):
        kind = re.split(r"[._]", name)[-1]
        p.set_value(maker(kind, p.shape, p.dtype, NamedSharding(mesh, sharding.spec(p.axes)))(jax.random.key(i)))
    model.absorb()
    return sharding.placed(model, mesh, sharding.of_model(model))


def median(run: Callable[[], Any]) -> float:
    """Seconds of a call, after one that compiles."""
    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def decode_step(model: K3, ctx: Context, mesh: Mesh, rows: int, context: int) -> tuple[float, list[int]]:
    """Seconds of a step of `rows` rows that have `context` tokens each, and the tokens of a run."""
    pages = -(-(context + DECODE) // 64)
    params = [SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)] * rows

    def empty() -> generate.State:
        state = generate.empty(model, slots=rows, pages=rows * pages)
        new = generate.rows(params, [[7 + i] for i in range(rows)], [0] * rows, (), rows, model.config.vocab_size)
        state = generate.place(state, jnp.arange(rows), new)
        assert state.carry is not None
        return state._replace(carry=state.carry._replace(lengths=jnp.full(rows, context, jnp.int32)))

    state = sharding.made(empty, mesh, sharding.specs(generate.axes(jax.eval_shape(empty))))
    table: Any = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    slots: Any = np.arange(rows, dtype=np.int32)
    weights, tokens = Weights(model), []

    def run() -> Any:
        nonlocal state
        # Each call begins at the same length.
        state = state._replace(carry=state.carry._replace(lengths=state.carry.lengths * 0 + context))  # type: ignore[union-attr]
        state, found = generate.decode(weights, state, slots, table, np.int32(DECODE), ctx)
        tokens.append(np.asarray(found.new.token)[:, 0].tolist())
        return found

    return median(run) / DECODE, tokens[0]


def prefill_step(model: K3, ctx: Context, mesh: Mesh, tokens: int) -> tuple[float, np.ndarray]:
    """Seconds of one step that takes a prompt into a carry, and its last logits."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens).astype(np.int32)
    pages = -(-tokens // 64)

    def empty() -> carries.Carry:
        return carries.empty(model.config, slots=1, pages=pages, dtype=str(model.dtype))

    where = sharding.specs(carries.axes(jax.eval_shape(empty)))
    carry = sharding.made(empty, mesh, where)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(model: K3, carry: carries.Carry, ids: jax.Array) -> tuple[carries.Carry, jax.Array]:
        def of_rank(model: K3, carry: carries.Carry, ids: jax.Array) -> tuple[carries.Carry, jax.Array]:
            batch: Batch = single(ids, tokens, pages)._replace(logits_indices=jnp.array([tokens - 1]))
            out = k3jax.model.forward(model, batch, carry, ctx)
            assert out.carry is not None
            return out.carry, out.logits

        specs = (sharding.of_model(model), where, jax.P())
        return sharding.per_rank(of_rank, mesh, specs, (where, sharding.spec((None, "vocab"))))(model, carry, ids)

    def run() -> jax.Array:
        nonlocal carry
        carry, logits = step(model, carry, ids)
        return logits

    return median(run), np.asarray(run(), np.float32)


def sum_seconds(mesh: Mesh, rows: int, width: int) -> float:
    """Of one sum of [rows, width] bfloat16 over the ranks, one of many in a program, each waiting for the one before."""
    x = jax.device_put(jnp.ones((rows, width), jnp.bfloat16), NamedSharding(mesh, jax.P()))

    def of_rank(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, SUMS, lambda _, x: jax.lax.psum(x * 0.5, sharding.RANKS), x)

    run = jax.jit(sharding.per_rank(of_rank, mesh, jax.P(), jax.P()))
    return median(lambda: run(x)) / SUMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32: to compare tokens"
    )
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="auto, xla (no GPU kernels), or both")
    parser.add_argument("--tiny", action="store_true", help="k3-tiny's sizes: to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = (K3Config.tiny() if args.tiny else K3Config.k3()).slice(args.layers)
    found: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for ranks in args.ranks:
        mesh = k3jax.make_mesh(tp=ranks)
        model, sums = random_model(config, mesh, args.dtype), {}
        for rows in args.rows if ranks > 1 else []:
            sums[rows] = 1e6 * sum_seconds(mesh, rows, config.hidden_size)
        for kernels in args.kernels:
            ctx = Context(Kernels.resolve(kernels, config), mesh=mesh)
            seconds, logits = prefill_step(model, ctx, mesh, args.prompt)
            row: dict[str, Any] = {
                "ranks": ranks,
                "kernels": kernels,
                "prefill_s": seconds,
                "decode_s": {},
                "sum_us": sums,
            }
            want = first.setdefault("logits", logits)
            row["logits_relative_error"] = float(np.linalg.norm(logits - want) / np.linalg.norm(want))
            for rows in args.rows:
                row["decode_s"][rows], tokens = decode_step(model, ctx, mesh, rows, args.context)
                row.setdefault("tokens_equal", {})[rows] = tokens == first.setdefault(f"tokens {rows}", tokens)
            print(json.dumps(row), flush=True)
            found.append(row)
        for leaf in jax.tree.leaves(model):
            leaf.delete()
    if args.out:
        device = jax.devices()[0]
        record = {
            "what": "mesh_steps", "date": f"{datetime.date.today()}", "device": device.device_kind,
            "platform_version": device.client.platform_version, "python": platform.python_version(),
            "jax": importlib.metadata.version("jax"), "options": {k: v for k, v in vars(args).items() if k != "out"}, "rows": found,
        }  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{record['date']}-mesh_steps.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
