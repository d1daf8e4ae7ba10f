"""Faults that other engines had within one step: classes of rows, padding, splits, trace-time constants, rounding.

Each under its number and with its source, on a small model whose widths all differ, against the float64 reference.
Where a number is missing here, an older test of the same thing names it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import (
    CHUNK,
    LOGITS,
    LOOK,
    PAD,
    PAGE,
    PAGES,
    ROWS,
    SNAPSHOTS,
    STATE,
    Model,
    finish,
    greedy,
    prompt,
    small_engine,
    toy,
)  # fmt: skip
from helpers import (
    QUICK,
    Row,
    assert_close,
    assert_state,
    get_state,
    lengths_batch,
    pack,
    put_state,
    relative_error,
    same_bits,
)  # fmt: skip

from k3jax import generate as generation
from k3jax.batch import NOWHERE, prepare
from k3jax.engine import batching
from k3jax.engine.engine import Engine
from k3jax.kernels import Kernels
from k3jax.layers.block import Block
from k3jax.model import Context, forward
from k3jax.ops import kda, mla
from k3jax.probe import Probe
from k3jax.sampling import SamplingParams

SLOTS = 4
SLOW = pytest.mark.slow
PROMPT = prompt(40, seed=4)

step = jax.jit(forward, static_argnames="ctx", compiler_options=QUICK)


@pytest.fixture(scope="module")
def model():
    return toy()


def pool(model, fill=np.nan):
    return model.pool(SLOTS, PAGES, fill)


# -- kind 4: every pattern of layers -------------------------------------------------------------------------------------
PATTERNS = {"all KDA": (0, 1), "all MLA": (), "KDA, MLA": (0,), "MLA, KDA": (1,)}


@pytest.mark.parametrize("pattern", [pytest.param(p, marks=[SLOW] * p.endswith(("MLA", ", KDA"))) for p in PATTERNS])
def test_b24_a_second_turn_in_every_pattern_of_layers(pattern):
    """omlx#2496: the cache was built anew without the linear layers' state, and every second turn crashed."""
    model = Model(kda_layers=PATTERNS[pattern])
    pages = PAGES * bool(model.config.mla_layers)
    sizes = dict(rows=ROWS, tokens=CHUNK, page=PAGE, pages=pages, snapshots=SNAPSHOTS, look=LOOK)
    with Engine(model.lm, **sizes, buckets=batching.Buckets((ROWS,), (CHUNK,), (pages,))) as engine:
        said = PROMPT[:9]
        for new, reused in ((PROMPT[9:14], 0), (PROMPT[14:25], 8), ([], 16)):
            before, number = engine.stats().reused_tokens, engine.add_request(said, greedy(4))
            completion = finish(engine)[number]
            model.assert_alone(completion, pattern)
            assert engine.stats().reused_tokens - before == reused
            said = [*said, *completion.token_ids, *new]


# -- kind 5: classes of rows ---------------------------------------------------------------------------------------------
def test_b31_one_token_with_a_past_is_a_decode_and_nothing_else_is(model):
    """vllm#55894: a threshold of row length, the smaller of two models', put rows on the wrong path. Here there is none."""
    pasts, lengths = (5, 5, 5, 5, 0), (1, 2, 3, 4, 1)
    slots, pages, carry, rows = (2, 0, 3, 1, NOWHERE), ((4, 2), (7, 1), (0, 5), (3, 8), ()), pool(model), []
    for past, length, slot, own in zip(pasts, lengths, slots, pages, strict=True):
        rows.append(batching.Row(PROMPT[past : past + length], past, slot, own))
        if past:
            carry = put_state(model.config, carry, Row([], past, slot, own), model.after(*PROMPT[:past])[1])
    packed = batching.pack(rows, batching.Buckets((4,), (20,), (2,)))
    assert [row.is_decode for row in rows] == [True, False, False, False, False]
    assert packed.places == [0, 5, 6, 7, 4] and packed.bucket == batching.Bucket(20, 4, 4, 2)
    ctx = Context(Kernels("chunk", "dense"), packed.bucket.decodes)
    out = step(model.module, jax.tree.map(jnp.asarray, packed.batch), carry, ctx=ctx)
    for row, place in zip(rows, packed.places, strict=True):
        ids = PROMPT[: row.computed + len(row.tokens)]
        assert_close(out.logits[place], model.after(*ids)[0][-1], LOGITS)
        if row.slot < SLOTS:
            found = get_state(model.config, out.carry, Row(row.tokens, row.computed, row.slot, row.pages))
            assert_state(found, model.after(*ids)[1], STATE)


