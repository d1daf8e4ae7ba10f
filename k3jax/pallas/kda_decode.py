"""KDA decode: a layer between its projections, one token a row, with its memory in pools, by slot.

`layer_step` moves the pools on where they are. With k and q normalised, a = exp(g) and S a head's state, [V, K]:

    u = beta (v - S (a k))        o = K^-1/2 (S (a q) + u (k·q))        S <- S diag(a) + u kᵀ

Both sums run over the old state, so neither waits for the other. A head's norm needs all its outputs, and its history may
move on only once all have read it. So there are two forms: one program a head, which goes through V part by part; or,
where heads are too few to fill a GPU, one program a part, and norm and history in a second launch.

float32 inside; convolution and recurrence round their results to the inputs' dtype, as the XLA form does, and a state is
rounded to its pool's dtype once, when it is written.
A pool in bfloat16 halves the traffic. After 4,000 tokens of 128 channels, keys correlated by a half, its outputs are 8e-4
from float64 (relative) and the state 2e-3 with gates of all sizes; 7e-2 and 5e-2 where nothing decays (g = -1e-6 in every
channel): then only the delta rule mends a rounding. In float32 both are 1e-7 and 1e-5 (benchmarks/results, kda_decode_drift).

A row whose slot is not in the pool is skipped: its inputs may be NaN, it leaves no trace, and its outputs are 0. A row that
has computed nothing starts from zero, whatever its slot holds. Slots in the pool must differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3jax.pallas.common import launch

_L2_EPS = 1e-6  # added to the sum of squares, inside the root

ConvPool = Float[Array, "slots W-1 H 2K+V"]  # raw inputs of q, k and v, oldest first, in the inputs' dtype
StatePool = Float[Array, "slots H V K"]  # float32 or bfloat16


class Rows(NamedTuple):
    """Where each row's memory is."""

    slots: Int[Array, "B"]  # int32
    num_computed: Int[Array, "B"]  # int32, tokens that the slot's memory stands for


class Layer(NamedTuple):
    """What the projections give beside the gates, and the layer's parameters. `kda_verify` has an axis N after B."""

    q: Float[Array, "B H K"]  # before the convolution
    k: Float[Array, "B H K"]
    v: Float[Array, "B H V"]
    taps: tuple[Float[Array, "H K W"], Float[Array, "H K W"], Float[Array, "H V W"]]  # float32, oldest input first
    out_gate: Float[Array, "B H V"]  # before its sigmoid
    norm: Float[Array, "V"]  # float32


class Gates(NamedTuple):
    """What the projections give for decay and beta, and the parameters of the decay. `kda_verify` has an axis N after B."""

    f: Float[Array, "B H K"]  # g = bound sigmoid(exp(A_log) (f + dt_bias)) or -exp(A_log) softplus(f + dt_bias)
    b: Float[Array, "B H"]  # beta = sigmoid(b)
    A_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]


class Tuning(NamedTuple):
    """Launch parameters: a part of the state is `rows` of the V of a head."""

    rows: int
    warps: int
    split: bool = False  # a program a part, not a head


def choose(programs: int, V: int, state: DTypeLike) -> Tuning:
    """By what was timed on an H200, by heads times rows: within 3 % of the fastest."""
    single = jnp.dtype(state) == jnp.float32
    if single and programs <= 100:
        return Tuning(16, 4, split=True)
    return Tuning(min(V, 32), 4) if programs <= (800 if single else 700) else Tuning(16, 4)


Wanted = tuple[str, Any, Sequence[int], Sequence[str]]  # an array's name, the array, its shape and its dtypes
ANY_FLOAT = ("float32", "bfloat16")


def mismatch(wanted: Iterable[Wanted]) -> str | None:
    """The first array of another shape or dtype, in one line."""
    for name, a, shape, dtypes in wanted:
        if list(a.shape) != list(shape):
            return f"{name}={list(a.shape)}: allowed is {list(shape)}"
        if str(a.dtype) not in dtypes:
            return f"{name}={a.dtype}: allowed is {' or '.join(dtypes)}"
    return None


