"""From rows of requests to the arrays of one step: order, packing, padding to a few static sizes.

A decode row has one new token, its last, and something computed before it; it takes the step path of every layer. All others
take the prefill path. Decodes come first, then the rest by rising length, as the layers want them. Where a row may be taken either way
its numbers are the same up to rounding, so the class of a row is a matter of speed.

| array of Batch | shape | holds | read by |
|---|---|---|---|
| tokens | int32 [T] | ids, rows one after another | embedding |
| query_start_loc | int32 [B+1] | where each row starts; padding repeats the end | KDA recurrence and convolution, MLA mask |
| num_computed | int32 [B] | tokens in the carry; 0: begin from zero | KDA's initial state, MLA's past |
| seq_lens (made of the two) | int32 [B] | tokens in the carry afterwards | MLA's mask in decode, sampling's position |
| state_indices | int32 [B] | KDA slot | KDA, sampling |
| block_table | int32 [B, P] | latent pages in order | MLA's past, slot_mapping |
| slot_mapping (made of it) | int32 [T] | page * size + offset of each new latent | MLA's write |
| logits_indices | int32 [B] | the last token of each row | head, sampling |

Padding: a slot or a page that is NOWHERE is neither read nor written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from k3jax.batch import NOWHERE, Batch


class Row(NamedTuple):
    """One request's share of a step."""

    tokens: Sequence[int]  # new ones
    computed: int  # tokens in the carry
    slot: int
    pages: Sequence[int]  # enough for all tokens, the new ones included
    sampled: bool = True  # whether the step takes a token from it: its tokens end here
    following: Sequence[int] = ()  # the token that follows each new one, as far as it is known

    @property
    def is_decode(self) -> bool:
        return len(self.tokens) == 1 and self.computed > 0 and self.sampled


def powers(base: int, first: int, last: int) -> tuple[int, ...]:
    """first, first * base, ... up to the first that is not below last, which is itself the end."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * base, last))
    return tuple(sizes)


class Bucket(NamedTuple):
    """The sizes of one compiled step. `tokens` 0: decode."""

    tokens: int  # of the prefill rows
    decodes: int  # rows of one token each
    rows: int  # prefill rows
    pages: int  # of a row

    def __str__(self) -> str:
        if not self.tokens:
            return f"decode: {self.decodes} rows, {self.pages} pages a row"
        beside = f" beside {self.decodes} decode rows" if self.decodes else ""
        return f"step: {self.tokens} tokens in {self.rows} rows{beside}, {self.pages} pages a row"


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes that steps are padded to, rising. Each combination that occurs is one compiled program."""

    rows: tuple[int, ...]  # of a decode; its last also of the decode rows beside a prefill
    tokens: tuple[int, ...]  # of the prefill rows
    pages: tuple[int, ...]  # of a row

    def __post_init__(self) -> None:
        for field in ("rows", "tokens", "pages"):
            sizes = getattr(self, field)
            least = 0 if field == "pages" else 1
            whole = all(type(size) is int for size in sizes)
            if not sizes or not whole or list(sizes) != sorted({*sizes}) or sizes[0] < least:
                raise ValueError(f"buckets.{field}={sizes}: allowed are rising integers from {least}")

    def prefill_rows(self, tokens: int) -> int:
        """Rows that share so many tokens at most: a row costs a tile of tokens, used or not."""
        return min(self.rows[-1], max(4, tokens // 16), tokens)

    def decode(self, rows: int, pages: int) -> Bucket:
        return Bucket(0, _fit(self.rows, rows), 0, _fit(self.pages, pages))

    def step(self, tokens: int, rows: int, decodes: int, pages: int) -> Bucket:
        fitting = [size for size in self.tokens if size >= tokens and self.prefill_rows(size) >= rows]
        beside = self.rows[-1] if decodes else 0
        assert fitting and decodes <= beside, f"{tokens} tokens in {rows} rows beside {decodes} decodes fit no bucket"
        return Bucket(fitting[0], beside, self.prefill_rows(fitting[0]), _fit(self.pages, pages))

    def all(self) -> Iterator[Bucket]:
        """Every program that may come to be compiled."""
        for pages in self.pages:
            yield from (Bucket(0, rows, 0, pages) for rows in self.rows)
            for tokens in self.tokens:
                yield from (Bucket(tokens, d, self.prefill_rows(tokens), pages) for d in (0, self.rows[-1]))


def _fit(sizes: Sequence[int], wanted: int) -> int:
    assert wanted <= sizes[-1], f"{wanted}: allowed are up to {sizes[-1]}"
    return next(size for size in sizes if size >= wanted)


class Packed(NamedTuple):
    """One step's input. `places[i]` is the row of the batch that holds rows[i]."""

    batch: Batch
    sampled: Bool[np.ndarray, "B"]
    targets: Int[np.ndarray, "T"]
    bucket: Bucket
    places: list[int]


def order(rows: Sequence[Row]) -> list[int]:
    """Indices of the rows as they are packed: decodes, then by rising length; equals stay in order."""
    return sorted(range(len(rows)), key=lambda i: (not rows[i].is_decode, len(rows[i].tokens)))


def pack(rows: Sequence[Row], buckets: Buckets) -> Packed:
    """The rows packed and padded. In a step without a prefill row the decode rows alone set the size."""
    decodes = sum(row.is_decode for row in rows)
    tokens = sum(len(row.tokens) for row in rows) - decodes
    pages = max((len(row.pages) for row in rows), default=0)
    if tokens:
        bucket = buckets.step(tokens, len(rows) - decodes, decodes, pages)
    else:
        bucket = buckets.decode(decodes, pages)
    return fill(rows, bucket)


def fill(rows: Sequence[Row], bucket: Bucket) -> Packed:
    """The rows in a batch of these sizes. Decode rows without a request compute a token that leaves no trace."""
    size, length = bucket.decodes + bucket.rows, bucket.decodes + bucket.tokens
    tokens, targets = np.zeros((2, length), np.int32)
    lengths, computed = np.zeros((2, size), np.int32)
    slots = np.full(size, NOWHERE, np.int32)
    table = np.full((size, bucket.pages), NOWHERE, np.int32)
    sampled, places = np.zeros(size, bool), [0] * len(rows)
    lengths[: bucket.decodes] = 1
    end, next_decode, next_prefill = bucket.decodes, 0, bucket.decodes
    for i in order(rows):
        row = rows[i]
        # Where no decode rows are provided, a decode is a prefill of one token.
        if row.is_decode and bucket.decodes:
            place = start = next_decode
            next_decode += 1
        else:
            place, start = next_prefill, end
            next_prefill, end = next_prefill + 1, end + len(row.tokens)
        places[i] = place
        tokens[start : start + len(row.tokens)] = row.tokens
        targets[start : start + len(row.following)] = row.following
        lengths[place], computed[place], slots[place] = len(row.tokens), row.computed, row.slot
        table[place, : len(row.pages)] = row.pages
        sampled[place] = row.sampled
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = Batch(tokens, ends, computed, slots, table, np.maximum(ends[1:] - 1, 0))  # type: ignore[arg-type]
    return Packed(batch, sampled, targets, bucket, places)
