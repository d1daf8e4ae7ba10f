"""KDA decode in Pallas-Triton: one token for each of B rows, their states in a pool that is updated in place.

`step` takes q, k and v after the convolution; `layer_step` is all of a layer between its projections in one launch: short
convolution, recurrence and gated norm. With k and q normalised, a = exp(g) and S a head's state, [V, K]:

    u = beta (v - S (a k))        o = K^-1/2 (S (a q) + u (k·q))        S <- S diag(a) + u kᵀ

Both sums of the recurrence are taken over the old state, so that neither waits for the other. Float32 inside. A row
whose slot is not in the pool starts from zero, gives its output and leaves no trace; slots in the pool must differ.
`kda_decode_bench.py` beside this file checks and times both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

_L2_EPS = 1e-6


class Rows(NamedTuple):
    """Where each row's memory is."""

    slots: Int[Array, "B"]  # int32, all different, or out of range for rows that leave no trace
    num_computed: Int[Array, "B"]  # int32; 0 starts from zero, whatever the slot holds


class Gates(NamedTuple):
    """What the projections give for decay and beta, with the parameters of the decay."""

    f: Float[Array, "B H K"]  # g = bound * sigmoid(exp(A_log) (f + dt_bias))
    b: Float[Array, "B H"]  # beta = sigmoid(b)
    A_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]


class Layer(NamedTuple):
    """What `layer_step` reads beside the gates."""

    qkv: Float[Array, "B H 2K+V"]  # before the convolution
    taps: Float[Array, "W H 2K+V"]  # float32, the last for the current token
    out_gate: Float[Array, "B H V"]  # before its sigmoid
    norm: Float[Array, "V"]  # float32


class Tuning(NamedTuple):
    """Launch parameters of a program, which takes `tiles` tiles of a head's state one after another."""

    rows: int  # of the state in a tile
    warps: int
    tiles: int = 1  # `layer_step` always takes the whole head


# Within 3 and 7 % of the best tuning at every size that was timed, 128 channels a head.
STEP, LAYER_STEP = Tuning(16, 4), Tuning(32, 4, 4)


def _sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(x.astype(jnp.float32))


def _decay(f: Array, A_log: Array, dt_bias: Array, lower_bound: float) -> Array:
    z = jnp.exp(A_log.astype(jnp.float32)) * (f.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return jnp.exp(lower_bound * _sigmoid(z))


def _normalise(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x) + _L2_EPS)


def _read(ref: jax.Ref, valid: Array) -> Array:
    """The values, or 0 without looking."""
    return plt.load(ref, mask=jnp.broadcast_to(valid, ref.shape), other=0)


def _write(ref: jax.Ref, value: Array, valid: Array) -> None:
    plt.store(ref, value.astype(ref.dtype), mask=jnp.broadcast_to(valid, ref.shape))


class Head(NamedTuple):
    """One head of one row, and where its state is."""

    at: tuple[Array, Array]  # row and head
    slot: Array  # 0 for a row without one
    owned: Array  # whether the slot may be written
    begun: Array  # whether it may be read
    before: jax.Ref
    after: jax.Ref

    def state(self, start: Array | int, rows: int) -> Array:
        return _read(self.before.at[self.slot, self.at[1], pl.ds(start, rows), :], self.begun)


def _head(row: Array, h: Array, slots_ref: jax.Ref, computed_ref: jax.Ref, before: jax.Ref, after: jax.Ref) -> Head:
    slot = slots_ref[row]
    owned = (slot >= 0) & (slot < before.shape[0])
    return Head((row, h), jnp.where(owned, slot, 0), owned, owned & (computed_ref[row] > 0), before, after)


