"""RMSNorm over a head's channels, its gain, and the sigmoid of a gate, in one pass.

    y = o / sqrt(mean(o²) + eps) * gain * sigmoid(gate)

A program takes many heads of many tokens, each a row; rows do not see one another.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from k3jax.pallas.common import launch, sigmoid

_WIDEST = 4096  # channels of a head


class Tuning(NamedTuple):
    """Launch parameters of a program."""

    elements: int = 4096  # of its heads together
    warps: int = 8


DEFAULT = Tuning()


def _kernel(o_ref, gate_ref, gain_ref, out_ref, *, eps: float, rows: int, interpret: bool):
    N, V = o_ref.shape
    shape = rows, pl.next_power_of_2(V)
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = (row < N) & (column < V)

    def load(ref: jax.Ref, *at: Array) -> Array:
        return plt.load(ref.at[at], mask=inside, other=0).astype(jnp.float32)

    o, gate, gain = load(o_ref, row, column), load(gate_ref, row, column), load(gain_ref, column)
    scale = lax.rsqrt(jnp.sum(o * o, axis=1) / V + eps)[:, None]
    y = o * scale * gain * sigmoid(gate, interpret)
    plt.store(out_ref.at[row, column], y.astype(out_ref.dtype), mask=inside)


def refuse(o: Array, gate: Array, gain: Array) -> str | None:
    """Why `gated_rms_norm` cannot take arrays of these shapes and dtypes, or None."""
    if o.ndim != 3 or 0 in o.shape or o.shape[-1] > _WIDEST:
        return f"o={list(o.shape)}: allowed is [T, H, V], none of them 0 and V at most {_WIDEST}"
    for name, a, shape in (("o", o, o.shape), ("gate", gate, o.shape), ("gain", gain, o.shape[-1:])):
        if a.shape != shape:
            return f"{name}={list(a.shape)}: allowed is {list(shape)}"
        if a.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name}={a.dtype}: allowed are float32 and bfloat16"
    return None


def gated_rms_norm(
    o: Float[Array, "T H V"],
    gate: Float[Array, "T H V"],
    gain: Float[Array, "V"],
    eps: float,
    *,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> Float[Array, "T H V"]:
    """In the dtype of o, rounded once. Raises ValueError for shapes and dtypes that it cannot take."""
    if reason := refuse(o, gate, gain):
        raise ValueError(reason)
    V = o.shape[-1]
    o_NV, gate_NV = o.reshape(-1, V), gate.reshape(-1, V)
    rows = max(1, tuning.elements // pl.next_power_of_2(V))
    [out] = launch(
        functools.partial(_kernel, eps=eps, rows=rows, interpret=interpret),
        out_shape=[jax.ShapeDtypeStruct(o_NV.shape, o.dtype)],
        grid=(pl.cdiv(len(o_NV), rows),),
        warps=tuning.warps,
        interpret=interpret,
        name="gated_rms_norm",
    )(o_NV, gate_NV, gain)
    return out.reshape(o.shape)
