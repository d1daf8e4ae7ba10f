"""The packed forward pass against the float64 reference: splits, neighbours, memory, depth, variants, read-outs."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    K3_FIELDS,
    QUICK,
    VARIANTS,
    Row,
    assert_close,
    assert_directions,
    assert_state,
    checkpoint,
    get_state,
    lengths_batch,
    module,
    pack,
    put_state,
    same_bits,
    small,
    stored,
    tensors_of,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.batch import single
from k3jax.carry import Carry, empty
from k3jax.config import K3Config
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, forward
from k3jax.probe import Probe, expand, sites
from k3jax.reference import Reference

# Logits have a standard deviation of about 1.
LOGITS = 1e-4
STATE = 3e-5

PAGE, SLOTS, PAGES, WIDTH = 8, 6, 14, 3  # WIDTH pages a row at most
ROWS, TOKENS = 5, 24  # of every batch of the main model; a batch of ROWS tokens decodes
PAD = 30  # a token id that no prompt has
PROMPT = np.random.default_rng(4).integers(0, PAD, 21).tolist()

step = jax.jit(forward, static_argnames="ctx", compiler_options=QUICK)
# Models of one test run as they are, operation by operation: those are compiled once for all models.
eager = forward


class Model:
    """A module and its reference over the same random weights."""

    def __init__(self, config, packed=False, change=lambda tensors: tensors):
        """Seed 1: half a unit in the last place of every weight moves these logits by 4e-6 at most, those of others by 2e-4."""
        self.config = config
        self.tensors = change(stored(config, checkpoint(config, seed=1), packed))
        self.module = module(config, self.tensors, packed)
        self.reference = Reference(config, self.tensors)
        self.after = lru_cache(self.after)

    def after(self, *ids):
        """The reference's logits and state after these tokens, and the trace."""
        return self.reference.forward(ids)

    def pool(self, slots=SLOTS, pages=PAGES, fill=0.0):
        carry = empty(self.config, slots=slots, pages=pages, page=PAGE, dtype="float32")
        return jax.tree.map(lambda a: jnp.full_like(a, fill) if a.dtype == jnp.float32 else a, carry)

    def run(self, rows, carry, tokens=TOKENS, decode=0, module=None, **context):
        """One step; rows are filled up to ROWS with empty ones."""
        rows = [*rows, *[Row([])] * (ROWS - len(rows))]
        ctx = Context(Kernels("chunk", "grouped"), decode, **context)
        return step(module or self.module, pack(rows, tokens, WIDTH, PAD), carry, ctx=ctx)


# K3 with MLA at layers 2 and 4 and depth blocks of three.
FIVE = K3_FIELDS | dict(num_hidden_layers=5, kda_layers=(0, 1, 3), attn_res_block_size=3)
EVERY_SITE = Probe(frozenset(sites(small(**FIVE))))


@pytest.fixture(scope="module")
def five():
    return Model(small(**FIVE))


def logits_of(rows, out):
    """Each row's logits of all its tokens."""
    ends = np.cumsum([len(row.ids) for row in rows])
    return [np.asarray(out.logits[end - len(row.ids) : end]) for row, end in zip(rows, ends, strict=True)]


def assert_rows(model, rows, histories, out):
    """Logits, and where a row has a slot its memory, are those of the reference for the whole history."""
    for row, past, got in zip(rows, histories, logits_of(rows, out), strict=True):
        if not row.ids:
            continue
        want, state, _ = model.after(*past, *row.ids)
        assert_close(got, want[len(past) :], LOGITS)
        if row.slot < SLOTS:
            assert_state(get_state(model.config, out.carry, row), state, STATE)


def in_pieces(model, ids, cuts, decode_ones, slot=2, pages=(7, 0, 4)):
    """Logits of all tokens and the carry after a prompt in pieces; pieces of one token are decoded or prefilled."""
    carry, logits, past = model.pool(fill=np.nan), [], 0
    for piece in np.split(np.array(ids), cuts):
        row = Row(piece.tolist(), past, slot, pages)
        if len(piece) == 1 and decode_ones:
            out = model.run([row, *[Row([PAD])] * (ROWS - 1)], carry, tokens=ROWS, decode=ROWS)
        else:
            out = model.run([row], carry)
        logits, carry, past = [*logits, out.logits[: len(piece)]], out.carry, past + len(piece)
    return np.concatenate(logits), carry