def _advance(
    head: Head, S: Array, q: Array, k: Array, decay: Array, beta: Array, v_ref: jax.Ref, o_ref: jax.Ref,
    first: Array | int, tuning: Tuning,
) -> None:  # fmt: skip
    """The tiles from row `first` of the state on. S is the first of them; each other one is loaded a turn ahead."""
    from_k, from_q, qk = (decay * k)[None, :], (decay * q)[None, :], jnp.sum(q * k)

    def work(i: Array | int, S: Array) -> None:
        rows = pl.ds(first + i * tuning.rows, tuning.rows)
        u = beta * (v_ref[*head.at, rows].astype(jnp.float32) - jnp.sum(S * from_k, axis=1))
        o = jnp.sum(S * from_q, axis=1) + u * qk
        S = S * decay[None, :] + u[:, None] * k[None, :]
        _write(head.after.at[head.slot, head.at[1], rows, :], S, head.owned)
        o_ref[*head.at, rows] = o.astype(o_ref.dtype)

    def one(i: Array, S: Array) -> Array:
        ahead = head.state(first + (i + 1) * tuning.rows, tuning.rows)
        work(i, S)
        return ahead

    last = tuning.tiles - 1
    work(last, lax.fori_loop(0, last, one, S) if last else S)


# -- the recurrence alone ------------------------------------------------------------------------------------------


def _step_kernel(
    slots_ref, computed_ref, q_ref, k_ref, v_ref, f_ref, b_ref, A_ref, bias_ref, S_ref, o_ref, S_out_ref,
    *, tuning: Tuning, lower_bound: float,
):  # fmt: skip
    first, h, row = pl.program_id(0) * (tuning.rows * tuning.tiles), pl.program_id(1), pl.program_id(2)
    head = _head(row, h, slots_ref, computed_ref, S_ref, S_out_ref)
    q, k, f, b, A_log, bias = (
        q_ref[row, h, :],
        k_ref[row, h, :],
        f_ref[row, h, :],
        b_ref[row, h],
        A_ref[h],
        bias_ref[h, :],
    )
    S = head.state(first, tuning.rows)  # after the loads that need no slot
    q, k = _normalise(q) * q.shape[-1] ** -0.5, _normalise(k)
    _advance(head, S, q, k, _decay(f, A_log, bias, lower_bound), _sigmoid(b), v_ref, o_ref, first, tuning)


