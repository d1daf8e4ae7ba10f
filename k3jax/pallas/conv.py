"""The short convolution of q, k and v over packed rows: depthwise, causal, no bias, then SiLU; histories in place by slot.

    y_t[c] = silu( sum_i w[c, i] x_{t-W+1+i}[c] )      tap W-1 on the current token

Two kinds of programs in one launch. Those of the tokens slide over a run of them and write what needs inputs of its own
row alone, and 0 past the last row. Those of the rows write the first W-1 tokens, which need the history, and alone read and
write histories.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from k3jax.pallas.common import launch, sigmoid

_WIDEST = 1024  # channels of a head
_MOST = 65535  # programs along an axis


class Tuning(NamedTuple):
    """Launch parameters of a program."""

    tokens: int = 64  # of its run
    unroll: int = 8  # tokens loaded together
    channels: int = 1024  # at most, whole heads
    thread: int = 4  # channels of a thread


def choose(heads: int) -> Tuning:
    """The fastest of those timed on an H200: few heads take shorter runs, for as many programs."""
    return Tuning(tokens=32) if heads < 24 else Tuning()


class _Stream(NamedTuple):
    """One of q, k and v: its inputs, its outputs, and its first channel among a head's in taps and histories."""

    x: jax.Ref
    y: jax.Ref
    first: int