# Splits.

CUTS = {
    "one shot": [],
    "by one": range(1, 21),
    "by three": range(3, 21, 3),
    "sixteen first": [16],
    "one last": [20],
    "one first": [1],
}


@pytest.mark.parametrize("decode_ones", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
def test_any_split_equals_one_shot(five, cuts, decode_ones):
    """Also a prompt that is decoded from its first token, in a slot and pages of NaN."""
    want, state, _ = five.after(*PROMPT)
    logits, carry = in_pieces(five, PROMPT, list(CUTS[cuts]), decode_ones)
    assert_close(logits, want, LOGITS)
    assert_state(get_state(five.config, carry, Row(PROMPT, 0, 2, (7, 0, 4))), state, STATE)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(cuts=st.sets(st.integers(1, 20)), decode_ones=st.booleans())
def test_random_splits_equal_one_shot(five, cuts, decode_ones):
    want, state, _ = five.after(*PROMPT)
    logits, carry = in_pieces(five, PROMPT, sorted(cuts), decode_ones)
    assert_close(logits, want, LOGITS)
    assert_state(get_state(five.config, carry, Row(PROMPT, 0, 2, (7, 0, 4))), state, STATE)


def test_chunks_of_sixty_four():
    """A prompt of 150 in pieces around the chunk and the page: state and latents carried over several of both."""
    model = Model(small(**K3_FIELDS | dict(num_hidden_layers=2, kda_layers=(0,))))
    ids, pages = np.random.default_rng(0).integers(0, PAD, 150).tolist(), np.random.default_rng(1).permutation(19)
    want, state, _ = model.after(*ids)
    for cuts in ([64, 128], [1, 65, 128], [63, 127]):
        carry, logits, past = model.pool(pages=19, fill=np.nan), [], 0
        for piece in np.split(np.array(ids), cuts):
            batch = pack([Row(piece.tolist(), past, 1, pages)], 64, 19, PAD)
            out = step(model.module, batch, carry, ctx=Context(Kernels("chunk", "grouped")))
            logits, carry, past = [*logits, out.logits[: len(piece)]], out.carry, past + len(piece)
        assert_close(np.concatenate(logits), want, LOGITS)
        assert_state(get_state(model.config, carry, Row(ids, 0, 1, pages)), state, STATE)


# Batches of all kinds of rows.

# Two rows of one token, continued and fresh; a continued row; an idle one; a fresh one. 18 tokens, 6 of padding.
PASTS = (PROMPT[:7], [], PROMPT[5:18], PROMPT[:3], [])
MIXED = (
    Row(PROMPT[7:8], 7, 1, (4, 9)), Row(PROMPT[2:3], 0, 3, (2,)), Row(PROMPT[:7], 13, 0, (8, 0, 5)), Row([], 3, 5, (3,)),
    Row(PROMPT[4:13], 0, 2, (11, 6)),
)  # fmt: skip


def mixed_pool(model, rows=MIXED, fill=0.0):
    """The memory before MIXED: what the reference says of each past, all else `fill`."""
    carry = model.pool(fill=fill)
    for row, past in zip(rows, PASTS, strict=True):
        if past:
            carry = put_state(model.config, carry, row, model.after(*past)[1])
    return carry


@pytest.mark.parametrize("decode", [0, 2])
def test_mixed_rows_equal_the_reference(five, decode):
    out = five.run(MIXED, mixed_pool(five), decode=decode)
    assert_rows(five, MIXED, PASTS, out)
    assert out.first_bad.tolist() == [-1] * ROWS


def test_decoding_a_token_is_prefilling_it(five):
    """How a row of one token is classified changes nothing but rounding."""
    decoded, prefilled = (five.run(MIXED, mixed_pool(five), decode=decode) for decode in (2, 0))
    assert_close(decoded.logits[:18], prefilled.logits[:18], 2e-5)
    for a, b in zip(jax.tree.leaves(decoded.carry), jax.tree.leaves(prefilled.carry), strict=True):
        assert_close(a, b, 2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_order_slots_and_pages_do_not_matter(five, seed):
    """Rows in another order, in other slots and pages: the same numbers."""
    rng = np.random.default_rng(seed)
    order, slots, pages = rng.permutation(ROWS), rng.permutation(SLOTS), rng.permutation(PAGES)
    rows = [row._replace(slot=int(slots[row.slot]), pages=pages[list(row.pages)].tolist()) for row in MIXED]
    want = five.run(MIXED, mixed_pool(five))
    out = five.run([rows[i] for i in order], mixed_pool(five, rows))
    moved = logits_of([rows[i] for i in order], out)
    for row, there, got in zip((MIXED[i] for i in order), (rows[i] for i in order), moved, strict=True):
        assert_close(got, logits_of(MIXED, want)[MIXED.index(row)], 2e-5)
        states = [get_state(five.config, carry, r) for carry, r in ((out.carry, there), (want.carry, row)) if row.ids]
        if states:
            assert_state(*states, 1e-5)


def test_neighbours_do_not_matter(five):
    """Other tokens and other states in the other rows: the same bits."""
    other = [row._replace(ids=[(i + 5) % PAD for i in row.ids]) for row in MIXED]
    for kept in range(ROWS):
        rows = [MIXED[i] if i == kept else other[i] for i in range(ROWS)]
        carry, want = mixed_pool(five), five.run(MIXED, mixed_pool(five))
        out = five.run(rows, carry)
        assert same_bits(logits_of(rows, out)[kept], logits_of(MIXED, want)[kept])


def test_nothing_about_a_request_is_static(five):
    """B74, tt-metal#54850: other lengths, slots, pages and pasts run the program that is compiled already, with their own values."""
    traces = []

    @jax.jit
    def counted(model, batch, carry):
        traces.append(1)
        return forward(model, batch, carry, Context(Kernels("scan", "dense"))).logits

    model = Model(small(num_hidden_layers=1, kda_layers=(0,)))
    for length, slot in ((5, 0), (3, 3), (1, 5)):
        got = counted(model.module, pack([Row(PROMPT[:length], 0, slot, (slot,)), Row([])], 8, 1), model.pool())
        assert_close(got[:length], model.after(*PROMPT[:length])[0], LOGITS)
    assert len(traces) == 1


# What must not be read or written.


def with_embedding(model, token, value):
    """The module with one row of the embedding replaced."""
    tensors = model.tensors | {"model.embed_tokens.weight": model.tensors["model.embed_tokens.weight"].copy()}
    tensors["model.embed_tokens.weight"][token] = value
    return module(model.config, tensors)


def owned(config, rows):
    """Masks over the leaves of a carry: what these rows may write."""
    slots, pages = np.zeros(SLOTS, bool), np.zeros((PAGES, PAGE), bool)
    for row in rows:
        slots[[row.slot] * bool(row.ids)] = True
        for position in range(row.past, row.past + len(row.ids)):
            pages[row.pages[position // PAGE], position % PAGE] = True
    return [slots] * 2 * len(config.kda_layers) + [pages] * len(config.mla_layers) + [slots]


@pytest.mark.parametrize("decode", [0, 2])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_padding_and_memory_of_others_change_nothing(five, decode, poison):
    """Poisoned: the embedding of padding, slots and pages of nobody, of idle rows, and of fresh rows before they begin."""
    want = five.run(MIXED, mixed_pool(five), decode=decode)
    before = mixed_pool(five, fill=poison)
    out = five.run(MIXED, before, decode=decode, module=with_embedding(five, PAD, poison))
    assert same_bits(out.logits[:18], want.logits[:18]) and out.first_bad.tolist() == [-1] * ROWS
    leaves = (jax.tree.leaves(carry) for carry in (out.carry, want.carry, before))
    for got, clean, old, own in zip(*leaves, owned(five.config, MIXED), strict=True):
        assert same_bits(np.asarray(got)[own], np.asarray(clean)[own])
        assert same_bits(np.asarray(got)[~own], np.asarray(old)[~own])


@pytest.mark.parametrize("tokens, decode", [(ROWS, ROWS), (TOKENS, 2), (TOKENS, 0)])
def test_prompts_of_one_token_ignore_dirty_slots(five, tokens, decode):
    """B02, vllm#51483: a row is fresh because nothing was computed, not because it is long."""
    rows = [Row([token], 0, slot, (slot + 3,)) for slot, token in enumerate(PROMPT[:ROWS])]
    want = five.run(rows, five.pool(), tokens=tokens, decode=decode)
    assert_rows(five, rows, [[]] * ROWS, want)
    for poison in (7.0, np.nan):
        out = five.run(rows, five.pool(fill=poison), tokens=tokens, decode=decode)
        assert same_bits(out.logits[:ROWS], want.logits[:ROWS])
        assert_rows(five, rows, [[]] * ROWS, out)


@pytest.mark.parametrize("extra_rows, tokens", [(0, 4), (1, 2)])
def test_decoded_rows_beside_padding_and_idle_rows(extra_rows, tokens):
    """Padding tokens without a row, and rows without a token."""
    model = Model(small(num_hidden_layers=2, kda_layers=(0,)))
    rows = [Row([7], 0, 0, (0,)), Row([9], 0, 1, (1,)), *[Row([], 3, 2, (2,))] * extra_rows]
    before = model.pool(fill=np.nan)
    out = step(model.module, pack(rows, tokens, 1, PAD), before, ctx=Context(Kernels("chunk", "dense"), decode_rows=2))
    assert_rows(model, rows, [[]] * len(rows), out)
    assert out.first_bad.tolist() == [-1] * len(rows)
    for got, old, own in zip(*map(jax.tree.leaves, (out.carry, before)), owned(model.config, rows[:2]), strict=True):
        assert same_bits(np.asarray(got)[~own], np.asarray(old)[~own])


@pytest.mark.parametrize("tokens, decode", [(ROWS, ROWS), (TOKENS, 2), (TOKENS, 0)])
def test_finished_rows_leave_no_trace(five, tokens, decode):
    """Rows with slots and pages NOWHERE keep their place in a batch: not a byte of the carry changes."""
    before = mixed_pool(five, fill=np.nan)
    rows = [Row([token], 4) for token in PROMPT[:ROWS]]
    out = five.run(rows, before, tokens=tokens, decode=decode)
    for got, old in zip(jax.tree.leaves(out.carry), jax.tree.leaves(before), strict=True):
        assert same_bits(got, old)
    assert np.isfinite(out.logits[:ROWS]).all()
    live = [MIXED[0], *rows[1:]]
    carry = five.run(live, mixed_pool(five, fill=np.nan), tokens=tokens, decode=decode).carry
    for got, old, own in zip(
        jax.tree.leaves(carry), jax.tree.leaves(before), owned(five.config, live[:1]), strict=True
    ):
        assert same_bits(np.asarray(got)[~own], np.asarray(old)[~own]) and np.isfinite(np.asarray(got)[own]).all()


# The carry.


def test_the_carry_holds_what_outlives_a_step_and_nothing_else():
    """Leaves, shapes and dtypes, before and after a step of a bfloat16 model."""
    config = small(**FIVE)
    H, K, latent = config.kda_num_heads, config.kda_head_dim, config.kv_lora_rank + config.qk_rope_head_dim
    conv, S = jax.ShapeDtypeStruct((4, 3, H, 3 * K), jnp.bfloat16), jax.ShapeDtypeStruct((4, H, K, K), jnp.float32)
    want = [conv, S] * 3 + [jax.ShapeDtypeStruct((10, 16, latent), jnp.bfloat16)] * 2
    want.append(jax.ShapeDtypeStruct((4,), jnp.int32))
    before = jax.eval_shape(lambda: empty(config, slots=4, pages=10, page=16))
    batch, ctx = lengths_batch((5, 0, 3), 9, page=16), Context(Kernels())
    out = jax.eval_shape(lambda model, carry: forward(model, batch, carry, ctx), K3.abstract(config), before)
    for carry in (before, out.carry):
        assert type(carry) is Carry and jax.tree.leaves(carry) == want
    assert out.logits == jax.ShapeDtypeStruct((9, config.vocab_size), jnp.float32) and out.taps == {}


def test_the_size_of_k3s_carry():
    """69 KDA layers of 6.21 MiB a request, 24 MLA layers of 1152 bytes a token."""
    carry = jax.eval_shape(lambda: empty(K3Config.k3(), slots=1, pages=1))
    assert len(jax.tree.leaves(carry)) == 69 * 2 + 24 + 1
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(carry.kda)) == 69 * (
        96 * 128 * 128 * 4 + 3 * 12288 * 3 * 2
    )
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(carry.mla)) == 27648 * 64


# Depth.


def runs(*pairs):
    return [value for value, count in pairs for _ in range(count)]


def test_depth_sources_of_k3():
    """Blocks are stored at layers 0, 12, ..., 84, before their MLP; 186 mixtures read 1002 sources."""
    config = K3Config.k3()
    attn = runs((1, 1), (2, 12), (3, 12), (4, 12), (5, 12), (6, 12), (7, 12), (8, 12), (9, 8))
    mlp = runs((2, 12), (3, 12), (4, 12), (5, 12), (6, 12), (7, 12), (8, 12), (9, 9))
    assert [config.depth_sources(layer, "attn") for layer in range(93)] == attn
    assert [config.depth_sources(layer, "mlp") for layer in range(93)] == mlp
    assert [layer for layer in range(93) if config.starts_block(layer)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert sum(attn[1:]) + sum(mlp) + 9 == 1002
    assert [layer for layer in range(93) if config.mixer(layer) == "mla"] == [*range(3, 92, 4), 92]
    assert [layer for layer in range(93) if not config.is_moe(layer)] == [0]


def score(config, ids=PROMPT[:4], save=()):
    """A fresh prompt without a carry, and the reference's view of it."""
    model = Model(config)
    ctx = Context(Kernels("scan", "dense"), probe=Probe(frozenset(save)))
    batch = single(jnp.array(ids, jnp.int32), len(ids))
    return eager(model.module, batch, None, ctx=ctx), *model.after(*ids)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [12, 13, 24, 25])
def test_models_that_end_around_a_block(layers):
    """Every layer's sum, every weight over depth and the output, for blocks of twelve."""
    config = small(num_hidden_layers=layers, kda_layers=(), first_k_dense_replace=99, attn_res_block_size=12)
    names = expand(config, ["hidden", "attnres_*"])
    out, logits, _, trace = score(config, save=names)
    assert_close(out.logits, logits, LOGITS)
    assert set(out.taps) == set(names)
    for name in set(names) & set(trace):
        assert_close(out.taps[name], trace[name], 2e-5 * max(1, np.abs(trace[name]).max()), name)
    for layer in range(layers):
        assert out.taps[f"attnres_R_attn_{layer}"] == config.depth_sources(layer, "attn")
        assert out.taps[f"attnres_R_{layer}"] == config.depth_sources(layer, "mlp")
    assert out.taps["attnres_out"].shape == (4, -(-layers // 12) + 1)


def test_depth_queries_of_zero_weigh_all_sources_alike():
    def zero(tensors):
        return {name: value * (not name.endswith("_res_proj.weight")) for name, value in tensors.items()}

    model = Model(small(**FIVE), change=zero)
    out = model.run([Row(PROMPT, 0, 2, (7, 0, 4))], model.pool(), probe=EVERY_SITE)
    assert_close(out.logits[:21], model.after(*PROMPT)[0], LOGITS)
    for name in expand(model.config, ["attnres_attn_*", "attnres_mlp_*", "attnres_out"]):
        assert (np.asarray(out.taps[name])[:21] == np.float32(1 / out.taps[name].shape[1])).all(), name


# Variants.

MORE = VARIANTS | {
    "kimi_linear_attn_res": dict(attn_res_block_size=2),
    "kimi_linear_full_rank_gate": dict(use_full_rank_gate=True),
    "kimi_linear_mla_gate": dict(mla_use_output_gate=True),
    "kimi_linear_situ": dict(hidden_act="situ", activation_situ_beta=0.7, activation_situ_linear_beta=1.3),
    "without_renormalisation": K3_FIELDS | dict(moe_renormalize=False, latent_moe_use_norm=False),
    "epsilons": K3_FIELDS | dict(rms_norm_eps=0.3, latent_norm_eps=0.7),
    "all_dense": K3_FIELDS | dict(first_k_dense_replace=4),
    "packed_experts": K3_FIELDS | dict(routed_expert_hidden_size=32, moe_intermediate_size=64),
}
DENSE = ("kimi_linear", "k3_groups", "packed_experts")  # the other form of the experts, which the rest do not use

# A decoded row, a fresh one, a continued one and an idle one; two tokens of padding.
KINDS = (Row(PROMPT[5:6], 5, 1, (1,)), Row(PROMPT[:6], 0, 2, (0,)), Row(PROMPT[4:7], 6, 0, (3, 2)), Row([], 2, 3, (4,)))
KIND_PASTS = (PROMPT[:5], [], PROMPT[8:14], PROMPT[:2])


# One field away from a variant that the quick suite has.
NEAR = """k3_silu k3_no_shared_experts kimi_linear_bounded kimi_linear_q_lora kimi_linear_latent kimi_linear_full_rank_gate
    kimi_linear_mla_gate kimi_linear_situ all_dense""".split()


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.slow] * (v in NEAR)) for v in MORE])
def test_variants_equal_the_reference(variant):
    moe = "dense" if variant in DENSE else "grouped"
    model = Model(small(**MORE[variant]), packed=variant == "packed_experts")
    carry = model.pool()
    for row, past in zip(KINDS, KIND_PASTS, strict=True):
        if past:
            carry = put_state(model.config, carry, row, model.after(*past)[1])
    out = eager(model.module, pack(KINDS, 12, 2, PAD), carry, ctx=Context(Kernels("chunk", moe), decode_rows=1))
    assert_rows(model, KINDS, KIND_PASTS, out)