# -- kind 6: padding -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("decode", [0, 3])
def test_b33_a_padding_entry_writes_nowhere(model, decode):
    """flashinfer#5042: slot -1 was the last one. Slot 0 is one like any other; the last slot and all others keep every bit."""
    length = 1 if decode else 5
    rows = [Row(PROMPT[:length], 0, slot, pages) for slot, pages in ((2, (1,)), (NOWHERE, ()), (0, (3,)))]
    before = pool(model, 7.25)
    out = step(
        model.module, pack(rows, 3 * length, 1), before, ctx=Context(Kernels("chunk", "dense"), decode_rows=decode)
    )
    for got, old in zip(jax.tree.leaves(out.carry), jax.tree.leaves(before), strict=True):
        changed = np.flatnonzero([not same_bits(a, b) for a, b in zip(got, old, strict=True)]).tolist()
        assert changed == ([0, 2] if len(old) == SLOTS else [1, 3])
    for row in (rows[0], rows[2]):
        assert_state(get_state(model.config, out.carry, row), model.after(*row.ids)[1], STATE)


def test_b33_moves_to_nowhere_move_nothing(model):
    """What begins and what is copied: [2, nowhere, 0], and an index just past the pool."""
    state = generation.empty(model.module, slots=SLOTS, pages=PAGES, page=PAGE)
    state = jax.tree.map(lambda a: jnp.full_like(a, 1), state)
    before = jax.tree.map(np.array, state)
    new = generation.rows([SamplingParams(temperature=0.5)] * 3, [[5], [6], [7]], [0] * 3, (), 3, 31)
    state = generation.place(state, np.array([2, NOWHERE, 0], np.int32), new)
    assert np.asarray(state.last).tolist() == [7, 1, 5, 1]
    carry = jax.tree.map(lambda a: jnp.arange(a.size, dtype=a.dtype).reshape(a.shape), state.carry)
    before = jax.tree.map(np.array, carry)
    moves = ([1, 1, 3], [2, NOWHERE, SLOTS], [1, 1, 3], [2, NOWHERE, PAGES])
    moved = generation.copy(state._replace(carry=carry), generation.Moves(*(np.array(m, np.int32) for m in moves)))
    for got, old in zip(jax.tree.leaves(moved.carry), jax.tree.leaves(before), strict=True):
        want = old.copy()
        want[2] = old[1]
        assert same_bits(got, want)


@pytest.mark.parametrize("moe", ["grouped", pytest.param("dense", marks=SLOW)])
def test_b35_b36_padding_is_poisoned_before_every_layer(model, moe, monkeypatch):
    """TensorRT-LLM#17816, pytorch#193633: rows that nobody wrote reached the experts' choice, and 0 * NaN the sum.

    Decode rows and prompt rows without a request, and tokens past the last row, hold the poison where each layer begins.
    """
    call = Block.__call__
    poison = []

    def poisoned(self, depth, memory, step, *rest):
        real = jnp.concatenate([step.write_slots[: step.decode_rows] != NOWHERE, step.prefill.real])
        assert real.shape == depth.running.shape[:1]
        depth = jax.tree.map(lambda a: jnp.where(real[:, None], a, poison[-1]), depth)
        return call(self, depth, memory, step, *rest)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(module, batch, carry, value):
        poison.append(value)
        return forward(module, batch, carry, Context(Kernels("chunk", moe), decode_rows=4))

    monkeypatch.setattr(Block, "__call__", poisoned)
    rows = [
        batching.Row(PROMPT[5:6], 5, 1, (4,)), batching.Row(PROMPT[7:8], 7, 3, (6,)),
        batching.Row(PROMPT[:9], 0, 0, (2, 7)), batching.Row(PROMPT[3:6], 3, 2, (0,)),
    ]  # fmt: skip
    packed = batching.fill(rows, batching.Bucket(19, 4, 4, 2))
    carry = pool(model)
    for row in rows:
        if row.computed:
            past = model.after(*PROMPT[: row.computed])[1]
            carry = put_state(model.config, carry, Row([], row.computed, row.slot, row.pages), past)
    outs = [run(model.module, packed.batch, carry, np.float32(value)) for value in (0, np.nan, np.inf, 1e30, -1e30)]
    for row, place in zip(rows, packed.places, strict=True):
        ids = PROMPT[: row.computed + len(row.tokens)]
        assert_close(outs[0].logits[place], model.after(*ids)[0][-1], LOGITS)
        assert all(same_bits(out.logits[place], outs[0].logits[place]) for out in outs)
        assert all(out.first_bad[place] == -1 for out in outs)
    for out in outs:
        assert all(map(same_bits, jax.tree.leaves(out.carry), jax.tree.leaves(outs[0].carry)))