def _kernel(
    local_ref, cu_ref, slots_ref, computed_ref, q_ref, k_ref, v_ref, taps_ref, past_ref,
    q_out, k_out, v_out, kept_ref, *, heads: int, tuning: Tuning, interpret: bool,
):  # fmt: skip
    T, _, K = q_ref.shape
    W, B = taps_ref.shape[0], slots_ref.shape[0]
    block, place, kind = (pl.program_id(axis) for axis in range(3))  # outside of branches: they cannot be interpreted

    def stream(s: _Stream) -> None:
        shape = heads, pl.next_power_of_2(s.x.shape[-1])
        h = block * heads + lax.broadcasted_iota(jnp.int32, shape, 0)
        c = lax.broadcasted_iota(jnp.int32, shape, 1)
        inside = c < s.x.shape[-1]

        def load(ref: jax.Ref, at: tuple, first: int, where: Array | bool) -> Array:
            """Zero where there is nothing."""
            return plt.load(ref.at[*at, h, first + c], mask=inside & where, other=0)

        def store(ref: jax.Ref, at: tuple, first: int, value: Array, where: Array | bool) -> None:
            plt.store(ref.at[*at, h, first + c], value, mask=inside & where)

        taps = [load(taps_ref, (jnp.int32(i),), s.first, True) for i in range(W)]

        def convolved(window: list[Array]) -> Array:
            y = taps[0] * window[0].astype(jnp.float32)
            for tap, x in zip(taps[1:], window[1:], strict=True):
                y += tap * x.astype(jnp.float32)
            return (y * sigmoid(y, interpret)).astype(s.y.dtype)

        def token(t: Array) -> Array:
            return load(s.x, (t,), 0, (t >= 0) & (t < T))

        @pl.when(place >= B)
        def run_of_tokens() -> None:
            start = (place - B) * tuning.tokens

            def some(i: Array, window: tuple[Array, ...]) -> tuple[Array, ...]:
                t = start + i * tuning.unroll
                inputs = [*window, *(token(t + j) for j in range(tuning.unroll))]
                for j in range(tuning.unroll):
                    local = plt.load(local_ref.at[t + j], mask=t + j < T, other=-1)
                    store(s.y, (t + j,), 0, convolved(inputs[j : j + W]), local >= W - 1)
                return tuple(inputs[tuning.unroll :])

            before = tuple(token(start - W + 1 + i) for i in range(W - 1))
            lax.fori_loop(0, tuning.tokens // tuning.unroll, some, before)

            def nothing(t: Array, _: None) -> None:
                store(s.y, (t,), 0, jnp.zeros(shape, s.y.dtype), True)

            lax.fori_loop(jnp.maximum(start, cu_ref[B]), jnp.minimum(start + tuning.tokens, T), nothing, None)

        @pl.when(place < B)
        def row() -> None:
            begin, length, slot = cu_ref[place], cu_ref[place + 1] - cu_ref[place], slots_ref[place]
            owned = (slot >= 0) & (slot < past_ref.shape[0]) & (length > 0)
            slot, begun = jnp.where(owned, slot, 0), owned & (computed_ref[place] > 0)

            def past(i: Array | int, where: Array | bool = True) -> Array:
                return load(past_ref, (slot, jnp.int32(i)), s.first, begun & where)

            inputs = [past(i) for i in range(W - 1)]
            inputs += [load(s.x, (begin + j,), 0, j < length) for j in range(W - 1)]
            kept = []
            for i in range(W - 1):
                j = length - (W - 1) + i  # number of the input in its row; negative ones are in the old history
                new, old = load(s.x, (begin + j,), 0, j >= 0), past(length + i, j < 0)
                kept.append(jnp.where(j >= 0, new, old))
            if not interpret:
                plt.debug_barrier()  # no thread writes the history before all have read it
            for j in range(W - 1):
                store(s.y, (begin + j,), 0, convolved(inputs[j : j + W]), j < length)
                store(kept_ref, (slot, jnp.int32(j)), s.first, kept[j], owned)

    for i, s in enumerate((_Stream(q_ref, q_out, 0), _Stream(k_ref, k_out, K), _Stream(v_ref, v_out, 2 * K))):
        pl.when(kind == i)(functools.partial(stream, s))


def refuse(
    q: Array, k: Array, v: Array, taps: Array, pool: Array, cu_seqlens: Array, slots: Array, num_computed: Array,
    tuning: Tuning | None = None,
) -> str | None:  # fmt: skip
    """Why `packed` cannot take arrays of these shapes and dtypes, or None."""
    if q.ndim != 3 or 0 in q.shape or q.shape[-1] > _WIDEST:
        return f"q={list(q.shape)}: allowed is [T, H, K], none of them 0 and K at most {_WIDEST}"
    T, H, K = q.shape
    if v.ndim != 3 or not 1 <= v.shape[-1] <= _WIDEST:
        return f"v={list(v.shape)}: allowed is [{T}, {H}, V] with V from 1 to {_WIDEST}"
    if taps.ndim != 3 or not 2 <= taps.shape[0] <= 8:
        return f"taps={list(taps.shape)}: allowed is [W, H, 2K+V] with W from 2 to 8"
    if slots.ndim != 1 or slots.shape[0] < 1:
        return f"slots={list(slots.shape)}: allowed is [B] with B from 1"
    V, W, B, C = v.shape[-1], taps.shape[0], slots.shape[0], 2 * K + v.shape[-1]
    expected = {
        "q": (q, (T, H, K), q.dtype), "k": (k, (T, H, K), q.dtype), "v": (v, (T, H, V), q.dtype),
        "taps": (taps, (W, H, C), jnp.float32), "pool": (pool, (*pool.shape[:1], W - 1, H, C), q.dtype),
        "cu_seqlens": (cu_seqlens, (B + 1,), jnp.int32), "slots": (slots, (B,), jnp.int32),
        "num_computed": (num_computed, (B,), jnp.int32),
    }  # fmt: skip
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q={q.dtype}: allowed are float32 and bfloat16"
    for name, (a, shape, dtype) in expected.items():
        if (a.shape, a.dtype) != (shape, dtype):
            return f"{name}={a.dtype}{list(a.shape)}: allowed is {jnp.dtype(dtype)}{list(shape)}"
    tokens, unroll = (tuning or choose(H))[:2]
    if tokens % unroll:
        return f"tuning.tokens={tokens}: allowed are multiples of tuning.unroll={unroll}"
    if B + pl.cdiv(T, tokens) > _MOST:
        return f"T={T}: allowed are {(_MOST - B) * tokens} with {B} rows"
    return None


def packed(
    q: Float[Array, "T H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H V"],
    taps: Float[Array, "W H 2K+V"],
    pool: Float[Array, "slots W-1 H 2K+V"],
    cu_seqlens: Int[Array, "B+1"],
    slots: Int[Array, "B"],
    num_computed: Int[Array, "B"],
    *,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H K"], Float[Array, "T H K"], Float[Array, "T H V"], Float[Array, "slots W-1 H 2K+V"]]:
    """Rows of any length one after another, each continuing the history of its slot; the pool is updated in place if donated.

    float32 taps, sum and SiLU; one rounding to the dtype of q, k, v and pool. A row with num_computed 0 begins with zeros,
    whatever its slot holds, and so does one whose slot is out of range, which writes no history. Slots in range must
    differ. A row of length 0 writes nothing. Outputs of tokens past the last row are 0; their inputs may be NaN.
    Raises ValueError for shapes and dtypes that it cannot take.
    """
    if reason := refuse(q, k, v, taps, pool, cu_seqlens, slots, num_computed, tuning):
        raise ValueError(reason)
    (T, H, K), V, B = q.shape, v.shape[-1], slots.shape[0]
    tuning = tuning or choose(H)
    index = jnp.arange(T, dtype=jnp.int32)
    row = jnp.searchsorted(cu_seqlens[1:], index, side="right", method="compare_all")
    local = jnp.where(row < B, index - cu_seqlens.at[row].get(mode="clip"), -1)
    width = pl.next_power_of_2(max(K, V))
    heads = math.gcd(H, max(1, tuning.channels // width))
    args = (local, cu_seqlens, slots, num_computed, q, k, v, taps, pool)
    outs = launch(
        functools.partial(_kernel, heads=heads, tuning=tuning, interpret=interpret),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v, pool)],
        grid=(H // heads, B + pl.cdiv(T, tuning.tokens), 3),
        warps=max(1, heads * width // (32 * tuning.thread)),
        aliases={len(args) - 1: 3},
        interpret=interpret,
        name="kda_conv",
    )(*args)
    return outs[0], outs[1], outs[2], outs[3]