def test_forced_experts():
    """The layers named use the experts given, with their own scores as weights; the others choose."""
    model = Model(small(**K3_FIELDS))
    ids = np.array([[7, 0, 4]] * 6)
    ids[3] = [1, 2, 5]
    batch = single(jnp.array(PROMPT[:6], jnp.int32), 6)
    ctx = Context(Kernels("scan", "dense"))
    out = step(model.module, batch, None, ctx=ctx, routing={"router_ids_2": jnp.asarray(ids)})
    want = model.reference.forward(PROMPT[:6], routing={"router_ids_2": ids})[0]
    assert np.abs(want - model.after(*PROMPT[:6])[0]).max() > 1e-2
    assert_close(out.logits, want, LOGITS)


@pytest.mark.slow
def test_gradients_of_the_whole_model():
    """Every parameter at once along random directions, two documents in one batch, against the reference in float64."""
    model = Model(small(**K3_FIELDS | dict(num_hidden_layers=2, kda_layers=(0,))))
    rows = (PROMPT[:5], PROMPT[8:11])
    batch, seen = pack([Row(ids) for ids in rows], 10, 0, PAD), np.random.default_rng(0).normal(size=(8, 31))
    # What nothing depends on: the first layer reads the embedding unmixed, and the bias only chooses.
    dead = [name for name in model.tensors if "layers.0.self_attention_res" in name or name.endswith("correction_bias")]
    names = sorted(set(model.tensors) - set(dead))

    def loss(module):
        return (forward(module, batch, None, Context(Kernels("chunk", "dense"))).logits[:8] * seen).sum()

    def exact(*values):
        reference = Reference(model.config, model.tensors | dict(zip(names, values, strict=True)))
        return (np.concatenate([reference.forward(ids)[0] for ids in rows]) * seen).sum()

    gradient = tensors_of(model.config, jax.jit(jax.grad(loss), compiler_options=QUICK)(model.module))
    assert not any(gradient[name].any() for name in dead)
    assert_directions(exact, [model.tensors[name] for name in names], [gradient[name] for name in names], 1e-4)


