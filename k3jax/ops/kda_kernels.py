"""A KDA layer between its projections by GPU kernels, its memory in place by slot."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.batch import Step
from k3jax.pallas import conv, gated_norm, kda_decode, kda_prefill


class Inputs(NamedTuple):
    """What the projections give; the axis of tokens comes first."""

    q: Float[Array, "T H K"]  # before the convolution
    k: Float[Array, "T H K"]
    v: Float[Array, "T H V"]
    f: Float[Array, "T H K"]  # before the gate's sigmoid or softplus
    b: Float[Array, "T H"]  # before beta's sigmoid
    gate: Float[Array, "T H V"]  # before the output gate's sigmoid


class Parameters(NamedTuple):
    """The layer's own, float32."""

    taps: Float[Array, "H 2K+V W"]
    A_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]
    norm: Float[Array, "V"]


class Form(NamedTuple):
    """What is static. precision: of products of bfloat16 inputs, "default" or "high"; those of float32 are float32's."""

    lower_bound: float | None
    eps: float
    precision: kda_prefill.Precision
    interpret: bool


class Pools(NamedTuple):
    """carry.KDAState."""

    conv: Float[Array, "slots W-1 H 2K+V"]
    S: Float[Array, "slots H V K"]


def layer(pools: Pools, x: Inputs, p: Parameters, step: Step, form: Form) -> tuple[Pools, Float[Array, "T H V"]]:
    """New pools, and outputs after norm and gate in the dtype of q.

    Decode rows without a slot are skipped, and their outputs 0; prompts without one start from zero and leave nothing. Outputs of
    padding are 0 where its gate is a number.
    """
    n, outputs = step.decode_rows, []
    if n:
        rows = kda_decode.Rows(step.write_slots[:n], step.num_computed[:n])
        pools, o = _decode(pools, Inputs(*(a[:n] for a in x)), p, rows, form)
        outputs.append(o)
    if step.prefill is not None:
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(step.prefill.length, dtype=jnp.int32)])
        rows = kda_prefill.Rows(starts, step.write_slots[n:], step.num_computed[n:])
        pools, o = _prefill(pools, Inputs(*(a[n:] for a in x)), p, rows, form)
        outputs.append(o)
    return pools, outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)


# Each a jit of its own, so that a program of many layers makes each kernel once.


@functools.partial(jax.jit, static_argnames="form")
def _decode(pools: Pools, x: Inputs, p: Parameters, rows: kda_decode.Rows, form: Form) -> tuple[Pools, Array]:
    K = x.q.shape[-1]
    taps = p.taps[:, :K], p.taps[:, K : 2 * K], p.taps[:, 2 * K :]
    layer = kda_decode.Layer(x.q, x.k, x.v, taps, x.gate, p.norm)
    gates = kda_decode.Gates(x.f, x.b, p.A_log, p.dt_bias)
    conv_pool, S, o = kda_decode.layer_step(
        *pools, layer, gates, rows, form.eps, form.lower_bound, interpret=form.interpret
    )
    return Pools(conv_pool, S), o


@functools.partial(jax.jit, static_argnames="form")
def _prefill(pools: Pools, x: Inputs, p: Parameters, rows: kda_prefill.Rows, form: Form) -> tuple[Pools, Array]:
    taps = jnp.moveaxis(p.taps, -1, 0)
    q, k, v, conv_pool = conv.packed(x.q, x.k, x.v, taps, pools.conv, *rows, interpret=form.interpret)
    raw = kda_prefill.Raw(q, k, v, x.f, x.b, p.A_log, p.dt_bias)
    precision = "highest" if q.dtype == jnp.float32 else form.precision
    S, o = kda_prefill.prefill(pools.S, raw, rows, form.lower_bound, precision=precision, interpret=form.interpret)
    o = gated_norm.gated_rms_norm(o, x.gate, p.norm, form.eps, interpret=form.interpret)
    return Pools(conv_pool, S), o
