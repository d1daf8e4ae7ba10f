"""Rows of requests as the arrays of one step: a worked example to the last number, and the laws of any other step."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers import K3_FIELDS, small
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.batch import NOWHERE, check, prepare
from k3jax.engine.batching import Bucket, Buckets, Row, fill, order, pack, powers

PAGE = 4
WIDTH = small(**K3_FIELDS).short_conv_kernel_size


@jax.jit
def mapped(batch):
    """What is made of a batch's fields: rows, positions and slots of tokens, and where the rows' states go."""
    return batch.row, batch.positions, batch.slot_mapping(PAGE), batch.write_slots()


@partial(jax.jit, static_argnums=1)
def prepared(batch, decodes):
    return prepare(batch, decodes, PAGE, WIDTH)


def lists(*arrays):
    return [np.asarray(a).tolist() for a in arrays]


# The worked example: a prompt of 4 that begins, 3 tokens of a prompt of 12 after 5, and a decode, 9 tokens after the step.
# Their tokens are any three runs of numbers; what follows C's token is not known.
A = Row([61, 62, 63, 64], 0, slot=3, pages=[7])
B = Row([75, 76, 77], 5, slot=6, pages=[2, 9], sampled=False, following=[76, 77, 78])
C = Row([88], 8, slot=9, pages=[11, 4, 13])
EXACT = Bucket(tokens=7, decodes=1, rows=2, pages=3)
PADDED = Bucket(tokens=10, decodes=3, rows=4, pages=5)


def test_the_worked_example():
    """In the order C, B, A, whatever order they come in."""
    for rows in ((A, B, C), (C, A, B), (B, C, A)):
        packed = fill(rows, EXACT)
        assert [rows[i] for i in order(rows)] == [C, B, A]
        assert [rows[i] for i in np.argsort(packed.places)] == [C, B, A]
        batch, (row, positions, slots, writes) = packed.batch, mapped(packed.batch)
        assert lists(batch.tokens) == [[88, 75, 76, 77, 61, 62, 63, 64]]
        assert lists(batch.query_start_loc, batch.query_lens) == [[0, 1, 4, 8], [1, 3, 4]]
        assert lists(batch.num_computed, batch.seq_lens) == [[8, 5, 0], [9, 8, 4]]
        assert lists(row, positions) == [[0, 1, 1, 1, 2, 2, 2, 2], [8, 5, 6, 7, 0, 1, 2, 3]]
        assert lists(slots) == [[52, 37, 38, 39, 28, 29, 30, 31]]
        assert lists(batch.state_indices, writes) == [[9, 6, 3], [9, 6, 3]]
        assert lists(batch.block_table) == [[[11, 4, 13], [2, 9, NOWHERE], [7, NOWHERE, NOWHERE]]]
        assert lists(batch.logits_indices) == [[0, 3, 7]]
        assert packed.sampled.tolist() == [True, False, True]  # B's is thrown away: 8 of 12
        assert packed.targets.tolist() == [0, 76, 77, 78, 0, 0, 0, 0]


def test_the_worked_example_as_the_layers_see_it():
    """C takes the step path of both kinds of layers, B and A the other; A begins from zero; tiles never cross rows."""
    step = prepared(fill((A, B, C), EXACT).batch, 1)
    assert (step.num_computed > 0).tolist() == [True, True, False]  # who has an initial state
    assert lists(step.read_slots, step.write_slots) == [[9, 6, 3], [9, 6, 3]]
    assert lists(step.latent_page) == [[13, 9, 9, 9, 7, 7, 7, 7]]
    assert lists(step.latent_offset) == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert step.decode_rows == 1
    assert lists(step.decode.seq_lens, step.decode.block_table) == [[9], [[11, 4, 13]]]
    rows = step.prefill
    assert lists(rows.length, rows.num_computed) == [[3, 4], [5, 0]]
    assert lists(rows.block_table) == [[[2, 9, NOWHERE], [7, NOWHERE, NOWHERE]]]
    assert lists(rows.row, rows.real) == [[0, 0, 0, 1, 1, 1, 1], [True] * 7]
    assert lists(rows.tile_row, rows.tile_first) == [[0, 1], [True, True]]
    held = [[t for t in tile if t != NOWHERE] for tile in rows.tile_token.tolist()]
    assert held == [[0, 1, 2], [3, 4, 5, 6]]


def test_the_worked_example_with_padding():
    """Two more decode rows, two more prompts, three more tokens, two more pages a row: nothing of the example changes, and
    padding has no slot, no page, no latent and no sample."""
    packed = fill((A, B, C), PADDED)
    assert packed.places == [4, 3, 0]
    batch, (row, positions, slots, writes) = packed.batch, mapped(packed.batch)
    assert lists(batch.query_start_loc) == [[0, 1, 2, 3, 6, 10, 10, 10]]
    assert lists(batch.num_computed, batch.seq_lens) == [[8, 0, 0, 5, 0, 0, 0], [9, 1, 1, 8, 4, 0, 0]]
    real = [0, 3, 4, 5, 6, 7, 8, 9]
    exact = fill((A, B, C), EXACT).batch
    for got, want in zip((batch.tokens, positions, slots), (exact.tokens, *mapped(exact)[1:3]), strict=True):
        assert lists(got[np.array(real)]) == lists(want)
    assert lists(slots) == [[52, NOWHERE, NOWHERE, 37, 38, 39, 28, 29, 30, 31, *[NOWHERE] * 3]]
    assert lists(row) == [[0, 1, 2, 3, 3, 3, 4, 4, 4, 4, 7, 7, 7]]
    out = [9, NOWHERE, NOWHERE, 6, 3, NOWHERE, NOWHERE]
    assert lists(batch.state_indices, writes) == [out, out]
    assert lists(batch.logits_indices) == [[0, 1, 2, 5, 9, 9, 9]]
    assert packed.sampled.tolist() == [True, False, False, False, True, False, False]
    step = prepared(batch, PADDED.decodes)
    assert lists(step.decode.seq_lens, step.prefill.length) == [[9, 1, 1], [3, 4, 0, 0]]


def test_a_decode_among_decodes_and_where_no_decode_rows_are_provided():
    """Alone it is all of a step without prompts; with no such rows it is a prompt of one token, still the first."""
    alone = pack([C], Buckets((2,), (16,), (4,)))
    assert alone.bucket == Bucket(0, 2, 0, 4)
    assert lists(alone.batch.query_start_loc, alone.batch.num_computed) == [[0, 1, 2], [8, 0]]
    prompts = fill((A, B, C), Bucket(tokens=8, decodes=0, rows=3, pages=3))
    exact = fill((A, B, C), EXACT)
    assert prompts.places == exact.places
    assert all(map(np.array_equal, prompts.batch, exact.batch)) and np.array_equal(prompts.sampled, exact.sampled)


def test_a_prompt_of_one_token_is_no_decode():
    """Its first token has no state to go on from; the last one of a prompt in pieces has."""
    first, last = Row([5], 0, 0, [0]), Row([5], 3, 1, [1])
    assert not first.is_decode and last.is_decode
    assert fill([first, last], Bucket(1, 1, 1, 1)).places == [1, 0]


# Any rows in any bucket that holds them.

SIZES = Buckets(rows=(2, 4), tokens=(17,), pages=(3,))


class Step(NamedTuple):
    rows: list[Row]
    bucket: Bucket


@st.composite
def steps(draw, most_rows=5, most_tokens=17, pages=3):
    """Rows as an engine has them: slots and pages of their own, a page for every token; any sizes where they find room."""
    count = draw(st.integers(0, most_rows))
    slots = draw(st.permutations(range(most_rows + 2)))
    table = draw(st.permutations(range(count * pages + 3)))
    rows, left = [], most_tokens
    for i in range(count):
        length = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 9]))
        length = min(length, left, pages * PAGE)
        computed = draw(st.integers(0, pages * PAGE - length))
        if length == 0:
            break
        left -= length
        tokens = draw(st.lists(st.integers(1, 999), min_size=length, max_size=length))
        needed = -(-(computed + length) // PAGE)
        own = table[i * pages : i * pages + draw(st.integers(needed, pages))]
        known = draw(st.integers(0, length))
        rows.append(Row(tokens, computed, slots[i], own, draw(st.booleans()), [token + 1 for token in tokens[:known]]))
    return rows


@st.composite
def filled(draw):
    """Rows and any bucket that holds them, with or without rows for decodes."""
    rows = draw(steps())
    decodes = sum(row.is_decode for row in rows)
    tokens = sum(len(row.tokens) for row in rows)
    spare = st.integers(0, 3)
    if draw(st.booleans()) and decodes:
        sizes = (tokens - decodes, decodes + draw(spare), len(rows) - decodes)
    else:
        sizes = (tokens, 0, len(rows))
    tokens, decodes, prompts = sizes
    pages = max((len(row.pages) for row in rows), default=0)
    return Step(rows, Bucket(tokens + draw(spare), decodes, prompts + draw(spare), pages + draw(spare)))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(step=filled())
def test_every_row_is_in_the_batch_once_as_it_is_and_the_rest_is_padding(step):
    rows, bucket = step
    batch, sampled, targets, _, places = fill(rows, bucket)
    size, length = bucket.decodes + bucket.rows, bucket.decodes + bucket.tokens
    shapes = [a.shape for a in (*batch, sampled, targets)]
    assert shapes == [(length,), (size + 1,), (size,), (size,), (size, bucket.pages), (size,), (size,), (length,)]
    assert {str(a.dtype) for a in (*batch, targets)} == {"int32"}
    starts = batch.query_start_loc
    assert starts[0] == 0 and (np.diff(starts) >= 0).all() and starts[-1] <= length
    assert len(set(places)) == len(places) == len(rows)
    for place, row in zip(places, rows, strict=True):
        own = slice(starts[place], starts[place + 1])
        assert lists(batch.tokens[own]) == [list(row.tokens)]
        assert lists(targets[own]) == [[*row.following, *[0] * (len(row.tokens) - len(row.following))]]
        assert (batch.num_computed[place], batch.state_indices[place]) == (row.computed, row.slot)
        assert lists(batch.block_table[place]) == [[*row.pages, *[NOWHERE] * (bucket.pages - len(row.pages))]]
        assert batch.logits_indices[place] == own.stop - 1 and sampled[place] == row.sampled
    padding = np.setdiff1d(np.arange(size), places)
    assert (batch.state_indices[padding] == NOWHERE).all() and (batch.block_table[padding] == NOWHERE).all()
    assert not batch.num_computed[padding].any() and not sampled[padding].any()
    assert np.diff(starts)[padding].tolist() == [int(place < bucket.decodes) for place in padding]
    if length:
        assert ((batch.logits_indices >= 0) & (batch.logits_indices < length)).all()
    # What the layers are told of the first rows: a token each, at the row's own index.
    assert starts[: bucket.decodes + 1].tolist() == list(range(bucket.decodes + 1))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(step=filled())
def test_decodes_come_first_then_rising_lengths_and_equals_as_they_came(step):
    rows, bucket = step
    packed = [rows[i] for i in order(rows)]
    assert sorted(order(rows)) == list(range(len(rows)))
    classes = [(not row.is_decode, len(row.tokens)) for row in packed]
    assert classes == sorted(classes)
    for one in set(classes):
        came = [row for row in rows if (not row.is_decode, len(row.tokens)) == one]
        assert [row for row, of in zip(packed, classes, strict=True) if of == one] == came
    places = fill(rows, bucket).places
    assert sorted(range(len(rows)), key=lambda i: places[i]) == order(rows)
    if bucket.decodes:
        assert [place < bucket.decodes for place in places] == [row.is_decode for row in rows]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(rows=steps(most_rows=4))
def test_positions_and_slots_of_tokens_are_those_of_a_plain_loop(rows):
    packed = pack(rows, SIZES)
    row, positions, slots, writes = map(np.asarray, mapped(packed.batch))
    size, length = len(packed.sampled), len(packed.targets)
    want_row, want_slots = np.full(length, size), np.full(length, NOWHERE)
    want_positions, want_writes = {}, np.full(size, NOWHERE)
    for place, source in zip(packed.places, rows, strict=True):
        want_writes[place] = source.slot
        for local in range(len(source.tokens)):
            token, position = packed.batch.query_start_loc[place] + local, source.computed + local
            want_row[token], want_positions[token] = place, position
            want_slots[token] = source.pages[position // PAGE] * PAGE + position % PAGE
    idle = [place for place in range(packed.bucket.decodes) if place not in packed.places]
    want_row[idle] = idle  # a token that leaves no trace
    assert row.tolist() == want_row.tolist() and slots.tolist() == want_slots.tolist()
    assert {token: positions[token] for token in want_positions} == want_positions
    assert writes.tolist() == want_writes.tolist()
    assert len({*slots} - {NOWHERE}) == sum(len(source.tokens) for source in rows)  # no two tokens share a place


# The sizes of steps.


@st.composite
def buckets(draw):
    """Sizes that hold what `steps` gives."""

    def rising(least, last):
        return tuple(sorted({*draw(st.sets(st.integers(least, last), max_size=3)), last}))

    return Buckets(rows=rising(1, 5), tokens=rising(1, 80), pages=rising(1, 3))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(rows=steps(), sizes=buckets())
def test_pack_takes_the_smallest_bucket_of_all_that_holds_the_rows(rows, sizes):
    """Smallest in each size at once. Steps without a prompt are decodes, and no others are."""
    decodes = sum(row.is_decode for row in rows)
    prompts, tokens = len(rows) - decodes, sum(len(row.tokens) for row in rows) - decodes
    pages = max((len(row.pages) for row in rows), default=0)
    needed = Bucket(tokens, decodes, prompts, pages)
    enough = [b for b in sizes.all() if all(map(np.greater_equal, b, needed)) and (b.tokens > 0) == (prompts > 0)]
    packed = pack(rows, sizes)
    assert packed.bucket in enough
    assert all((np.array(packed.bucket) <= other).all() for other in enough)
    again = fill(rows, packed.bucket)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(packed)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sizes=buckets())
def test_all_lists_each_bucket_once_and_none_in_vain(sizes):
    """As many as the choices of a size are, each holding prompts, decodes or both; no bucket is wider than it is of use."""
    found = list(sizes.all())
    assert len(set(found)) == len(found) == len(sizes.pages) * (len(sizes.rows) + 2 * len(sizes.tokens))
    for bucket in found:
        if bucket.tokens:
            assert bucket.tokens in sizes.tokens and bucket.decodes in (0, sizes.rows[-1])
            assert 1 <= bucket.rows <= min(bucket.tokens, sizes.rows[-1])
        else:
            assert bucket.decodes in sizes.rows and bucket.rows == 0
        assert bucket.pages in sizes.pages
        some = [Row([1], 1, 0, [0] * bucket.pages)] * bucket.decodes
        if bucket.tokens:
            long = bucket.tokens - bucket.rows + 1
            some += [Row([1] * n, 0, 0, [0] * bucket.pages) for n in (long, *[1] * (bucket.rows - 1))]
        assert pack(some, sizes).bucket == bucket


def test_a_prompt_row_costs_sixteen_tokens_but_four_rows_are_always_there():
    sizes = Buckets(rows=(1, 9), tokens=(1, 400), pages=(1,))
    assert [sizes.prefill_rows(tokens) for tokens in (1, 3, 4, 5, 64, 79, 80, 144, 160, 400)] == [
        1, 3, 4, 4, 4, 4, 5, 9, 9, 9,
    ]  # fmt: skip
    assert Buckets((2,), (400,), (1,)).prefill_rows(400) == 2
    # Many short prompts get a step of more tokens.
    assert sizes.step(5, 5, 0, 1) == Bucket(400, 0, 9, 1)
    assert Buckets((9,), (64, 80), (1,)).step(5, 5, 1, 1) == Bucket(80, 9, 5, 1)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(base=st.integers(2, 5), first=st.integers(1, 20), more=st.integers(0, 300))
def test_powers_rise_by_the_base_up_to_the_last(base, first, more):
    last = first + more
    found = powers(base, first, last)
    assert found[0] == first and found[-1] == last and list(found) == sorted({*found})
    assert list(found[:-1]) == [first * base**i for i in range(len(found) - 1)]
    assert len(found) == 1 or found[-2] < last <= base * found[-2]


@pytest.mark.parametrize(
    "field, sizes, least",
    [
        ("rows", (), 1), ("rows", (0, 2), 1), ("rows", (4, 2), 1), ("tokens", (16, 16), 1), ("tokens", (0,), 1),
        ("pages", (-1, 3), 0), ("pages", (), 0),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be(field, sizes, least):
    fields = dict(rows=(1,), tokens=(16,), pages=(1,)) | {field: sizes}
    with pytest.raises(ValueError) as error:
        Buckets(**fields)
    assert str(error.value) == f"buckets.{field}={sizes}: allowed are rising integers from {least}"


def test_a_model_without_pages_has_rows_without_pages():
    sizes = Buckets((2,), (16,), (0,))
    packed = pack([Row([1, 2], 0, 1, []), Row([3], 6, 0, [])], sizes)
    assert packed.bucket == Bucket(16, 2, 2, 0) and packed.batch.block_table.shape == (4, 0)
    slots = packed.batch.slot_mapping(PAGE)
    assert (np.asarray(slots) == NOWHERE).all()


def test_buckets_are_told_in_words():
    words = [str(bucket) for bucket in Buckets((3,), (16,), (7,)).all()]
    assert words == [
        "decode: 3 rows, 7 pages a row", "step: 16 tokens in 3 rows, 7 pages a row",
        "step: 16 tokens in 3 rows beside 3 decode rows, 7 pages a row",
    ]  # fmt: skip


def test_b47_offsets_made_by_hand_are_checked():
    """fla-npu#497, #266: offsets that fall were accepted. A tail that no row has is padding."""
    rows = [Row([1, 2, 3], 0, 0, [0]), Row([4, 5], 0, 1, [1])]
    good = fill(rows, Bucket(8, 0, 2, 1)).batch
    check(good)
    for starts in ([0, 5, 3], [0, 3, 9], [1, 3, 5], [0, 5, 4]):
        with pytest.raises(
            ValueError, match=r"query_start_loc=\[.*\]: allowed are offsets from 0 that do not fall, up to 8"
        ):
            check(good._replace(query_start_loc=np.array(starts)))
    with pytest.raises(ValueError, match="num_computed of 1 rows: allowed is 2"):
        check(good._replace(num_computed=good.num_computed[:1]))