# Causes and effects.


@pytest.mark.parametrize("at", [0, 4, 15, 16, 20])
def test_a_token_is_seen_by_later_ones_only(five, at):
    row = Row(PROMPT, 0, 2, (7, 0, 4))
    changed = row._replace(ids=[*PROMPT[:at], (PROMPT[at] + 1) % PAD, *PROMPT[at + 1 :]])
    want, got = (np.asarray(five.run([each], five.pool()).logits)[:21] for each in (row, changed))
    assert same_bits(got[:at], want[:at])
    assert np.abs(got[at:] - want[at:]).max(axis=-1).min() > 1e-5


def test_a_bad_row_is_named_and_alone(five):
    """NaN in a token's embedding: the row's first bad layer is 0, and the others keep every bit."""
    want = five.run(MIXED, mixed_pool(five))
    bad = [*MIXED[:2], MIXED[2]._replace(ids=[*PROMPT[:3], PAD, *PROMPT[4:7]]), *MIXED[3:]]
    out = five.run(bad, mixed_pool(five), module=with_embedding(five, PAD, np.nan))
    assert out.first_bad.tolist() == [-1, -1, 0, -1, -1]
    for i, (got, clean) in enumerate(zip(logits_of(bad, out), logits_of(MIXED, want), strict=True)):
        assert i == 2 or same_bits(got, clean)
    # The row's own earlier tokens share a chunk with the bad one and fall with it: the request ends as a whole.
    assert np.isnan(logits_of(bad, out)[2][3:]).all()