def refuse(
    conv_pool: Any, S_pool: Any, x: Layer, gates: Gates, rows: Rows, lower_bound: float | None,
    tuning: Tuning | None = None, axes: str = "B, H, K",
) -> str | None:  # fmt: skip
    """Why these arrays (abstract ones will do) cannot be taken, in one line, or None. `axes`: those of x.q."""
    if len(x.q.shape) != len(axes.split()):
        return f"x.q={list(x.q.shape)}: allowed is [{axes}]"
    (*lead, H, K), V, W = x.q.shape, x.v.shape[-1], x.taps[0].shape[-1]
    ours, single = (str(x.q.dtype),), ("float32",)
    wanted: list[Wanted] = [
        ("x.q", x.q, (*lead, H, K), ANY_FLOAT), ("x.k", x.k, (*lead, H, K), ours), ("x.v", x.v, (*lead, H, V), ours),
        *((f"x.taps[{i}]", a, (H, C, W), single) for i, (a, C) in enumerate(zip(x.taps, (K, K, V), strict=True))),
        ("x.out_gate", x.out_gate, (*lead, H, V), ANY_FLOAT), ("x.norm", x.norm, (V,), ANY_FLOAT),
        ("gates.f", gates.f, (*lead, H, K), ANY_FLOAT), ("gates.b", gates.b, (*lead, H), ANY_FLOAT),
        ("gates.A_log", gates.A_log, (H,), ANY_FLOAT), ("gates.dt_bias", gates.dt_bias, (H, K), ANY_FLOAT),
        ("conv_pool", conv_pool, (S_pool.shape[0], W - 1, H, 2 * K + V), ours),
        ("S_pool", S_pool, (S_pool.shape[0], H, V, K), ANY_FLOAT),
        *((f"rows.{name}", a, lead[:1], ("int32",)) for name, a in rows._asdict().items()),
    ]  # fmt: skip
    if reason := mismatch(wanted):
        return reason
    for name, value in (("K", K), ("V", V)):
        if value & (value - 1) or value < 16:
            return f"{name}={value}: allowed are powers of two from 16"
    if W < 2:
        return f"W={W}: allowed are 2 or more taps"
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        return f"lower_bound={lower_bound}: allowed is a negative number or None"
    if tuning is not None and (tuning.rows < 1 or V % tuning.rows):
        return f"tuning.rows={tuning.rows}: allowed are divisors of V={V}"
    # Threads would share elements of the state, and one could read what another has written.
    if tuning is not None and not 1 <= tuning.warps <= (most := tuning.rows * K // 32):
        return f"tuning.warps={tuning.warps}: allowed are 1 to {most}, one thread an element of the state"
    return None


def require(reason: str | None) -> None:
    """Raises ValueError with the reason, if there is one."""
    if reason:
        raise ValueError(reason)


# -- inside a program ----------------------------------------------------------------------------------------------
# A kernel sees the NamedTuples above with references in place of arrays.


def wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(wide(x))


def read(ref: Any, valid: Array) -> Array:
    """The values, or 0 without looking."""
    return plt.load(ref, mask=jnp.broadcast_to(valid, ref.shape), other=0)


def barrier(interpret: bool) -> None:
    """Several threads may hold the same element of a vector: none may write where another has still to read."""
    if not interpret:
        plt.debug_barrier()


class Place(NamedTuple):
    """Where one head of one row has its memory."""

    slot: Array  # 0 for a row without one
    h: Array
    owned: Array  # whether the row has a slot
    begun: Array  # and something in it

    def state(self, S: Any, first: Array | int, rows: int) -> Array:
        """Some rows of it; 0 from V on."""
        return read(S.at[self.slot, self.h, pl.ds(first, rows), :], self.begun & (first < S.shape[2]))

    def input(self, conv: Any, i: int | Array, channels: Any) -> Any:
        """The reference to one of the inputs in the history."""
        return conv.at[self.slot, jnp.int32(i), self.h, channels]

    def history(self, conv: Any, channels: Any) -> list[Array]:
        return [read(self.input(conv, i, channels), self.begun) for i in range(conv.shape[1])]

    def remember(self, conv: Any, channels: Any, inputs: Sequence[Array]) -> None:
        for i, value in enumerate(inputs):
            self.input(conv, i, channels)[...] = value


def place_of(rows: Rows, row: Array, h: Array, slots: int) -> Place:
    slot, computed = rows.slots[row], rows.num_computed[row]
    owned = (slot >= 0) & (slot < slots)
    return Place(jnp.where(owned, slot, 0), h, owned, owned & (computed > 0))


def channels_of(raw: Sequence[Any]) -> list[Any]:
    """Those of q, k and v in a head's history."""
    K, V = raw[0].shape[-1], raw[2].shape[-1]
    return [pl.ds(0, K), pl.ds(K, K), pl.ds(2 * K, V)]


def convolved(window: Sequence[Array], taps: Any, h: Array, part: Any = slice(None)) -> Array:
    """Of a window's inputs, oldest first; `part` says which of the stream's channels they are."""
    y = functools.reduce(jnp.add, (taps[h, part, jnp.int32(i)] * wide(x) for i, x in enumerate(window)))
    return (y * _sigmoid(y)).astype(window[-1].dtype)


def decay_of(gates: Gates, at: tuple[Array, ...], lower_bound: float | None) -> Array:
    f, A_log, dt_bias = gates.f[*at, :], gates.A_log[at[-1]], gates.dt_bias[at[-1], :]
    rate, z = jnp.exp(wide(A_log)), wide(f) + wide(dt_bias)
    if lower_bound is None:  # softplus; the logarithm's argument stays between 1 and 2
        return jnp.exp(-rate * (jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))))
    return jnp.exp(lower_bound * _sigmoid(rate * z))


