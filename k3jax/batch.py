"""Batch: the packed tokens of one step and the rows they belong to.

Tokens of several requests lie one after another on one axis `T`; a row is one request's share of the step. Nothing about
a request is static: only the number of tokens, rows and pages is. What can be computed from the six fields is a method.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# An index that no pool has. Reads there give the fill value and writes are dropped; -1 would wrap to the last entry.
NOWHERE = 2**31 - 1
TILE = 64  # tokens a tile at most: the chunk of the KDA recurrence
_TILE_MULTIPLE = 16


class Batch(NamedTuple):
    """One step's input. Tokens past `query_start_loc[-1]` and rows of length 0 are padding and touch nothing.

    A row whose `state_indices` and `block_table` entries are NOWHERE is computed but leaves no trace: that is how a
    finished request keeps its place in a decode loop.
    """

    tokens: Int[Array, "T"]  # ids, rows one after another
    query_start_loc: Int[Array, "B+1"]  # where each row starts in `tokens`, and where the last one ends; non-decreasing
    num_computed: Int[Array, "B"]  # the request's tokens in the carry; 0 starts from zero, whatever the slot holds
    state_indices: Int[Array, "B"]  # KDA slot of the row
    block_table: Int[Array, "B P"]  # latent page of positions [p*page, (p+1)*page)
    logits_indices: Int[Array, "wanted"]  # packed positions whose logits are wanted

    @property
    def query_lens(self) -> Int[Array, "B"]:
        """New tokens of each row."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def seq_lens(self) -> Int[Array, "B"]:
        """Tokens in the carry once the step is done."""
        return self.num_computed + self.query_lens

    @property
    def row(self) -> Int[Array, "T"]:
        """The row of each token; B for padding."""
        index = jnp.arange(self.tokens.shape[0])
        return jnp.searchsorted(self.query_start_loc[1:], index, side="right", method="compare_all").astype(jnp.int32)

    @property
    def positions(self) -> Int[Array, "T"]:
        """Index of each token in its request."""
        index = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        return (self.num_computed - self.query_start_loc[:-1]).at[self.row].get(mode="fill", fill_value=0) + index

    def write_slots(self) -> Int[Array, "B"]:
        """Where each row's state goes: nowhere for a row without work."""
        return jnp.where(self.query_lens > 0, self.state_indices, NOWHERE)

    def slot_mapping(self, page: int) -> Int[Array, "T"]:
        """Flat slot (page index * page size + offset) of each token's latent; NOWHERE for padding."""
        if self.block_table.shape[1] == 0:  # no pages at all: scoring and training
            return jnp.full(self.tokens.shape, NOWHERE, jnp.int32)
        position = self.positions
        table = self.block_table.at[self.row, position // page].get(mode="fill", fill_value=NOWHERE)
        return jnp.where(table < NOWHERE // page, table * page + position % page, NOWHERE)


def check(batch: Batch) -> None:
    """ValueError unless the rows of a batch that was made by hand lie one after another within its tokens. On the host."""
    starts, size = [int(start) for start in batch.query_start_loc], batch.tokens.shape[0]
    if starts != sorted(starts) or starts[:1] != [0] or starts[-1] > size:
        raise ValueError(
            f"query_start_loc={starts}: allowed are offsets from 0 that do not fall, up to {size} (tokens)"
        )
    rows = len(starts) - 1
    for field in ("num_computed", "state_indices", "block_table"):
        if (found := getattr(batch, field).shape[0]) != rows:
            raise ValueError(f"{field} of {found} rows: allowed is {rows}, the rows of query_start_loc")


def single(tokens: Int[Array, "T"], length: jax.typing.ArrayLike, pages: int = 0) -> Batch:
    """A fresh request alone: row 0, slot 0, pages 0 to `pages`-1, logits of every token. Tokens past `length` are padding."""
    return Batch(
        tokens=tokens,
        query_start_loc=jnp.array([0, length], jnp.int32),
        num_computed=jnp.zeros(1, jnp.int32),
        state_indices=jnp.zeros(1, jnp.int32),
        block_table=jnp.arange(pages, dtype=jnp.int32)[None],
        logits_indices=jnp.arange(tokens.shape[0], dtype=jnp.int32),
    )


# -- what every layer needs of a batch, computed once a step -----------------------------------------------------------


class DecodeRows(NamedTuple):
    """Rows of one token each."""

    seq_lens: Int[Array, "B"]
    block_table: Int[Array, "B P"]


class PrefillRows(NamedTuple):
    """Rows of any length, packed; tokens counted from 0. Tiles are runs of C tokens that never cross rows."""

    length: Int[Array, "B"]  # new tokens of each row
    num_computed: Int[Array, "B"]
    block_table: Int[Array, "B P"]
    row: Int[Array, "T"]  # row of each token; B for padding
    real: Bool[Array, "T"]  # not padding
    tile_token: Int[Array, "n C"]  # token of each place in the tiles; NOWHERE where there is none
    tile_row: Int[Array, "n"]  # row of each tile; B for unused tiles
    tile_first: Bool[Array, "n"]  # whether the tile is its row's first
    token_place: Int[Array, "T"]  # flat place of each token among the tiles; n*C for padding
    # Places among the inputs of the short convolution: the rows' histories, W-1 each, then the new tokens.
    window: Int[Array, "T W"]  # each token's last W inputs, its own last
    kept: Int[Array, "B W-1"]  # each row's history after the step


class Step(NamedTuple):
    """A batch as the layers see it: rows split by how they are computed, and where memory is read and written."""

    num_computed: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    read_slots: Int[Array, "B"]
    write_slots: Int[Array, "B"]  # NOWHERE for rows without work
    latent_page: Int[Array, "T"]  # where each token's latent goes
    latent_offset: Int[Array, "T"]
    decode: DecodeRows | None  # rows and tokens [0, n)
    prefill: PrefillRows | None  # the rest

    @property
    def decode_rows(self) -> int:
        return 0 if self.decode is None else self.decode.seq_lens.shape[0]


def prepare(batch: Batch, decode_rows: int, page: int, width: int) -> Step:
    """Rows [0, decode_rows) hold the tokens of the same indices; the others may have any length. `width`: the convolution's."""
    batch, n = _regular(batch, decode_rows), decode_rows
    slot = batch.slot_mapping(page)
    step = Step(
        num_computed=batch.num_computed,
        seq_lens=batch.seq_lens,
        read_slots=batch.state_indices,
        write_slots=batch.write_slots(),
        latent_page=slot // page,
        latent_offset=slot % page,
        decode=DecodeRows(batch.seq_lens[:n], batch.block_table[:n]) if n else None,
        prefill=_prefill_rows(batch, n, width) if n < batch.tokens.shape[0] else None,
    )
    # Kept as arrays: without the barrier XLA computes the indices again inside every fusion that reads them.
    return jax.lax.optimization_barrier(step)


def _regular(batch: Batch, decode_rows: int) -> Batch:
    """Beside the decode rows there are further rows with further tokens, or neither: the layers know no other case."""
    rows, tokens = batch.num_computed.shape[0], batch.tokens.shape[0]
    if tokens == decode_rows < rows:  # rows without work
        per_row = (batch.num_computed, batch.state_indices, batch.block_table)
        num_computed, state_indices, block_table = (a[:tokens] for a in per_row)
        starts = batch.query_start_loc[: tokens + 1]
    elif rows == decode_rows < tokens:  # padding without a row: it gets one of length 0
        starts = jnp.append(batch.query_start_loc, batch.query_start_loc[-1])
        num_computed, state_indices = jnp.append(batch.num_computed, 0), jnp.append(batch.state_indices, NOWHERE)
        block_table = jnp.pad(batch.block_table, ((0, 1), (0, 0)), constant_values=NOWHERE)
    else:
        return batch
    return Batch(batch.tokens, starts, num_computed, state_indices, block_table, batch.logits_indices)


def _prefill_rows(batch: Batch, first_row: int, width: int) -> PrefillRows:
    start = batch.query_start_loc[first_row:-1] - first_row
    length, num_computed = batch.query_lens[first_row:], batch.num_computed[first_row:]
    rows, tokens = length.shape[0], batch.tokens.shape[0] - first_row
    row = batch.row[first_row:] - first_row
    index = jnp.arange(tokens, dtype=jnp.int32)

    size = _TILE_MULTIPLE
    while size < min(
        TILE, -(-tokens // rows)
    ):  # no longer than rows are on average: a tile that is not full costs the same
        size *= 2
    count = (tokens + rows * (size - 1)) // size  # enough for any division of the tokens into rows
    ends = jnp.cumsum(-(-length // size))
    tile_row = jnp.searchsorted(ends, jnp.arange(count), side="right", method="compare_all").astype(jnp.int32)
    rank = jnp.arange(count) - jnp.where(tile_row > 0, ends.at[tile_row - 1].get(mode="clip"), 0)
    tile_local = rank[:, None] * size + jnp.arange(size)
    tile_real = tile_local < length.at[tile_row].get(mode="fill", fill_value=0)[:, None]
    tile_token = jnp.where(tile_real, start.at[tile_row].get(mode="clip")[:, None] + tile_local, NOWHERE)
    place = jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)

    local = index - start.at[row].get(mode="clip")
    kept = jnp.arange(rows)[:, None], length[:, None] - (width - 1) + jnp.arange(width - 1)
    window = row[:, None], local[:, None] - (width - 1) + jnp.arange(width)

    def input_place(row: Array, local: Array) -> Array:
        """Of a row's input number `local`; negative ones are in the history."""
        new = rows * (width - 1) + start.at[row].get(mode="clip") + local
        return jnp.where(local < 0, row * (width - 1) + width - 1 + local, new).astype(jnp.int32)

    return PrefillRows(
        length=length,
        num_computed=num_computed,
        block_table=batch.block_table[first_row:],
        row=row,
        real=row < rows,
        tile_token=tile_token,
        tile_row=tile_row,
        tile_first=rank == 0,
        token_place=jnp.full(tokens, count * size, jnp.int32).at[tile_token].set(place, mode="drop"),
        window=input_place(*window),
        kept=input_place(*kept),
    )
