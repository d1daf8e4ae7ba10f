"""How the memory of the engine is split: slots for rows, slots for snapshots, latent pages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from k3jax import carry as carries
from k3jax import generate, sharding
from k3jax.carry import PAGE
from k3jax.config import DTYPES, K3Config

SHARE = 0.8  # of a device's free memory; the rest is for activations and compiled programs
UNKNOWN = 2 * 2**30  # bytes at most on a device that does not say how much memory it has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The engine's pools. Bytes are those of the arrays on one device, all layers together."""

    rows: int  # requests that run at the same time; each has a slot
    snapshots: int  # slots of the prefix cache
    pages: int  # latent pages of rows and snapshots; 0 in a model without MLA layers
    page: int  # tokens a page
    context: int  # tokens a request at most
    state_bytes: int  # a slot: KDA states, convolution histories and the length
    sampling_bytes: int  # a slot: counts, bias and the other arrays by which a row is sampled
    page_bytes: int  # a page
    memory: int  # bytes that they had to fit
    source: str  # where that number is from

    @property
    def slots(self) -> int:
        return self.rows + self.snapshots

    @property
    def slot_bytes(self) -> int:
        return self.state_bytes + self.sampling_bytes

    @property
    def bytes(self) -> int:
        """Of all pools; at most `memory`."""
        return self.slots * self.slot_bytes + self.pages * self.page_bytes

    def explain(self) -> dict[str, str]:
        """What each part takes and why, one line each: for `k3jax doctor`."""
        each = f"{_mib(self.slot_bytes)} each ({_mib(self.state_bytes)} state, {_mib(self.sampling_bytes)} sampling)"
        tokens = self.pages * self.page
        pages = "none: the model has no MLA layers"
        if self.page_bytes:
            pages = (
                f"{_mib(self.pages * self.page_bytes)}: {self.pages:,} of {self.page} tokens, {_mib(self.page_bytes)} each;"
                f" {tokens:,} tokens, {tokens / self.context:,.1f} times the context"
            )
        return {
            "memory": f"{_mib(self.bytes)} of {_mib(self.memory)}, {self.source}",
            "rows": f"{_mib(self.rows * self.slot_bytes)}: {self.rows:,} slots, {each}",
            "snapshots": f"{_mib(self.snapshots * self.slot_bytes)}: {self.snapshots:,} slots for the prefix cache",
            "pages": pages,
        }


def sizes(
    config: K3Config,
    memory: int | None,
    *,
    rows: int,
    page: int,
    dtype: str,
    snapshots: int | None = None,
    pages: int | None = None,
    device: Any = None,
    ranks: int = 1,
) -> Sizes:
    """Pools for `rows` rows that fit `memory` bytes on each of the devices, `ranks`, that share the model.

    memory: None takes a share of what is free on `device` (None: the first), or where it does not tell (a CPU) 2 GiB, and no more than
    a full context for every row. page: tokens a page. dtype: the trunk's. snapshots, pages: None lets memory decide; where
    both are given, memory=None is what they take.

    Rows come first, since they are asked for. A snapshot only saves a prefill, while a page lets a request run: so snapshots
    get at most a quarter of what the rows leave, and there is at most one a row. Pages get the rest, up to a full context
    for every slot, which is all that can be in use.

    Raises ValueError naming the field, the value and what is allowed, such as the least memory for what is asked for: one
    page where `pages` is None.
    """
    _check(config, memory, rows, page, dtype, snapshots, pages)
    state, sampling, latents = _bytes(config, page, dtype, ranks)
    slot, full = state + sampling, -(-config.max_position_embeddings // page) if latents else 0
    least = min(1, full) if pages is None else pages
    need = (rows + (snapshots or 0)) * slot + least * latents
    source = "as asked for"
    if memory is None and snapshots is not None and pages is not None:
        memory = need  # nothing is left to decide
    elif memory is None:
        memory, source = _budget(max(need, rows * (slot + full * latents)), device or jax.local_devices()[0])
    if memory < need:
        raise ValueError(
            f"memory={memory} ({source}): allowed are {need} bytes or more, for {rows} rows and {snapshots or 0} snapshots"
            f" of {slot} bytes and {least} pages of {latents} bytes"
        )
    left = memory - need
    if snapshots is None:
        snapshots = min(rows, left // slot if pages is not None else left // 4 // slot)
        left -= snapshots * slot
    if pages is None:
        pages = min(least + left // latents, (rows + snapshots) * full) if latents else 0
    return Sizes(
        rows=rows,
        snapshots=snapshots,
        pages=pages,
        page=page,
        context=config.max_position_embeddings,
        state_bytes=state,
        sampling_bytes=sampling,
        page_bytes=latents,
        memory=memory,
        source=source,
    )


def explained(config: K3Config, memory: int | None, rows: int) -> dict[str, str]:
    """Sizes.explain of an engine with these `rows`; or, where nobody said how much memory, that they do not fit."""
    try:
        return sizes(config, memory, rows=rows, page=PAGE, dtype=config.dtype).explain()
    except ValueError as error:
        if memory is not None or rows < 1:
            raise
        return {"rows": f"{rows} do not fit: {error}"}


def _check(
    config: K3Config, memory: int | None, rows: int, page: int, dtype: str, snapshots: int | None, pages: int | None
) -> None:
    for name, value, lowest, optional in (
        ("memory", memory, 1, True),
        ("rows", rows, 1, False),
        ("page", page, 1, False),
        ("snapshots", snapshots, 0, True),
        ("pages", pages, 1 if config.mla_layers else 0, True),
    ):
        if not (value is None and optional) and (type(value) is not int or value < lowest):
            raise ValueError(f"{name}={value!r}: allowed is an integer of {lowest} or more{', or None' * optional}")
    if pages and not config.mla_layers:
        raise ValueError(f"pages={pages}: allowed are 0 and None, since the model has no MLA layers")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: allowed are {' and '.join(map(repr, DTYPES))}")


def _bytes(config: K3Config, page: int, dtype: str, ranks: int) -> tuple[int, int, int]:
    """Of a slot's state, of a slot's sampling arrays and of a page: from the code that makes the arrays, traced."""
    carry = jax.eval_shape(functools.partial(carries.empty, config, slots=1, pages=1, page=page, dtype=dtype))
    sampling = jax.eval_shape(lambda: generate.rows([], [], [], (), 1, config.vocab_size))
    axes = carries.axes(carry)
    parts = (
        ((carry.kda, carry.lengths), (axes.kda, axes.lengths)),
        (sampling, generate.axes(sampling)),
        (carry.mla, axes.mla),
    )
    state, sampled, latents = (sharding.rank_bytes(*part, ranks, 1) for part in parts)
    return state, sampled, latents


def _budget(enough: int, device: Any) -> tuple[int, str]:
    """Bytes that may be taken, and why; `enough` is all that is of use where the device does not tell its memory."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        why = "a full context for every row" if enough <= UNKNOWN else "what is taken"
        return min(UNKNOWN, enough), f"{why} where a device, {device}, does not tell its memory"
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return int(SHARE * free), f"{SHARE} of the {_mib(free)} that are free on {device}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"
