"""KDA prefill of packed rows: chunks of 32 tokens at once (`kda_prepare`), then the state through them (`kda_scan`)."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from k3jax.pallas.kda_prepare import CHUNK, LARGEST_EXPONENT, Precision, Raw, Unit, chunks_of, prepare
from k3jax.pallas.kda_scan import Rows, Snapshots, Tuning, scan


def tuning_of(H: int, V: int, B: int, T: int) -> Tuning:
    """By what was timed on an H200 (benchmarks/results/notes.md), by the programs that a launch would have."""
    programs = H * B * max(V // 64, 1)
    if programs >= 96:
        return Tuning()
    return Tuning(segments=min(4 if T // B < 8192 else 8, 192 // programs)) if T // B >= 4096 else Tuning(rows=16)


def refuse(x: Raw, S_pool: Array, rows: Rows, lower_bound: float | None, precision: str = "default") -> str | None:
    """Why these shapes, dtypes and options cannot be taken; None if they can."""
    (T, H, K), V, B = x.q.shape, x.v.shape[-1], rows.slots.shape[0]
    of_token, of_head = (
        dict.fromkeys("qkf", (T, H, K)) | {"v": (T, H, V), "b": (T, H)},
        {"A_log": (H,), "dt_bias": (H, K)},
    )
    for name, shape in (of_token | of_head).items():
        if (found := getattr(x, name).shape) != shape:
            return f"{name}={list(found)}: allowed is {list(shape)}"
    if K < 16 or K & (K - 1):
        return f"K={K}: allowed are powers of two from 16 on"
    if S_pool.dtype != jnp.float32 or S_pool.shape[1:] != (H, V, K):
        return f"S_pool={S_pool.dtype}{list(S_pool.shape)}: allowed is float32[slots, {H}, {V}, {K}]"
    for name, size in (("starts", B + 1), ("slots", B), ("num_computed", B)):
        if (a := getattr(rows, name)).dtype != jnp.int32 or a.shape != (size,):
            return f"{name}={a.dtype}{list(a.shape)}: allowed is int32[{size}]"
    if lower_bound is not None and not -2 * LARGEST_EXPONENT / CHUNK <= lower_bound <= 0:
        return f"lower_bound={lower_bound}: allowed are {-2 * LARGEST_EXPONENT / CHUNK} to 0, or None"
    if precision not in ("default", "high", "highest"):
        return f"precision={precision!r}: allowed are 'default', 'high' and 'highest'"
    return None


def prefill(
    S_pool: Float[Array, "slots H V K"],
    x: Raw,
    rows: Rows,
    lower_bound: float | None = -5.0,
    snapshots: Snapshots | None = None,
    precision: Precision = "default",
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "slots H V K"], Float[Array, "T H V"]]:
    """Packed rows, each continuing the state in its slot, in place if the pool is donated; outputs in the dtype of v.

    A row without tokens keeps its state. Outputs of tokens after the last row are 0. `precision`: products of bfloat16, of
    TF32 ("high") or of float32 as three of TF32 ("highest"). Raises ValueError for what `refuse` names.
    """
    if reason := refuse(x, S_pool, rows, lower_bound, precision):
        raise ValueError(reason)
    (T, H, _), V, B = x.q.shape, x.v.shape[-1], rows.slots.shape[0]
    tuning, unit = tuning or tuning_of(H, V, B, T), Unit(precision, interpret)
    tuning = tuning._replace(rows=min(tuning.rows, max(16, pl.next_power_of_2(V))))
    chunks = chunks_of(rows.starts, T)
    work = prepare(x, chunks, lower_bound, unit, tuning.prepare_warps)
    return scan(S_pool, work, x.v, chunks, rows, snapshots, tuning, lower_bound is not None, unit)
