"""KDA for speculation: `verify` runs several tokens a row and leaves the pools alone, `replay` moves them on by those accepted.

What the arrays mean, and what happens to a row without a slot or without a token before, is as in `kda_decode`. A token is
replayed from its record, u and k, without the state: S <- S diag(a) + u kᵀ.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from k3jax.pallas import kda_decode as decode
from k3jax.pallas.common import launch
from k3jax.pallas.kda_decode import ConvPool, Gates, Layer, Rows, StatePool, Tuning

MAX_TOKENS = 8  # a row


class Records(NamedTuple):
    """What `replay` needs of each token beside the inputs that the caller has: q, k, v and f as they were."""

    u: Float[Array, "B N H V"]  # float32; 0 after a row's last token
    k: Float[Array, "B N H K"]  # float32, convolved and normalised


def refuse(
    conv_pool: Any, S_pool: Any, x: Layer, gates: Gates, rows: Rows, counts: Any, lower_bound: float | None,
    tuning: Tuning | None = None, records: Records | None = None,
) -> str | None:  # fmt: skip
    """Why these arrays (abstract ones will do) cannot be taken, in one line, or None. `counts`: lengths or accepted."""
    if reason := decode.refuse(conv_pool, S_pool, x, gates, rows, lower_bound, tuning, axes="B, N, H, K"):
        return reason
    name = "accepted" if records is not None else "lengths"
    wanted = [(name, counts, x.q.shape[:1], ("int32",))]
    if records is not None:
        wanted += [("records.u", records.u, x.v.shape, ("float32",)), ("records.k", records.k, x.k.shape, ("float32",))]
    if reason := decode.mismatch(wanted):
        return reason
    if not 1 <= (N := x.q.shape[1]) <= MAX_TOKENS:
        return f"N={N}: allowed are 1 to {MAX_TOKENS} tokens a row"
    return None


def _verify_kernel(
    rows, lengths, x, gates, conv, S, o_ref, u_ref, k_ref, *, eps: float, lower_bound: float | None
) -> None:
    h, row = pl.program_id(0), pl.program_id(1)
    place, N, V = decode.place_of(rows, row, h, S.shape[0]), o_ref.shape[1], S.shape[2]
    count, raw = jnp.where(place.owned, jnp.clip(lengths[row], 0, N), 0), (x.q, x.k, x.v)

    def one(t: Array, carry: tuple[Array, list[list[Array]]]) -> tuple[Array, list[list[Array]]]:
        (S, past), at = carry, (row, t, h)
        norm, out_gate = x.norm[...], x.out_gate[*at, :]
        decay, beta = decode.decay_of(gates, at, lower_bound), decode.beta_of(gates, at)
        windows = [[*held, ref[*at, :]] for held, ref in zip(past, raw, strict=True)]
        q, k, v = (decode.convolved(window, taps, h) for window, taps in zip(windows, x.taps, strict=True))
        token = decode.token_of(q, k, decay, beta)
        S, u, o = token.step(S, v)
        u_ref[*at, :], k_ref[*at, :] = u, token.k
        o_ref[*at, :] = decode.gated_norm(o.astype(o_ref.dtype), norm, out_gate, eps).astype(o_ref.dtype)
        return S, [window[1:] for window in windows]

    def padding(t: Array, _: None) -> None:
        for ref in (o_ref, u_ref, k_ref):
            ref[row, t, h, :] = jnp.zeros(ref.shape[3:], ref.dtype)

    past = [place.history(conv, c) for c in decode.channels_of(raw)]
    lax.fori_loop(0, count, one, (place.state(S, 0, V).astype(jnp.float32), past))
    lax.fori_loop(count, N, padding, None)


def verify(
    conv_pool: ConvPool, S_pool: StatePool, x: Layer, gates: Gates, rows: Rows, lengths: Int[Array, "B"], eps: float,
    lower_bound: float | None, *, warps: int = 8, interpret: bool = False,
) -> tuple[Float[Array, "B N H V"], Records]:  # fmt: skip
    """What `kda_decode.layer_step` would give for a row's first `lengths` of N tokens, one after another, and their records.

    The pools are only read. Tokens from `lengths` (int32, 0 to N) on may be NaN, and their outputs and records are 0.
    Raises ValueError with what `refuse` says.
    """
    V, K = x.v.shape[-1], x.k.shape[-1]
    warps = min(warps, V * K // 32)
    decode.require(refuse(conv_pool, S_pool, x, gates, rows, lengths, lower_bound, Tuning(V, warps)))
    B, N, H, _ = x.v.shape
    vectors = [((B, N, H, V), x.v.dtype), ((B, N, H, V), jnp.float32), ((B, N, H, K), jnp.float32)]
    o, *records = launch(
        functools.partial(_verify_kernel, eps=eps, lower_bound=lower_bound),
        out_shape=[jax.ShapeDtypeStruct(*vector) for vector in vectors],
        grid=(H, B), warps=warps, interpret=interpret, name="kda_verify",
    )(rows, lengths, x, gates, conv_pool, S_pool)  # fmt: skip
    return o, Records(*records)


def _replay_kernel(
    rows, accepted, raw, gates, records, conv, S, conv_out, S_out,
    *, tuning: Tuning, lower_bound: float | None, interpret: bool,
) -> None:  # fmt: skip
    i, h, row = (pl.program_id(axis) for axis in range(3))
    place, n, N, kept = decode.place_of(rows, row, h, S.shape[0]), tuning.rows, records.u.shape[1], conv.shape[1]
    count, part = jnp.where(place.owned, jnp.clip(accepted[row], 0, N), 0), pl.ds(i * n, n)

    @pl.when(count > 0)
    def _() -> None:
        def one(t: Array, S: Array) -> Array:
            decay = decode.decay_of(gates, (row, t, h), lower_bound)
            return S * decay[None, :] + records.u[row, t, h, part][:, None] * records.k[row, t, h, :][None, :]

        new = lax.fori_loop(0, count, one, place.state(S, i * n, n).astype(jnp.float32))
        S_out[place.slot, h, part, :] = new.astype(S_out.dtype)

    @pl.when((count > 0) & (i == 0))
    def _() -> None:
        def input_at(ref: Any, c: Any, t: Array) -> Array:
            """The raw input of token t; negative ones are in the history, the last at -1."""
            old = decode.read(place.input(conv, jnp.minimum(t, -1) + kept, c), place.begun & (t < 0))
            return jnp.where(t < 0, old, decode.read(ref.at[row, jnp.maximum(t, 0), h, :], t >= 0))

        streams = list(zip(raw, decode.channels_of(raw), strict=True))
        moved = [[input_at(ref, c, count - kept + j) for j in range(kept)] for ref, c in streams]
        decode.barrier(interpret)
        for inputs, (_, c) in zip(moved, streams, strict=True):
            place.remember(conv_out, c, inputs)


def replay(
    conv_pool: ConvPool, S_pool: StatePool, x: Layer, gates: Gates, records: Records, rows: Rows,
    accepted: Int[Array, "B"], lower_bound: float | None, *, tuning: Tuning | None = None, interpret: bool = False,
) -> tuple[ConvPool, StatePool]:  # fmt: skip
    """Both pools, in place if donated, after each row's first `accepted` (int32, 0 to N) of the tokens that `verify` saw.

    x, gates and rows as `verify` had them: the records hold no raw input. A row of which nothing is accepted stays as it is.
    Raises ValueError with what `refuse` says.
    """
    tuning = tuning or Tuning(min(x.v.shape[-1], 32), 4)
    decode.require(refuse(conv_pool, S_pool, x, gates, rows, accepted, lower_bound, tuning, records))
    B, _, H, V = x.v.shape
    conv_pool, S_pool = decode.launch_in_place(
        functools.partial(_replay_kernel, tuning=tuning, lower_bound=lower_bound, interpret=interpret),
        (rows, accepted, (x.q, x.k, x.v), gates, records), (conv_pool, S_pool),
        grid=(V // tuning.rows, H, B), warps=tuning.warps, interpret=interpret, name="kda_replay",
    )  # fmt: skip
    return conv_pool, S_pool