@pytest.mark.parametrize("decode", [0, 2])
@pytest.mark.parametrize("layer", range(5))
def test_the_first_bad_layer_is_that_of_the_bad_memory(five, layer, decode):
    """NaN in what rows 0 and 2 remember in one layer: conv history, state or latents."""
    carry = jax.tree.map(np.array, mixed_pool(five))
    if five.config.mixer(layer) == "kda":
        memory = carry.kda[five.config.kda_layers.index(layer)]
        memory.conv[1, -1], memory.S[0] = np.nan, np.nan
    else:
        pool = carry.mla[five.config.mla_layers.index(layer)]
        pool[4, 3], pool[8, 0] = np.nan, np.nan
    out = five.run(MIXED, jax.tree.map(jnp.asarray, carry), decode=decode)
    assert out.first_bad.tolist() == [layer, -1, layer, -1, -1]


# Read-outs.


def test_every_site_is_what_the_reference_sees(five):
    """A fresh prompt alone: names, shapes and values. Raw projections and states are read by token and by row."""
    names = sites(five.config)
    out = five.run([Row(PROMPT, 0, 2, (7, 0, 4))], five.pool(), probe=EVERY_SITE)
    trace = five.after(*PROMPT)[2]
    assert set(out.taps) == set(names) and set(trace) <= set(names)
    assert set(names) - set(trace) == {f"attnres_R_attn_{layer}" for layer in range(5)}
    assert_close(out.logits[:21], five.after(*PROMPT)[0], LOGITS)
    for name, want in trace.items():
        got = np.asarray(out.taps[name])
        if name.startswith("kda_state"):
            assert got.shape == (ROWS, *want.shape)
            got = got[0]
        elif name.startswith("kda_conv"):
            assert got.shape == (TOKENS, want.shape[1])
            got = got[21 - len(want) : 21]
        elif name == "hidden":
            assert got.shape == (5, TOKENS, want.shape[-1])
            got = got[:, :21]
        elif want.ndim:
            assert got.shape == (TOKENS, *want.shape[1:])
            got = got[:21]
        if name.startswith("router_ids"):
            assert np.array_equal(got, want), name
        else:
            assert_close(got, want, 2e-5 * max(1, np.abs(want).max()), name)


def test_reading_changes_nothing(five):
    row = Row(PROMPT, 0, 2, (7, 0, 4))
    read, plain = (five.run([row], five.pool(), probe=probe) for probe in (EVERY_SITE, Probe()))
    assert_close(read.logits[:21], plain.logits[:21], 2e-5)
    assert plain.taps == {}


def test_patterns_of_sites():
    config = small(**FIVE)
    assert expand(config, ["kda_beta_*", "embed"]) == (*(f"kda_beta_{layer}" for layer in (0, 1, 3)), "embed")
    assert expand(config, ["mla_out_2", "mla_*_2"]) == ("mla_out_2", "mla_latent_2", "mla_krope_2")
    for unknown in ("kda_beta_2", "attnres_attn_0", "router_ids_0", "logits"):
        with pytest.raises(ValueError, match=f"site '{unknown}' names nothing in this model"):
            expand(config, [unknown])
    assert not [name for name in sites(small()) if name.startswith("attnres")]
