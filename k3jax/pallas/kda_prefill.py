"""KDA prefill of packed rows: chunks of 32 tokens at once (`kda_prepare`), then the state through them (`kda_scan`).

Both have a second form in Mosaic GPU, of which the tuning is a type of its own.
"""

from __future__ import annotations

from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from k3jax.pallas import kda_prepare_mosaic, kda_scan_mosaic
from k3jax.pallas.kda_prepare import CHUNK, LARGEST_EXPONENT, Precision, Raw, Unit, chunks_of, prepare
from k3jax.pallas.kda_scan import Rows, Snapshots, Tuning, scan

Mosaic = kda_scan_mosaic.Tuning


def choose(x: Raw, B: int, precision: Precision, mosaic: bool) -> Tuning | Mosaic:
    """By what was timed on an H200 (benchmarks/results/notes.md), by the programs that a launch would have."""
    T, H, V = x.v.shape
    programs = H * B * max(V // 64, 1)
    if mosaic and H * B * (V // 128) >= 48 and T >= 512:  # fewer blocks or tokens are faster in Triton
        return Mosaic()
    if programs >= 96:
        tuning = Tuning()
    elif T // B >= 4096:
        tuning = Tuning(segments=min(4 if T // B < 8192 else 8, 192 // programs))
    else:
        tuning = Tuning(rows=16)
    # With products of float32 the scan's registers would spill.
    return tuning._replace(rows=min(tuning.rows, 32)) if precision == "highest" else tuning


def refuse(
    x: Raw, S_pool: Array, rows: Rows, lower_bound: float | None, snapshots: Snapshots | None = None,
    precision: str = "default", tuning: Tuning | Mosaic | None = None,
) -> str | None:  # fmt: skip
    """Why these arrays (abstract ones will do) and options cannot be taken, in one line, or None."""
    if x.q.ndim != 3 or 0 in x.q.shape or x.v.ndim != 3 or rows.slots.ndim != 1 or not rows.slots.shape[0]:
        return f"q={list(x.q.shape)}, v={list(x.v.shape)}, slots={list(rows.slots.shape)}: allowed is [T, H, K], [T, H, V], [B]"
    (T, H, K), V, B = x.q.shape, x.v.shape[-1], rows.slots.shape[0]
    if not 16 <= K <= 128 or K & (K - 1):
        return f"K={K}: allowed are powers of two from 16 to 128"
    if S_pool.ndim != 4 or not S_pool.shape[0]:
        return f"S_pool={list(S_pool.shape)}: allowed is [slots, H, V, K] with slots from 1"
    inputs, single, integer = ("float32", "bfloat16"), ("float32",), ("int32",)
    wanted = [
        *((name, getattr(x, name), (T, H, K), inputs) for name in ("q", "k", "f")), ("v", x.v, (T, H, V), inputs),
        ("b", x.b, (T, H), inputs), ("A_log", x.A_log, (H,), single), ("dt_bias", x.dt_bias, (H, K), single),
        ("S_pool", S_pool, (*S_pool.shape[:1], H, V, K), single), ("starts", rows.starts, (B + 1,), integer),
        ("slots", rows.slots, (B,), integer), ("num_computed", rows.num_computed, (B,), integer),
    ]  # fmt: skip
    if snapshots is not None:
        M = max(1, *snapshots.after.shape[1:])
        wanted += [(f"snapshots.{name}", a, (B, M), integer) for name, a in snapshots._asdict().items()]
    for name, a, shape, dtypes in wanted:
        if a.shape != shape or str(a.dtype) not in dtypes:
            return f"{name}={a.dtype}{list(a.shape)}: allowed is {' or '.join(dtypes)}{list(shape)}"
    lowest = -2 * LARGEST_EXPONENT / CHUNK
    if lower_bound is not None and not lowest <= lower_bound <= 0:
        return f"lower_bound={lower_bound}: allowed are {lowest} to 0, or None"
    if precision not in ("default", "high", "highest"):
        return f"precision={precision!r}: allowed are 'default', 'high' and 'highest'"
    if isinstance(tuning, Mosaic):
        return _refuse_mosaic(x, lower_bound, precision, tuning)
    for name, value in (tuning or Tuning())._asdict().items():
        least = 16 if name == "rows" else 1
        if value < least or (name in ("rows", "prepare_warps", "scan_warps") and value & (value - 1)):
            return f"tuning.{name}={value}: allowed are {'powers of two' if name != 'segments' else 'numbers'} from {least}"
    return None


def _refuse_mosaic(x: Raw, lower_bound: float | None, precision: str, tuning: Mosaic) -> str | None:
    return kda_scan_mosaic.refuse(x.v, tuning) or kda_prepare_mosaic.refuse(x, lower_bound, precision)


def prefill(
    S_pool: Float[Array, "slots H V K"],
    x: Raw,
    rows: Rows,
    lower_bound: float | None,
    snapshots: Snapshots | None = None,
    precision: Precision = "default",
    tuning: Tuning | Mosaic | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "slots H V K"], Float[Array, "T H V"]]:
    """Packed rows, each continuing the state in its slot, in place if the pool is donated; outputs in the dtype of v.

    A row without tokens keeps its state. Outputs of tokens after the last row are 0. `precision`: products of bfloat16, of
    TF32 ("high") or of float32 as three of TF32 ("highest"). Raises ValueError for what `refuse` names.
    """
    if reason := refuse(x, S_pool, rows, lower_bound, snapshots, precision, tuning):
        raise ValueError(reason)
    (T, _, V), B = x.v.shape, rows.slots.shape[0]
    if tuning is None:  # interpreted only if asked for: jax 0.10 cannot
        mosaic = not interpret and _refuse_mosaic(x, lower_bound, precision, Mosaic()) is None
        tuning = choose(x, B, precision, mosaic)
    chunks = chunks_of(rows.starts, T)
    if isinstance(tuning, Mosaic):
        assert lower_bound is not None
        work = kda_prepare_mosaic.prepare(x, chunks, lower_bound, interpret)
        return kda_scan_mosaic.scan(S_pool, work, x.v, chunks, rows, snapshots, tuning, interpret)
    tuning, unit = tuning._replace(rows=min(tuning.rows, max(16, pl.next_power_of_2(V)))), Unit(precision, interpret)
    work = prepare(x, chunks, lower_bound, unit, tuning.prepare_warps)
    return scan(S_pool, work, x.v, chunks, rows, snapshots, tuning, lower_bound is not None, unit)
