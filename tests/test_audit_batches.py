"""Many requests in one step, claim by claim: what mixes, what keeps rows apart, and that a batch is no other formula.

The numbers count the claims; what a claim says is the test's name. The rows below are in pools of NaN in which nothing but
their pasts is written, as the float64 reference has them; what is wanted is the reference's too.
"""

from collections import Counter
from itertools import pairwise, permutations
from pkgutil import resolve_name
from typing import NamedTuple

import audit
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit import LOGITS, PAD, PAGE, STATE, poisoned
from helpers import (
    K3_FIELDS,
    QUICK,
    Row,
    assert_close,
    assert_state,
    get_state,
    pack,
    put_state,
    same_bits,
    small,
)

from k3jax import generate as generation
from k3jax.batch import NOWHERE, prepare
from k3jax.carry import empty
from k3jax.engine import Engine as ManyAtOnce
from k3jax.engine import batching, runner
from k3jax.engine.batching import Bucket, Buckets
from k3jax.kernels import Kernels
from k3jax.model import Context, forward
from k3jax.probe import Probe, Taps
from k3jax.sampling import SamplingParams

ROUNDING = 2e-5  # between two ways to compute the same logits
SLOTS, PAGES = 10, 14  # of the pools
ROWS, TOKENS, WIDTH = 6, 11, 3  # of every batch but those of ROWS decode rows alone
STEPPED = 3  # decode rows where there are others beside them
CONFIG = small(**K3_FIELDS | dict(num_hidden_layers=3, kda_layers=(0, 2)))  # MLA between two of KDA
NUMBERS = np.random.default_rng(44).integers(0, PAD, (9, 12)).tolist()


class Share(NamedTuple):
    """A request in a step: all its tokens, of which the last ones are new, and where its memory is."""

    ids: tuple[int, ...]
    new: int
    slot: int
    pages: tuple[int, ...]

    @property
    def past(self):
        return self.ids[: -self.new]

    @property
    def row(self):
        return Row(self.ids[-self.new :], len(self.past), self.slot, self.pages)


def share(number, length, new, slot, pages):
    return Share(tuple(NUMBERS[number][:length]), new, slot, pages)


# A prompt of four that begins, a chunk of three after five, a decode; a decode whose token is the first of its page; and a
# prompt of one token.
A, B, C = share(0, 4, 4, 3, (7,)), share(1, 8, 3, 6, (2, 9)), share(2, 9, 1, 9, (11, 4, 13))
D, E = share(3, 5, 1, 0, (1, 8)), share(4, 1, 1, 4, (12,))


class Engine(audit.Engine):
    """The same model with programs and pools for more rows."""

    def __init__(self, config):
        super().__init__(config)
        self.traces = Counter()  # of each program, by its decode rows
        self.steps = {decodes: self.compiled(decodes) for decodes in (0, STEPPED, ROWS)}

    def compiled(self, decodes):
        def step(model, batch, carry):
            self.traces[decodes] += 1
            return forward(model, batch, carry, Context(Kernels(), decodes))

        return jax.jit(step, compiler_options=QUICK)

    def before(self, shares, fill=np.nan):
        """The pools before a step: each row's past, and `fill` everywhere else."""
        carry = empty(self.config, slots=SLOTS, pages=PAGES, page=PAGE, dtype="float32")
        carry = jax.tree.map(lambda a: jnp.full_like(a, fill) if a.dtype == jnp.float32 else a, carry)
        for one in shares:
            if one.past:
                carry = put_state(self.config, carry, one.row, self.after(*one.past)[1])
        return carry

    def step(self, batch, carry, decodes):
        """Logits of every row's tokens, and the step's output. The first `decodes` rows take the step path."""
        tokens = len(batch.tokens)
        out = self.steps[decodes](self.model, batch._replace(logits_indices=np.arange(tokens, dtype=np.int32)), carry)
        ends = np.asarray(batch.query_start_loc)
        logits = np.asarray(out.logits)
        return [logits[start:end] for start, end in pairwise(ends)], out

    def run(self, shares, decodes=0, carry=None):
        """The shares in one step, in this order; ROWS `decodes` are a step of decode rows alone."""
        alone = decodes == ROWS
        filler = Row([PAD] if alone else [])
        rows = [*(one.row for one in shares), *[filler] * (ROWS - len(shares))]
        batch = pack(rows, ROWS if alone else TOKENS, WIDTH, PAD)
        logits, out = self.step(batch, self.before(shares) if carry is None else carry, decodes)
        return logits[: len(shares)], out

    def packed(self, shares, carry=None):
        """The same as the package packs them, decodes in rows of their own: logits of the shares, and the output."""
        bucket = Bucket(TOKENS - STEPPED, STEPPED, ROWS - STEPPED, WIDTH)
        rows = [batching.Row(*one.row, sampled=len(one.row[0]) == 1 or len(one.ids) % 2 == 0) for one in shares]
        batch, sampled, _, _, places = batching.fill(rows, bucket)
        assert [sampled[place] for place in places] == [row.sampled for row in rows]
        logits, out = self.step(batch, self.before(shares) if carry is None else carry, STEPPED)
        return [logits[place] for place in places], out


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG)