def step(
    S_pool: Float[Array, "slots H V K"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    gates: Gates,
    rows: Rows,
    lower_bound: float = -5.0,
    tuning: Tuning = STEP,
    interpret: bool = False,
) -> tuple[Float[Array, "slots H V K"], Float[Array, "B H V"]]:
    """The pool, in place if donated, and the outputs in the dtype of v. Raises ValueError for shapes it cannot take."""
    (B, H, K), V = q.shape, v.shape[-1]
    _check(S_pool, rows, (B, H, K, V), lower_bound, tuning)
    args = (*rows, q, k, v, *gates, S_pool)
    o, S_pool = pl.pallas_call(
        functools.partial(_step_kernel, tuning=tuning, lower_bound=lower_bound),
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(S_pool.shape, S_pool.dtype)],
        grid=(V // (tuning.rows * tuning.tiles), H, B),
        input_output_aliases={len(args) - 1: 1},
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="kda_step",
    )(*args)
    return S_pool, o


def _check(S_pool: Array, rows: Rows, sizes: tuple[int, int, int, int], lower_bound: float, tuning: Tuning) -> None:
    B, H, K, V = sizes
    if S_pool.dtype != jnp.float32 or S_pool.shape[1:] != (H, V, K):
        raise ValueError(f"S_pool={S_pool.dtype}{list(S_pool.shape)}: allowed is float32[slots, {H}, {V}, {K}]")
    for name, a in rows._asdict().items():
        if a.dtype != jnp.int32 or a.shape != (B,):
            raise ValueError(f"{name}={a.dtype}{list(a.shape)}: allowed is int32[{B}]")
    for name, value in (("K", K), ("V", V), *tuning._asdict().items()):
        if value & (value - 1) or value < 1:
            raise ValueError(f"{name}={value}: allowed are powers of two")
    if tuning.rows * tuning.tiles > V:
        raise ValueError(f"rows * tiles={tuning.rows * tuning.tiles}: allowed is at most V, {V}")
    if tuning.rows * K < 32 * tuning.warps:  # threads would share elements, and one could read what another has written
        raise ValueError(
            f"warps={tuning.warps}: allowed are at most {tuning.rows * K // 32}, one thread an element of a tile"
        )
    if lower_bound > 0:
        raise ValueError(f"lower_bound={lower_bound}: allowed is at most 0")


# -- with convolution and gated norm -------------------------------------------------------------------------------


def _layer_kernel(
    slots_ref, computed_ref, qkv_ref, taps_ref, gate_ref, norm_ref, f_ref, b_ref, A_ref, bias_ref, conv_ref, S_ref,
    o_ref, v_ref, conv_out_ref, S_out_ref, *, tuning: Tuning, lower_bound: float, eps: float, interpret: bool,
):  # fmt: skip
    h, row = pl.program_id(0), pl.program_id(1)
    head = _head(row, h, slots_ref, computed_ref, S_ref, S_out_ref)
    V, K = S_ref.shape[2:]

    def barrier() -> None:
        """Threads may hold the same elements of a vector: none may write what another has still to read."""
        if not interpret:
            plt.debug_barrier()

    def history(ref: jax.Ref, i: int, channels: slice | pl.Slice) -> jax.Ref:
        return ref.at[head.slot, jnp.int32(i), h, channels]

    streams = [pl.ds(start, size) for start, size in ((0, K), (K, K), (2 * K, V))]
    windows = [
        [*(_read(history(conv_ref, i, c), head.begun) for i in range(conv_ref.shape[1])), qkv_ref[row, h, c]]
        for c in streams
    ]
    S = head.state(0, tuning.rows)

    def convolved(window: list[Array], c: slice | pl.Slice) -> Array:
        y = sum(taps_ref[i, h, c] * x.astype(jnp.float32) for i, x in enumerate(window))
        return (y * _sigmoid(y)).astype(qkv_ref.dtype)

    q, k, v = map(convolved, windows, streams)
    v_ref[row, h, :] = v
    barrier()
    for window, c in zip(windows, streams, strict=True):
        for i, x in enumerate(window[1:]):
            _write(history(conv_out_ref, i, c), x, head.owned)
    decay = _decay(f_ref[row, h, :], A_ref[h], bias_ref[h, :], lower_bound)
    q, k = _normalise(q) * K**-0.5, _normalise(k)
    _advance(head, S, q, k, decay, _sigmoid(b_ref[row, h]), v_ref, o_ref, 0, tuning)
    barrier()
    o = o_ref[row, h, :].astype(jnp.float32)
    o = o * lax.rsqrt(jnp.sum(o * o) / V + eps) * norm_ref[...] * _sigmoid(gate_ref[row, h, :])
    barrier()
    o_ref[row, h, :] = o.astype(o_ref.dtype)


def layer_step(
    conv_pool: Float[Array, "slots W-1 H 2K+V"],
    S_pool: Float[Array, "slots H V K"],
    x: Layer,
    gates: Gates,
    rows: Rows,
    eps: float,
    lower_bound: float = -5.0,
    tuning: Tuning = LAYER_STEP,
    interpret: bool = False,
) -> tuple[Float[Array, "slots W-1 H 2K+V"], Float[Array, "slots H V K"], Float[Array, "B H V"]]:
    """Both pools, in place if donated, and the outputs after norm and gate, in the dtype of x.qkv.

    One program a head and row: a head's norm needs all its outputs, and its history may move on only once all have read
    it. A program has no memory of its own, so v goes through an output that is dropped, and o through the output.
    """
    (B, H, V), K = x.out_gate.shape, gates.f.shape[-1]
    _check(S_pool, rows, (B, H, K, V), lower_bound, tuning)
    if tuning.rows * tuning.tiles != V:
        raise ValueError(f"rows * tiles={tuning.rows * tuning.tiles}: allowed is V, {V}")
    if conv_pool.shape != (S_pool.shape[0], x.taps.shape[0] - 1, H, 2 * K + V):
        raise ValueError(f"conv_pool={list(conv_pool.shape)}: allowed is [slots, W-1, H, {2 * K + V}]")
    args = (*rows, *x, *gates, conv_pool, S_pool)
    vectors = [jax.ShapeDtypeStruct((B, H, V), x.qkv.dtype)] * 2
    kernel = functools.partial(_layer_kernel, tuning=tuning, lower_bound=lower_bound, eps=eps, interpret=interpret)
    o, _, conv_pool, S_pool = pl.pallas_call(
        kernel,
        out_shape=[*vectors, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (conv_pool, S_pool))],
        grid=(H, B),
        input_output_aliases={len(args) - 2: 2, len(args) - 1: 3},
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="kda_layer_step",
    )(*args)
    return conv_pool, S_pool, o
