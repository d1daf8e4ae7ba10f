"""Sharding: the mesh, which axis of an array is split over which axis of the mesh, and programs that run on every rank.

Arrays name their axes where they are declared: parameters (layers/), the carry, the arrays that sampling reads. RULES is
the one place that says what becomes of a name. The code of a step is that of one rank, inside one `shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.config import K3Config
from k3jax.model import K3, Weights
from k3jax.ops.mxfp4 import GROUP
from k3jax.ranks import EXPERTS, RANKS

RULES: dict[str, str | tuple[str, ...]] = {
    "heads": RANKS,
    "mlp": RANKS,
    "vocab": RANKS,
    "expert": EXPERTS,
    "expert_mlp": "tp",
}  # an axis that is not named here is whole on every rank


def make_mesh(
    data: int = 1, tp: int | None = None, *, ep: int | None = None, devices: Sequence[Any] | None = None
) -> Mesh:
    """Devices for `data` copies of a model, each shared by `tp` of them; axes "data", "ep" and "tp".

    tp: ranks of a copy; None takes all devices. Heads, vocabulary, dense and shared experts are split over all of them. ep: over so
    many of them whole routed experts are divided, and the width of each expert over the other tp / ep; None: all, so that every
    rank has whole experts. devices: jax.devices(), of which the first data * tp are taken. Raises ValueError.
    """
    devices = jax.devices() if devices is None else list(devices)
    _require(len(devices) == len({*devices}) > 0, "devices", devices, "one or more, each once")
    _require(_count(data) and data <= len(devices), "data", data, f"1 to {len(devices)} (devices)")
    most = len(devices) // data
    tp = most if tp is None else tp
    _require(_count(tp) and tp <= most, "tp", tp, f"1 to {most}: {len(devices)} devices for data={data}")
    ep = tp if ep is None else ep
    _require(_count(ep) and tp % ep == 0, "ep", ep, f"divisors of tp={tp}")
    shape = (data, ep, tp // ep)
    chosen = devices[: math.prod(shape)]
    return jax.make_mesh(shape, ("data", *RANKS), axis_types=(AxisType.Auto,) * 3, devices=chosen)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(ok: bool, field: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: allowed are {allowed}")


def check(config: K3Config, mesh: Mesh, packed: bool = False) -> None:
    """ValueError naming the first size of the model that the ranks of this mesh cannot share alike."""
    known = isinstance(mesh, Mesh) and mesh.axis_names == ("data", *RANKS)
    if not known or mesh.axis_types != (AxisType.Auto,) * 3:
        raise ValueError(f"mesh={mesh!r}: allowed is one of k3jax.make_mesh")
    if mesh.shape["data"] != 1:
        raise ValueError(
            f"data={mesh.shape['data']}: allowed is 1, one copy of the model; `k3jax batch` runs several (--replicas)"
        )
    check_split(config, mesh.shape["ep"], mesh.shape["tp"], packed)


def check_split(config: K3Config, ep: int, tp: int, packed: bool = False) -> None:
    """The same for the sizes of a mesh that need not exist."""
    c, every = config, ep * tp
    kda, mla, moe = (bool(layers) for layers in (c.kda_layers, c.mla_layers, c.moe_layers))
    split = (  # axis, over how many, and a size that is 0 where there are no such layers
        ("tp", every, "kda_num_heads", kda * c.kda_num_heads),
        ("tp", every, "num_attention_heads", mla * c.num_attention_heads),
        ("tp", every, "intermediate_size", (len(c.moe_layers) < c.num_hidden_layers) * c.intermediate_size),
        (
            "tp",
            every,
            "num_shared_experts * moe_intermediate_size",
            moe * c.num_shared_experts * c.moe_intermediate_size,
        ),
        ("tp", every, "vocab_size", c.vocab_size),
        ("ep", ep, "num_experts", moe * c.num_experts),
        ("tp / ep", tp, "moe_intermediate_size", moe * c.moe_intermediate_size),
    )
    for axis, count, name, size in split:
        _require(size % count == 0, axis, count, f"divisors of {name}={size}")
    if packed and moe and c.moe_intermediate_size % (GROUP * tp):
        allowed = f"divisors of {c.moe_intermediate_size // GROUP}, since MXFP4 scales {GROUP} inputs together"
        raise ValueError(f"tp / ep={tp}: allowed are {allowed} (moe_intermediate_size={c.moe_intermediate_size})")


def share(shape: Sequence[int], axes: Sequence[str | None], ep: int, tp: int) -> tuple[int, ...]:
    """The shape of one rank's part of an array with these named axes (the first ones), on a mesh that need not exist."""
    over = {"ep": ep, "tp": tp, RANKS: ep * tp}
    axes = (*axes, *(None,) * (len(shape) - len(axes)))
    return tuple(size // over.get(RULES.get(name or ""), 1) for size, name in zip(shape, axes, strict=True))


def rank_bytes(arrays: Any, named: Any, ep: int, tp: int) -> int:
    """Of one rank's part of a tree of arrays, or of shapes, with a tree of named axes."""
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(named), strict=True)
    return sum(math.prod(share(a.shape, tuple(axes), ep, tp)) * a.dtype.itemsize for a, axes in pairs)


def ranks(mesh: Mesh | None) -> int:
    """Devices that share one copy of the model."""
    return 1 if mesh is None else mesh.shape["ep"] * mesh.shape["tp"]


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Where an array with these named axes is split."""
    return jax.P(*(None if name is None else RULES.get(name) for name in axes))


def specs(named: Any) -> Any:
    """The same for a tree of named axes, each a jax.P."""
    return jax.tree.map(lambda axes: spec(tuple(axes)), named)


def named(model: K3 | Weights) -> Any:
    """A model, or its Weights, with named axes in place of arrays."""
    module = model.model if isinstance(model, Weights) else model
    variables = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return jax.tree.unflatten(jax.tree.structure(model), [jax.P(*variable.axes) for variable in variables])


def of_model(model: K3 | Weights) -> Any:
    """The same with partition specs."""
    return specs(named(model))


def placed(tree: Any, mesh: Mesh | None, partition: Any) -> Any:
    """Arrays on the devices of a mesh, divided as `partition` (specs for all or for parts of the tree) says."""
    if mesh is None:
        return tree
    return jax.device_put(tree, jax.tree.map(lambda p: NamedSharding(mesh, p), partition))


def made(make: Callable[[], Any], mesh: Mesh, partition: Any) -> Any:
    """What `make` makes, in its parts from the start."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda p: NamedSharding(mesh, p), partition))()


def per_rank(f: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f`, the code of one rank, as a function of whole arrays."""
    return f if mesh is None else jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