def beta_of(gates: Gates, at: tuple[Array, ...]) -> Array:
    return _sigmoid(gates.b[at])


def normalised(x: Array) -> Array:
    x = wide(x)
    return x * lax.rsqrt(jnp.sum(x * x) + _L2_EPS)


class Token(NamedTuple):
    """What one token brings to the state."""

    k: Array  # normalised
    decay: Array
    beta: Array
    decayed_k: Array
    decayed_q: Array
    qk: Array  # q·k

    def step(self, S: Array, v: Array) -> tuple[Array, Array, Array]:
        """Some rows of the new state, and their u and o."""
        S = wide(S)
        u = self.beta * (wide(v) - jnp.sum(S * self.decayed_k[None, :], axis=1))
        o = jnp.sum(S * self.decayed_q[None, :], axis=1) + u * self.qk
        return S * self.decay[None, :] + u[:, None] * self.k[None, :], u, o


def token_of(q: Array, k: Array, decay: Array, beta: Array) -> Token:
    q, k = normalised(q) * q.shape[-1] ** -0.5, normalised(k)
    return Token(k, decay, beta, decay * k, decay * q, jnp.sum(q * k))


def gated_norm(o: Array, norm: Array, out_gate: Array, eps: float) -> Array:
    o = wide(o)
    return o * lax.rsqrt(jnp.sum(o * o) / o.shape[0] + eps) * wide(norm) * _sigmoid(out_gate)


def _windows(x: Layer, conv: Any, at: tuple[Array, Array], place: Place) -> list[list[Array]]:
    raw = x.q, x.k, x.v
    return [[*place.history(conv, c), ref[*at, :]] for ref, c in zip(raw, channels_of(raw), strict=True)]


def _move_on(x: Layer, conv: Any, windows: list[list[Array]], place: Place) -> None:
    for window, c in zip(windows, channels_of((x.q, x.k, x.v)), strict=True):
        place.remember(conv, c, window[1:])