@pytest.mark.parametrize("beside", [[], [PROMPT[9:13], PROMPT[20:21], PROMPT[30:36]]], ids=["one", "four"])
@pytest.mark.parametrize("left", [0, 3, 17])
def test_b37_padding_left_and_right_of_one_row_and_of_four(model, left, beside):
    """transformers#46773: the mask was applied in batches of more than one only."""
    rows = [Row([PAD] * left), Row(PROMPT[:5]), *map(Row, beside), *[Row([])] * (3 - len(beside))]
    out = step(model.module, pack(rows, 37, 0, PAD), None, ctx=Context(Kernels("chunk", "dense")))
    assert_close(out.logits[left : left + 5], model.after(*PROMPT[:5])[0], LOGITS)


@SLOW
def test_b37_padding_has_no_gradient(model):
    """fla#1263, Automodel#3734: padding had a part in a normaliser, and was counted by the experts."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def gradient(module, batch, wanted):
        def loss(module):
            logits = forward(module, batch, None, Context(Kernels("chunk", "dense"))).logits
            return jnp.where(wanted[:, None], logits, 0).sum()

        return jax.grad(loss)(module).model.embed_tokens.weight[...]

    for left in (0, 3, 17):
        wanted = (np.arange(37) >= left) & (np.arange(37) < left + 5)
        found = gradient(model.module, pack([Row([PAD] * left), Row(PROMPT[:5])], 37, 0, PAD), wanted)
        assert np.flatnonzero(np.asarray(found).any(-1)).tolist() == sorted({*PROMPT[:5]})


# -- kind 7: splits ------------------------------------------------------------------------------------------------------
SPLITS = {"one shot": [32], "8 8 8 8": [8] * 4, "1 31": [1, 31], "31 1": [31, 1], "5 27": [5, 27], "16 16": [16, 16]}


def test_b38_every_split_has_the_same_hidden_states_and_memory(model):
    """vllm#52909: a prompt in four pieces was another one from the second piece on. Every layer's sum, and the state."""
    ctx, row, found = (
        Context(Kernels("chunk", "grouped"), probe=Probe(frozenset(["hidden"]))),
        Row((), 0, 1, (3, 0, 6, 2)),
        {},
    )
    for name, sizes in SPLITS.items():
        carry, hidden, past = pool(model), [], 0
        for size in sizes:
            piece = row._replace(ids=PROMPT[past : past + size], past=past)
            out = step(model.module, pack([piece], 32, 4, PAD), carry, ctx=ctx)
            carry, past = out.carry, past + size
            hidden.append(out.taps["hidden"][:, :size])
        assert past == 32
        found[name] = np.concatenate(hidden, 1), get_state(model.config, carry, row._replace(past=32))
    assert_state(found["one shot"][1], model.after(*PROMPT[:32])[1], STATE)
    for name, (hidden, state) in found.items():
        assert_close(hidden, found["one shot"][0], 2e-5, name)
        assert_state(state, found["one shot"][1], 1e-5)


@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_b41_latents_and_projection_of_any_dtype(cache, weights):
    """vllm#51772: the path over cached latents assumed one dtype of the projection. All four run, and both paths agree."""
    rng, S, H, N, V, C, R = np.random.default_rng(0), 11, 3, 5, 7, 6, 2
    shapes = (S, H, N + R), (S, C), (S, R), (H * (N + V), C)
    q, c, k_r, kv_b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    want, latents = mla.plain(q, c, k_r, kv_b)[-1:], jnp.concatenate([c, k_r], -1)
    before, last = pack([Row([0] * (S - 1), 0, 0, (2, 5))], S - 1, 2), pack([Row([0], S - 1, 0, (2, 5))], 1, 2)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both_ways(pages, kv_b):
        pages = mla.write(pages, latents[:-1], prepare(before, 0, PAGE, 4))
        decoded, prefilled = prepare(last, 1, PAGE, 4), prepare(last, 0, PAGE, 4)
        pages, absorbed = mla.write(pages, latents[-1:], decoded), mla.absorb(kv_b, heads=H, nope=N)
        absorbed_o = mla.decode(q[-1:], pages, decoded.decode, *absorbed)
        return absorbed_o, mla.prefill(q[-1:], c[-1:], k_r[-1:], kv_b, pages, prefilled.prefill)

    bound = 1e-6 if cache == weights == "float32" else 5e-3  # bfloat16 has 8 bits
    for o in both_ways(jnp.full((PAGES, PAGE, C + R), np.nan, cache), kv_b.astype(weights)):
        assert relative_error(o, want) < bound