def assert_told(engine, shares, logits, out):
    """Logits of the new tokens and the memory after them are the reference's."""
    for one, got in zip(shares, logits, strict=True):
        want, state, _ = engine.after(*one.ids)
        assert_close(got, want[len(one.past) :], LOGITS)
        assert_state(get_state(engine.config, out.carry, one.row), state, STATE)


def memory(one, carry):
    """What the carry holds of a row after its step: state, history, and latents of all its tokens."""
    states = [pool[one.slot] for pool in jax.tree.leaves(carry.kda)]
    latents = [np.asarray(pool)[list(one.pages)].reshape(-1, pool.shape[-1])[: len(one.ids)] for pool in carry.mla]
    return [*states, *latents, carry.lengths[one.slot]]


# One step, many kinds of rows.


def test_claim_44_one_step_mixes_a_prompt_a_continued_chunk_and_a_decode(engine):
    """Each as if it were alone; beyond their slots and their tokens' places the pools are as they were."""
    shares = (A, B, C)
    logits, out = engine.packed(shares)
    assert_told(engine, shares, logits, out)
    assert out.first_bad.tolist() == [-1] * ROWS
    for one, got in zip(shares, logits, strict=True):
        assert_close(got, engine.run([one])[0][0], LOGITS)
    assert out.carry.lengths.tolist() == [0, 0, 0, 4, 0, 0, 8, 0, 0, 9]
    for pool in jax.tree.leaves(out.carry.kda):
        assert np.flatnonzero(np.isfinite(pool).reshape(SLOTS, -1).any(-1)).tolist() == [3, 6, 9]
    held = sorted(one.pages[i // PAGE] * PAGE + i % PAGE for one in shares for i in range(len(one.ids)))
    for pool in out.carry.mla:
        assert np.flatnonzero(np.isfinite(pool.reshape(PAGES * PAGE, -1)).any(-1)).tolist() == held


def test_claim_45_rows_taken_by_chunks_or_in_place_are_the_same(engine):
    """No row of one token takes the step path or all do, the prompt of one token and decodes alike; beside prompts and
    without them."""
    shares = (E, C, D, B, A)
    found = [(shares, engine.run(shares, decodes)) for decodes in (0, STEPPED)]
    found.append((shares[:3], engine.run(shares[:3], ROWS)))
    _, (first, kept) = found[0]
    for some, (logits, out) in found:
        assert_told(engine, some, logits, out)
        for i, one in enumerate(some):
            assert_close(logits[i], first[i], ROUNDING)
            for got, want in zip(memory(one, out.carry), memory(one, kept.carry), strict=True):
                assert_close(got, want, ROUNDING)


# Where memory is.


def assert_same_elsewhere(engine, shares, decodes, slots, pages):
    """A step gives the same bits with its memory in other slots and pages: slot slots[i] in place of i, and so the pages."""
    before = engine.before(shares)

    def move(carry, slots, pages):
        states, lengths = jax.tree.map(lambda a: a[slots], (carry.kda, carry.lengths))
        return carry._replace(kda=states, mla=tuple(pool[pages] for pool in carry.mla), lengths=lengths)

    there = [
        one._replace(slot=int(slots[one.slot]), pages=tuple(int(pages[page]) for page in one.pages)) for one in shares
    ]
    logits, out = engine.run(shares, decodes, before)
    others, other = engine.run(there, decodes, move(before, np.argsort(slots), np.argsort(pages)))
    assert_told(engine, shares, logits, out)
    assert all(map(same_bits, others, logits))
    assert all(map(same_bits, *map(jax.tree.leaves, (move(other.carry, slots, pages), out.carry))))


STEPS = [((C, D, E), ROWS), ((E, D, C, B, A), STEPPED), ((B, C, A, D, E), 0)]


def test_claim_46_a_query_finds_its_pages_wherever_they_are(engine):
    """Any permutation of the physical pages gives the same bits. Nothing has a position, so the order of full pages in a
    table changes nothing but rounding; which pages they are does."""
    for seed, (shares, decodes) in enumerate(STEPS):
        pages = np.random.default_rng(seed).permutation(PAGES)
        assert_same_elsewhere(engine, shares, decodes, np.arange(SLOTS), pages)
    first, second, last = C.pages
    for decodes in (0, ROWS):
        want, swapped, wrong = (
            engine.run([C._replace(pages=pages)], decodes, engine.before([B, C]))[0][0]
            for pages in (C.pages, (second, first, last), (B.pages[0], second, last))
        )
        assert_close(swapped, want, ROUNDING)
        assert np.abs(wrong - want).max() > 10 * LOGITS


def test_claim_47_query_start_loc_bounds_the_recurrence_and_the_mask(engine):
    """Eight packed tokens are two requests wherever the bound is; and what neighbours are changes no bit of a row."""
    ids = tuple(NUMBERS[5][:8])
    for cut in range(9):
        shares = [Share(ids[:cut], cut, 2, (0, 5)), Share(ids[cut:], 8 - cut, 7, (10, 3))]
        shares = [one for one in shares if one.new]
        logits, out = engine.run(shares)
        assert_told(engine, shares, logits, out)
    for shares, decodes in STEPS:
        logits, out = engine.run(shares, decodes)
        others = [one._replace(ids=tuple((i + 5) % PAD for i in one.ids)) for one in shares]
        for kept, one in enumerate(shares):
            mixed = [*others[:kept], one, *others[kept + 1 :]]
            again, other = engine.run(mixed, decodes)
            assert same_bits(again[kept], logits[kept])
            assert all(map(same_bits, memory(one, other.carry), memory(one, out.carry)))
            changed = [i for i in range(len(shares)) if not same_bits(again[i], logits[i])]
            assert changed == [i for i in range(len(shares)) if i != kept]


def test_claim_48_state_indices_name_the_kda_slots(engine):
    """Any permutation of the slots gives the same bits, with the one program that there is: a slot is an argument of it."""
    for seed, (shares, decodes) in enumerate(STEPS):
        for turn in range(3):
            rng = np.random.default_rng([seed, turn])
            assert_same_elsewhere(engine, shares, decodes, rng.permutation(SLOTS), rng.permutation(PAGES))
    assert engine.traces == {decodes: 1 for _, decodes in STEPS}


# How a row is classified, and where it is in the batch.


def test_claim_49_the_class_of_a_row_chooses_the_program_and_not_the_numbers(engine):
    """Of each kind of layer alone: so a row may be of one class for KDA and of another for MLA. Chunk, scan or step; full
    attention or absorbed."""
    shares, config = (E, C, D, B, A), engine.config
    batch, before = pack([one.row for one in shares], TOKENS, WIDTH, PAD), engine.before(shares)
    x = jnp.asarray(np.random.default_rng(49).normal(size=(TOKENS, config.hidden_size)), jnp.float32)
    kda, mla, tap = config.kda_layers[1], config.mla_layers[0], Taps(Probe()).at(0)
    ways = {kda: [(0, "chunk"), (0, "scan"), (STEPPED, "chunk")], mla: [(0, "chunk"), (STEPPED, "chunk")]}

    def mixed(batch):
        """Output and memory of both layers, each way."""
        steps = {decodes: prepare(batch, decodes, PAGE, config.short_conv_kernel_size) for decodes in (0, STEPPED)}
        held = {kda: before.kda[1], mla: before.mla[0]}
        layers = engine.model.model.layers
        return [
            [layers[i].self_attn(x, held[i], steps[decodes], Context(Kernels(impl)), tap) for decodes, impl in ways[i]]
            for i in ways
        ]

    for first, *others in jax.jit(mixed, compiler_options=QUICK)(batch):
        first, *others = ([out[:10], *jax.tree.leaves(new)] for out, new in (first, *others))
        assert np.isfinite(first[0]).all() and np.abs(first[0]).max() > 0.1
        for other in others:
            for got, want in zip(other, first, strict=True):
                assert np.array_equal(np.isnan(got), np.isnan(want))  # what is nobody's stays so
                assert_close(np.nan_to_num(got), np.nan_to_num(want), ROUNDING)


def test_claim_50_what_is_split_for_the_layers_comes_back_in_packed_order(engine):
    """In whatever order rows are given to the package, and in whatever order they lie in the batch, a row's logits are its
    own. No two rows could be taken for each other."""
    shares = (A, B, C, D, E)
    before, last = engine.before(shares), [engine.after(*one.ids)[0][-1] for one in shares]
    assert min(np.abs(a - b).max() for i, a in enumerate(last) for b in last[:i]) > 10 * LOGITS
    for order in list(permutations(shares))[::3]:
        assert_told(engine, order, *engine.packed(order, before))
    for order in list(permutations(shares))[::7]:
        assert_told(engine, order, *engine.run(order, 0, before))


def test_claim_51_a_latent_is_in_the_cache_before_its_query_reads_it(engine):
    """A decoded token finds itself, and no other value that its place held before; also as the first of its page, as the
    first of its request, and beside prompts."""
    for shares, decodes in STEPS:
        want, _ = engine.run(shares, decodes)
        for value in (1e30, -7.0):
            before = engine.before(shares, fill=value)
            logits, out = engine.run(shares, decodes, before)
            assert all(map(same_bits, logits, want))
            assert_told(engine, shares, logits, out)


def test_claim_52_a_batch_is_no_other_formula(engine):
    """Requests that begin one after another, prompts of 1 to 6: at each step each has the logits that it has alone, takes the
    same tokens, and both are the reference's."""
    prompts = [tuple(NUMBERS[6 + i][:length]) for i, length in enumerate((6, 1, 4))]
    homes = [(8, (3, 12, 6)), (1, (0, 9, 2)), (5, (13, 5, 10))]

    def serve(members, steps=6):
        """Logits and tokens of these requests; request i begins at step i."""
        carry, told, logits = poisoned(engine.before([])), {}, {i: [] for i in members}
        for step in range(steps):
            told |= {i: prompts[i] for i in members if i == step}
            shares = [Share(ids, len(ids) if i == step else 1, *homes[i]) for i, ids in told.items()]
            if not shares:
                continue
            found, out = engine.packed(shares, carry)
            carry = out.carry
            for i, rows in zip(told, found, strict=True):
                logits[i].append(rows[-1])
                told[i] = (*told[i], int(rows[-1].argmax()))
        return told, logits

    together = serve(range(3))
    for i in range(3):
        alone = serve([i])
        assert together[0][i] == alone[0][i] and len(alone[0][i]) == len(prompts[i]) + 6 - i
        assert_close(together[1][i], alone[1][i], LOGITS)
        want = engine.after(*together[0][i][:-1])[0][len(prompts[i]) - 1 :]
        assert_close(together[1][i], want, LOGITS)


# The engine that users run.


@pytest.fixture(scope="module")
def served(pair):
    sizes = Buckets(rows=(4,), tokens=(10,), pages=(8,))
    with ManyAtOnce(pair, rows=4, tokens=10, page=PAGE, pages=29, prefix_cache=False, buckets=sizes, look=1) as engine:
        yield engine


def add(engine, prompts):
    """Sampled with log-probabilities; seeds are the prompts' lengths."""
    fields = dict(max_tokens=3, temperature=0.7, logprobs=4, ignore_eos=True)
    return [engine.add_request(prompt, SamplingParams(seed=len(prompt), **fields)) for prompt in prompts]


def answers(engine, numbers):
    """What came of these requests, all of them done."""
    results = {output.request: output.result for output in engine.run() if output.result}
    engine.pool.check()
    assert engine.stats().slots_used == engine.stats().pages_used == 0
    return [results[number] for number in numbers]


TEXTS = [np.random.default_rng(n).integers(0, 2000, n).tolist() for n in (3, 24, 2, 1)]


@pytest.fixture(scope="module")
def alone(served):
    """Each text's answer where nothing else runs."""
    return [answers(served, add(served, [text]))[0] for text in TEXTS]


def assert_same(got, want):
    assert got.token_ids == want.token_ids and got.finish_reason == want.finish_reason == "length"
    assert_close(got.logprobs.tokens, want.logprobs.tokens, LOGITS)


def test_claim_44_in_the_engine(served, alone, monkeypatch):
    """One of its steps has a decode, a chunk whose sample is thrown away, and a prompt that begins."""
    kinds = []

    def packed(rows, sizes):
        kinds.append({(len(row.tokens), row.computed, row.sampled) for row in rows})
        return batching.pack(rows, sizes)

    monkeypatch.setattr(runner, "pack", packed)
    numbers = add(served, TEXTS[:2])
    assert [output.request for output in served.step()] == numbers[:1]
    together = answers(served, numbers + add(served, TEXTS[2:3]))
    assert kinds[1] == {(1, 3, True), (8, 4, False), (2, 0, True)}
    for got, want in zip(together, alone[:3], strict=True):
        assert_same(got, want)


def test_claims_48_50_and_52_in_the_engine(served, alone):
    """In whatever order requests come each has its own answer, the one that it has alone; slots and pages change and no
    further step is compiled than the three there are."""
    assert len({tuple(answer.token_ids) for answer in alone}) == len(TEXTS)
    answers(served, add(served, TEXTS))
    compiled = steps_compiled()
    for order in list(permutations(range(4)))[1::9]:
        together = answers(served, add(served, [TEXTS[i] for i in order]))
        for i, got in zip(order, together, strict=True):
            assert_same(got, alone[i])
    assert steps_compiled() == compiled


def steps_compiled():
    return generation.step._cache_size() + generation.decode._cache_size()


# The tests themselves.


def prefilled(change):
    """A step whose rows of any length are seen otherwise."""

    def broken(good):
        def prepare(batch, *args):
            step = good(batch, *args)
            return step._replace(prefill=step.prefill and change(step.prefill))

        return prepare

    return broken


def across_rows(rows):
    return rows._replace(tile_first=jnp.arange(len(rows.tile_first)) == 0)


def seeing_all(rows):
    """The mask knows only what is before: no row of a token."""
    return rows._replace(row=jnp.where(rows.real, 0, rows.row))


def convolving_neighbours(rows):
    tokens, width = rows.window.shape
    histories = rows.length.shape[0] * (width - 1)
    return rows._replace(window=histories + jnp.arange(tokens)[:, None] - (width - 1) + jnp.arange(width))


def by_row(good):
    def prepare(batch, *args):
        step = good(batch, *args)
        rows = jnp.arange(step.write_slots.shape[0])
        return step._replace(write_slots=jnp.where(step.write_slots == NOWHERE, NOWHERE, rows))

    return prepare


def one_after_another(good):
    """Pages as if they followed the first."""
    return lambda pages, table, length: good(pages, table[..., :1] + jnp.arange(table.shape[-1]), length)


def before_the_insert(good):
    def call(self, x, pages, step, *others):
        nowhere = step._replace(latent_page=jnp.full_like(step.latent_page, NOWHERE))
        return good(self, x, pages, nowhere, *others)[0], good(self, x, pages, step, *others)[1]

    return call


def from_the_start(good):
    """Latents of a chunk lie where those of its request's first tokens are."""
    return lambda batch, page: good(batch._replace(num_computed=jnp.zeros_like(batch.num_computed)), page)


def ungated(good):
    return lambda pool, step, *args: good(pool, step._replace(num_computed=step.num_computed + 1), *args)


def as_long_as_the_longest(good):
    def decode(q, pages, rows, *weights):
        lengths = jnp.full_like(rows.seq_lens, rows.seq_lens.max())
        return good(q, pages, rows._replace(seq_lens=lengths), *weights)

    return decode


def in_the_order_given(good):
    def fill(rows, bucket):
        return good(rows, bucket)._replace(places=list(range(len(rows))))

    return fill


# What is wrong in the code: the claim that is broken, the function, and what stands in its place.
BROKEN = {
    "a chunk writes its latents at the start": (
        test_claim_44_one_step_mixes_a_prompt_a_continued_chunk_and_a_decode,
        "k3jax.batch.Batch.slot_mapping",
        from_the_start,
    ),
    "a prompt of one token reads its dirty slot": (
        test_claim_45_rows_taken_by_chunks_or_in_place_are_the_same,
        "k3jax.layers.kda._starting",
        ungated,
    ),
    "the step path does not decay": (
        test_claim_45_rows_taken_by_chunks_or_in_place_are_the_same,
        "k3jax.ops.kda.step",
        lambda good: lambda S, x: good(S, x._replace(g=0 * x.g)),
    ),
    "pages follow the first": (
        test_claim_46_a_query_finds_its_pages_wherever_they_are,
        "k3jax.ops.mla._gather",
        one_after_another,
    ),
    "the recurrence runs on into the next row": (
        test_claim_47_query_start_loc_bounds_the_recurrence_and_the_mask,
        "k3jax.model.prepare",
        prefilled(across_rows),
    ),
    "the convolution reads the neighbour": (
        test_claim_47_query_start_loc_bounds_the_recurrence_and_the_mask,
        "k3jax.model.prepare",
        prefilled(convolving_neighbours),
    ),
    "the mask is causal over the whole batch": (
        test_claim_47_query_start_loc_bounds_the_recurrence_and_the_mask,
        "k3jax.model.prepare",
        prefilled(seeing_all),
    ),
    "states go to the slot of the row's number": (
        test_claim_48_state_indices_name_the_kda_slots,
        "k3jax.model.prepare",
        by_row,
    ),
    "the absorbed scale is the latent's": (
        test_claim_49_the_class_of_a_row_chooses_the_program_and_not_the_numbers,
        "k3jax.ops.mla.decode",
        lambda good: lambda q, pages, *rest: good(q * (q.shape[-1] / pages.shape[-1]) ** 0.5, pages, *rest),
    ),
    "rows are looked for where they were given": (
        test_claim_50_what_is_split_for_the_layers_comes_back_in_packed_order,
        "k3jax.engine.batching.fill",
        in_the_order_given,
    ),
    "the insert comes after the attention": (
        test_claim_51_a_latent_is_in_the_cache_before_its_query_reads_it,
        "k3jax.layers.mla.MLA.__call__",
        before_the_insert,
    ),
    "all rows attend as far as the longest": (
        test_claim_52_a_batch_is_no_other_formula,
        "k3jax.ops.mla.decode",
        as_long_as_the_longest,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", BROKEN)
def test_the_audit_notices(monkeypatch, engine, wrong):
    """A claim that holds fails once the code is wrong."""
    claim, function, broken = BROKEN[wrong]
    claim(engine)
    monkeypatch.setattr(function, broken(resolve_name(function)))
    with pytest.raises(AssertionError):
        claim(Engine(CONFIG))