def _head_kernel(
    rows, x, gates, conv, S, o_ref, v_ref, conv_out, S_out,
    *, tuning: Tuning, eps: float, lower_bound: float | None, interpret: bool,
) -> None:  # fmt: skip
    h, row = pl.program_id(0), pl.program_id(1)
    at, place, n = (row, h), place_of(rows, row, h, S.shape[0]), tuning.rows

    @pl.when(~place.owned)
    def _() -> None:
        o_ref[*at, :] = jnp.zeros(o_ref.shape[2:], o_ref.dtype)

    @pl.when(place.owned)
    def _() -> None:
        # All loads come before the barrier, so that they wait for memory together.
        norm, out_gate = x.norm[...], x.out_gate[*at, :]
        decay, beta = decay_of(gates, at, lower_bound), beta_of(gates, at)
        windows = _windows(x, conv, at, place)
        first = place.state(S, 0, n)
        q, k, v = (convolved(window, taps, h) for window, taps in zip(windows, x.taps, strict=True))
        v_ref[*at, :] = v  # registers have no slices: v goes through an output that is dropped, o through its own
        barrier(interpret)
        _move_on(x, conv_out, windows, place)
        token = token_of(q, k, decay, beta)

        def step(i: Array, S_part: Array) -> Array:
            ahead, part = place.state(S, (i + 1) * n, n), pl.ds(i * n, n)
            new, _, o = token.step(S_part, v_ref[*at, part])
            S_out[place.slot, h, part, :] = new.astype(S_out.dtype)
            o_ref[*at, part] = o.astype(o_ref.dtype)
            return ahead

        lax.fori_loop(0, S.shape[2] // n, step, first)
        barrier(interpret)
        o = o_ref[*at, :]
        barrier(interpret)
        o_ref[*at, :] = gated_norm(o, norm, out_gate, eps).astype(o_ref.dtype)


def _part_kernel(rows, x, gates, conv, S, o_ref, S_out, *, tuning: Tuning, lower_bound: float | None) -> None:
    """The recurrence. Neither norm nor history: another program may still read what this one would write."""
    i, h, row = (pl.program_id(axis) for axis in range(3))
    at, place, n = (row, h), place_of(rows, row, h, S.shape[0]), tuning.rows
    part = pl.ds(i * n, n)

    @pl.when(place.owned)
    def _() -> None:
        decay, beta = decay_of(gates, at, lower_bound), beta_of(gates, at)
        S_part = place.state(S, i * n, n)
        of_q, of_k, of_v = channels_of((x.q, x.k, x.v))
        q = convolved([*place.history(conv, of_q), x.q[*at, :]], x.taps[0], h)
        k = convolved([*place.history(conv, of_k), x.k[*at, :]], x.taps[1], h)
        v = convolved([*place.history(conv, pl.ds(of_v.start + i * n, n)), x.v[*at, part]], x.taps[2], h, part)
        new, _, o = token_of(q, k, decay, beta).step(S_part, v)
        S_out[place.slot, h, part, :] = new.astype(S_out.dtype)
        o_ref[*at, part] = o.astype(o_ref.dtype)


def _finish_kernel(rows, x, o, conv, o_out, conv_out, *, eps: float, interpret: bool) -> None:
    h, row = pl.program_id(0), pl.program_id(1)
    at, place = (row, h), place_of(rows, row, h, conv.shape[0])

    @pl.when(~place.owned)
    def _() -> None:
        o_out[*at, :] = jnp.zeros(o_out.shape[2:], o_out.dtype)

    @pl.when(place.owned)
    def _() -> None:
        windows = _windows(x, conv, at, place)
        o_out[*at, :] = gated_norm(o[*at, :], x.norm[...], x.out_gate[*at, :], eps).astype(o_out.dtype)
        barrier(interpret)
        _move_on(x, conv_out, windows, place)


def layer_step(
    conv_pool: ConvPool, S_pool: StatePool, x: Layer, gates: Gates, rows: Rows, eps: float,
    lower_bound: float | None, *, tuning: Tuning | None = None, interpret: bool = False,
) -> tuple[ConvPool, StatePool, Float[Array, "B H V"]]:  # fmt: skip
    """Both pools, in place if donated, and the outputs after norm and gate, in the inputs' dtype.

    Raises ValueError with what `refuse` says.
    """
    require(refuse(conv_pool, S_pool, x, gates, rows, lower_bound, tuning))
    B, H, V = x.v.shape
    tuning = tuning or choose(B * H, V, S_pool.dtype)
    if not tuning.split:
        kernel = functools.partial(_head_kernel, tuning=tuning, eps=eps, lower_bound=lower_bound, interpret=interpret)
        o, _, conv_pool, S_pool = launch_in_place(
            kernel, (rows, x, gates), (conv_pool, S_pool), (x.v, x.v),
            grid=(H, B), warps=tuning.warps, interpret=interpret, name="kda_layer_step",
        )  # fmt: skip
        return conv_pool, S_pool, o
    o, S_pool = launch_in_place(
        functools.partial(_part_kernel, tuning=tuning, lower_bound=lower_bound),
        (rows, x, gates, conv_pool), (S_pool,), (x.v,),
        grid=(V // tuning.rows, H, B), warps=tuning.warps, interpret=interpret, name="kda_layer_step_parts",
    )  # fmt: skip
    o, conv_pool = launch_in_place(
        functools.partial(_finish_kernel, eps=eps, interpret=interpret), (rows, x, o), (conv_pool,), (x.v,),
        grid=(H, B), warps=2, interpret=interpret, name="kda_layer_step_finish",
    )  # fmt: skip
    return conv_pool, S_pool, o


def launch_in_place(
    kernel: Callable[..., None], inputs: tuple[Any, ...], pools: tuple[Array, ...], like: tuple[Array, ...] = (),
    **options: Any,
) -> list[Array]:  # fmt: skip
    """Outputs in the shapes of `like`, then the pools, which are written where they are."""
    first = len(jax.tree.leaves(inputs))
    return launch(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*like, *pools)],
        aliases={first + i: len(like) + i for i in range(len(pools))},
        **options,
    )(*inputs, *pools)