@pytest.mark.parametrize("length", [1, 2])
def test_b42_absorbed_and_expanded(model, length):
    """mlx-lm's kimi_k3.py: absorbed for one token, expanded for more. The last token both ways, with the output gate."""
    assert model.config.mla_use_output_gate
    carry, past, probe = pool(model), length - 1, Probe(frozenset(["mla_out_1"]))
    row = Row(PROMPT[past:length], past, 1, (4,))
    if past:
        carry = put_state(model.config, carry, row, model.after(*PROMPT[:past])[1])
    contexts = [Context(Kernels("chunk", "dense"), decode, probe) for decode in (0, 1)]
    outs = [step(model.module, pack([row], 1, 1), carry, ctx=ctx).taps["mla_out_1"] for ctx in contexts]
    assert relative_error(*outs) < 1e-6
    want = model.after(*PROMPT[:length])[2]["mla_out_1"][-1:]  # whose scale is that of the expanded key
    assert relative_error(outs[1], want) < 1e-5


# -- kind 15: compiled and not -------------------------------------------------------------------------------------------
def served(engine, seed):
    """Tokens and memory of a few requests at random moments, with preemptions; the same for the same seed."""
    rng, ends = np.random.default_rng(seed), {}
    todo = [
        (prompt(int(rng.integers(1, 21)), seed + i), int(rng.integers(1, 5))) for i in range(int(rng.integers(1, 4)))
    ]
    engine.cache.clear()
    first = engine._next
    while todo or engine.has_work:
        if todo and rng.random() < 0.5:
            ids, most = todo.pop()
            engine.add(*toy().lm.requests([ids], [greedy(most)]), keep=True)
        if engine.scheduler.running and rng.random() < 0.1:
            engine.scheduler.preempt(engine.scheduler.running[int(rng.integers(len(engine.scheduler.running)))])
        ends |= {output.request - first: output.result for output in engine.step() if output.result}
    return [ends[i] for i in range(len(ends))]


@SLOW
def test_b76_compiled_is_what_runs_operation_by_operation(model, monkeypatch):
    """vllm#52531, vllm-ascend#13277: replayed programs had lengths and indices of the time of their capture. 30 schedules."""
    with small_engine() as engine:
        compiled = [completion for seed in range(30) for completion in served(engine, seed)]
    for name in ("place", "copy", "step", "decode", "unload"):  # what jit does with arguments
        monkeypatch.setattr(generation, name, on_the_device(getattr(generation, name)))
    with jax.disable_jit(), small_engine() as engine:
        eager = [completion for seed in range(30) for completion in served(engine, seed)]
    for a, b in zip(compiled, eager, strict=True):
        model.assert_alone(a)
        assert a.token_ids == b.token_ids
        (kda_a, mla_a, length_a), (kda_b, mla_b, length_b) = a.state.carry, b.state.carry
        assert length_a == length_b
        for x, y in zip(jax.tree.leaves(kda_a), jax.tree.leaves(kda_b), strict=True):
            assert_close(x, y, 1e-6 * max(1, np.abs(np.asarray(y)).max()))
        for x, y in zip(mla_a, mla_b, strict=True):  # a layer further on
            assert_close(x, y, STATE)


def on_the_device(function):
    def put(value):
        return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value

    return lambda first, *rest, **options: function(first, *jax.tree.map(put, rest), **options)


# -- kind 22: rounding ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("own_size", [False, pytest.param(True, marks=SLOW)])
def test_b107_splits_at_multiples_of_the_chunk_have_the_same_bits(own_size):
    """vllm#38561, #55627: what a token got depended on where its prompt was cut. own_size: each piece by a program of its size."""
    H, K, V, T, C = 3, 16, 24, 192, 64
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=(T, H, n)) for n in (K, K, V))
    x = kda.Inputs(*arrays, -5 * rng.uniform(size=(T, H, K)) ** 3, rng.uniform(0.05, 0.95, size=(T, H)))
    x = jax.tree.map(np.float32, x)
    S = rng.normal(size=(1, H, V, K)).astype(np.float32)
    run = jax.jit(lambda S, x, batch: kda.prefill(S, x, prepare(batch, 0, PAGE, 4).prefill, "chunk"))

    def pieces(ends):
        """States and outputs of one after another."""
        state, outputs = S, []
        for begin, end in zip((0, *ends), (*ends, T), strict=True):
            size = end - begin if own_size else T
            piece = [np.concatenate([a[begin:end], np.zeros((size - end + begin, *a.shape[1:]), a.dtype)]) for a in x]
            state, o = run(state, kda.Inputs(*piece), lengths_batch((end - begin,), size))
            outputs.append(o[: end - begin])
        return state, np.concatenate(outputs)

    want = pieces(())
    for ends in ((C,), (2 * C,), (C, 2 * C)):
        assert all(map(same_bits, pieces(ends), want)), ends
