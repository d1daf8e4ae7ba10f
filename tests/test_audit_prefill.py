"""The life of one request, claim by claim, up to the moment when its first token is sampled: prefill and what it leaves.

The numbers count the claims; what a claim says is the test's name. Where no value is needed, sizes are K3's own.
test_audit_decode.py goes on, and shows that the tests notice wrong code.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit import (
    CONFIG,
    DRAWN,
    GREEDY,
    HOME,
    LOGITS,
    OTHER,
    PROMPT,
    SHORT,
    STATE,
    TOKENS,
    Engine,
    assert_matters,
    assert_stands_for,
    begun,
    equations,
    memories,
    packing,
    shapes,
    traced,
)
from helpers import QUICK, Row, assert_close, lengths_batch, same_bits

from k3jax import batch as batches
from k3jax import generate as generation
from k3jax.batch import prepare
from k3jax.carry import KDAState
from k3jax.config import K3Config
from k3jax.kernels import Kernels
from k3jax.layers.kda import KDA
from k3jax.layers.mla import MLA
from k3jax.layers.mlp import MLP
from k3jax.layers.moe import MoE
from k3jax.model import K3, Context
from k3jax.ops import kda as ops
from k3jax.reference import attn_res, delta_rule, rms_norm


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG)


@pytest.fixture(scope="module")
def k3():
    """K3's modules, parameters as shapes."""
    return K3.abstract(K3Config.k3())


@pytest.fixture(scope="module")
def k3_prefill():
    """K3's step over a prompt of four tokens, with the kernels that are traced in the shortest time."""
    return traced(K3Config.k3(), Row([0] * 4, 0, 0, (0,)), 1, Kernels("scan", "dense"))


# What passes, and what comes out.


def test_claim_01_a_prompt_passes_every_layer_once_and_each_sampled_token_is_the_next_input(engine):
    assert_close(engine.prefilled.taps["hidden"][:, :4], engine.after(*PROMPT)[2]["hidden"], STATE)
    e, f, g = engine.sampled
    assert [moment.inputs for moment in engine.moments] == [PROMPT, (e,), (f,)]
    assert engine.moments[-1].tokens == (*PROMPT, e, f, g)


def test_claim_02_k3_has_93_layers_of_7168_and_163840_tokens(k3_prefill):
    _, out = k3_prefill
    assert out.taps["hidden"].shape == (93, 4, 7168) and out.taps["embed"].shape == (4, 7168)
    assert out.logits.shape == (1, 160 * 1024)


def test_claim_03_the_model_gives_logits_and_sampling_is_another_function(engine):
    """What is sampled changes with the request's wishes; the pass and what it leaves do not."""
    logits = engine.prefilled.logits[:4]
    assert logits.dtype == jnp.float32
    assert_close(logits, engine.after(*PROMPT)[0], LOGITS)
    tokens = {engine.moments[0].tokens[-1]}
    for params in DRAWN[:4]:
        [moment] = engine.request(params, steps=1)
        assert moment.tokens[-1] == engine.draw(logits[3], params, 4)
        assert all(map(same_bits, memories(moment.carry), memories(engine.moments[0].carry)))
        tokens.add(moment.tokens[-1])
    assert len(tokens) > 2


def test_claim_04_prefill_gives_the_distribution_after_D_and_the_first_decode_the_one_after_E(engine):
    e = engine.sampled[0]
    teacher = engine.run([Row((*PROMPT, e), 0, 0, (0, 1))], engine.pool()).logits
    assert_close(engine.prefilled.logits[3], teacher[3], LOGITS)
    assert_close(engine.decoded(e).logits[0], teacher[4], LOGITS)
    assert_close(teacher[:5], engine.after(*PROMPT, e)[0], LOGITS)
    assert np.abs(teacher[3] - teacher[4]).max() > 0.1


def test_claim_05_an_engine_that_writes_E_during_prefill_is_one_off(engine):
    """Whether or not it says so: its memory is not that of the tokens before E, and F comes out of another past."""
    e = engine.sampled[0]
    assert_stands_for(engine, engine.prefilled.carry, PROMPT, **HOME)
    early = engine.decoded(e).carry
    hidden = early._replace(lengths=engine.prefilled.carry.lengths)
    for carry in (early, hidden):
        with pytest.raises(AssertionError):
            assert_stands_for(engine, carry, PROMPT, **HOME)
    twice = engine.run([Row([e], 5, **HOME)], early, decode=True).logits[0]
    assert np.abs(twice - engine.decoded(e).logits[0]).max() > 10 * LOGITS
    assert_close(twice, engine.after(*PROMPT, e, e)[0][5], LOGITS)


# What lives how long.


def test_claim_06_conv_history_and_recurrent_state_of_69_layers_persist(engine, k3_prefill):
    """Each is there for the next step: any of them changed, the next logits are others."""
    assert len(k3_prefill[1].carry.kda) == 69 and all(type(state) is KDAState for state in k3_prefill[1].carry.kda)
    for layer, state in enumerate(engine.prefilled.carry.kda):
        changes = [state._replace(S=state.S + 0.5)]
        changes += [state._replace(conv=state.conv.at[:, tap].add(0.5)) for tap in range(3)]
        for changed in changes:
            carry = engine.prefilled.carry
            kda = (*carry.kda[:layer], changed, *carry.kda[layer + 1 :])
            assert_matters(engine, engine.sampled[0], carry._replace(kda=kda))


def test_claim_07_latent_pages_of_24_layers_persist(engine, k3_prefill):
    """Likewise, the latent of each of the four tokens in each layer."""
    assert len(k3_prefill[1].carry.mla) == 24
    for layer, pool in enumerate(engine.prefilled.carry.mla):
        for position in range(4):
            carry = engine.prefilled.carry
            changed = pool.at[HOME["pages"][0], position].add(0.5)
            mla = (*carry.mla[:layer], changed, *carry.mla[layer + 1 :])
            assert_matters(engine, engine.sampled[0], carry._replace(mla=mla))


def test_claim_08_length_and_page_table_persist_and_the_slot_mapping_is_made_anew(engine):
    """The request's pages are moved between two steps; only the table says so, and E does not notice."""
    carry, e, there = engine.prefilled.carry, engine.sampled[0], (0, 6)
    assert carry.lengths.tolist() == [0, 4, 0]
    moved = carry._replace(mla=tuple(jnp.roll(pool, 2, axis=0) for pool in carry.mla))
    out = engine.run([Row([e], 4, 1, there)], moved, decode=True)
    assert same_bits(out.logits[0], engine.decoded(e).logits[0])
    assert_stands_for(engine, out.carry, (*PROMPT, e), 1, there)


def test_claim_09_nothing_else_of_the_pass_persists(k3_prefill):
    """No Q, K, V, depth source, router logit, activation, hidden state or logit: in K3's carry, and in a group's state."""
    conv, S = ((1, 3, 96, 384), jnp.bfloat16), ((1, 96, 128, 128), jnp.float32)
    want = [conv, S] * 69 + [((1, 64, 576), jnp.bfloat16)] * 24 + [((1,), jnp.int32)]
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(k3_prefill[1].carry)] == want
    model = K3.abstract(SHORT, dtype="float32")
    before, packed = jax.eval_shape(lambda: begun(model, GREEDY)), packing([PROMPT])

    def step(model, state):
        return generation.step.__wrapped__(model, state, packed.batch, packed.sampled, Context(Kernels()))

    after = jax.eval_shape(step, model, before)[0]
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
    beside = before._replace(carry=None, sampling=None)
    assert not [a for a in jax.tree.leaves(beside) if jnp.issubdtype(a.dtype, jnp.floating)]


def test_claim_10_weights_are_resident_among_them_896_experts_and_what_decoding_reads(engine, k3):
    """The absorbed weights are made once: decoding does not look at the matrix that they come from."""
    moe, attn = k3.model.layers[1].block_sparse_moe, k3.model.layers[3].self_attn
    assert [m.weight.shape for m in (moe.experts.w1, moe.experts.w3)] == [(896, 3072, 3584)] * 2
    assert moe.experts.w2.weight.shape == (896, 3584, 3072) and moe.gate.weight.shape == (896, 7168)
    scores = [p for block in k3.model.layers for p in (block.self_attention_res_proj, block.mlp_res_proj)]
    assert {p.weight.shape for p in (*scores, k3.model.output_attn_res_proj)} == {(1, 7168)} and len(scores) == 186
    assert attn.kv_b_proj.weight.shape == (96 * 256, 512) and k3.model.norm.weight.shape == (7168,)
    want, broken = engine.decoded(engine.sampled[0]), Engine(engine.config)
    broken.programs = engine.programs
    for layer in engine.config.mla_layers:
        weight = broken.model.model.layers[layer].self_attn.kv_b_proj.weight
        weight.set_value(weight[...] * np.nan)
    assert same_bits(broken.decoded(engine.sampled[0], engine.prefilled.carry).logits[0], want.logits[0])


# One axis of packed tokens.


def test_claim_11_the_first_axis_is_the_tokens_of_all_requests(engine):
    """Four and three tokens make seven, and each request gets what it gets alone."""
    batch = packing([OTHER, PROMPT]).batch  # the shorter one first
    assert batch.tokens[:7].tolist() == [*OTHER, *PROMPT]
    assert batch.query_start_loc.tolist() == [0, 3, 7] and batch.logits_indices.tolist() == [2, 6]
    together = engine.run([Row(PROMPT, 0, **HOME), Row(OTHER, 0, 2, (3,))], engine.pool())
    assert together.taps["embed"].shape == (TOKENS, engine.config.hidden_size)
    assert_close(together.logits[:4], engine.prefilled.logits[:4], 2e-5)
    assert_close(together.logits[4:7], engine.after(*OTHER)[0], LOGITS)


# KDA.


def test_claim_12_layer_0_is_kda_with_a_dense_mlp(k3):
    first = k3.model.layers[0]
    assert type(first.self_attn) is KDA and not hasattr(first, "block_sparse_moe") and type(first.mlp) is MLP
    assert first.mlp.gate_proj.weight.shape == (33792, 7168)


def random_inputs(tokens, heads=3, width=5):
    """What the recurrence reads; decays so weak that a state outlives a chunk."""
    rng = np.random.default_rng(tokens)
    q, k, v, g = rng.normal(size=(4, tokens, heads, width))
    beta = rng.normal(size=(tokens, heads))
    return ops.Inputs(
        *(jnp.asarray(a, jnp.float32) for a in (q, k, v, -0.1 / (1 + np.exp(-g)), 1 / (1 + np.exp(-beta))))
    )


def chunked():
    """A new program: state and outputs of one row by the chunked form."""

    def run(S, x):
        tokens = x.q.shape[0]
        rows = prepare(lengths_batch((tokens,), tokens), 0, 8, 4).prefill
        S, o = ops.prefill(S[None], x, rows, "chunk")
        return S[0], o

    return jax.jit(run, compiler_options=QUICK)


def test_claim_13_a_head_takes_A_B_C_D_in_this_order():
    """The chunk's products give what the recurrence gives token by token in float64; another order gives another state."""
    x = random_inputs(4)
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in x)
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))

    def one_by_one(order):
        S = np.zeros((3, 5, 5))
        for t in order:
            o, S = delta_rule(S, q[t], k[t], v[t], g[t], beta[t])
        return S.swapaxes(1, 2), o

    S, o = chunked()(jnp.zeros((3, 5, 5)), x)
    want, last = one_by_one([0, 1, 2, 3])
    assert_close(S, want, 1e-6)
    assert_close(o[3], last, 1e-6)
    for order in ([1, 0, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2]):
        assert np.abs(one_by_one(order)[0] - S).max() > 1e-2


def test_claim_14_a_chunk_is_products_and_only_the_state_passes_between_chunks(monkeypatch):
    """Chunks of 1, 16 and 64 tokens agree; the sequential part runs over the chunks, not over the tokens."""
    x, zero = random_inputs(128), jnp.zeros((3, 5, 5))
    want, outputs = jax.jit(ops.plain, compiler_options=QUICK)(zero, x)
    for size in (16, 64):
        monkeypatch.setattr(batches, "TILE", size)
        run = chunked()
        program = jax.make_jaxpr(run.__wrapped__)(zero, x).jaxpr
        loops = [equation for _, equation in equations(program) if str(equation.primitive) in ("scan", "while")]
        lengths = [
            loop.params["length"] for loop in loops
        ]  # the others solve the triangular systems of all chunks by rows
        assert lengths.count(128 // size) == 1 and {*lengths} == {128 // size, size}
        S, o = run(zero, x)
        assert_close(S, want, 1e-5)
        assert_close(o, outputs, 1e-5)
    S, halves = zero, []
    for half in (slice(64), slice(64, 128)):  # nothing but the state is handed on
        S, o = run(S, jax.tree.map(lambda a, half=half: a[half], x))
        halves.append(o)
    assert_close(S, want, 1e-5)
    assert_close(jnp.concatenate(halves), outputs, 1e-5)


def test_claim_15_only_the_last_state_is_kept_in_float32_and_transposed(engine, k3_prefill):
    """One matrix a head and request, that after D, held [V, K]; float32 in a bfloat16 model."""
    states = [state.S for state in k3_prefill[1].carry.kda]
    assert {(S.shape, str(S.dtype)) for S in states} == {((1, 96, 128, 128), "float32")}
    for layer, state in zip(engine.config.kda_layers, engine.prefilled.carry.kda, strict=True):
        after = [engine.after(*PROMPT[:n])[1].recurrent[layer].swapaxes(1, 2) for n in (4, 3)]
        assert np.argwhere(np.isfinite(state.S).any((1, 2, 3))).tolist() == [[1]]
        assert_close(state.S[1], after[0], STATE)
        for other in (after[1], after[0].swapaxes(1, 2)):
            assert np.abs(state.S[1] - other).max() > 100 * STATE


def test_claim_16_the_convolution_keeps_its_last_three_raw_inputs(engine):
    """The projections of B, C and D as they are, oldest first; zeros before a prompt's first token, whatever the slot held."""
    short = engine.run([Row(PROMPT[:2], 0, **HOME)], engine.pool())
    for layer, state, young in zip(engine.config.kda_layers, engine.prefilled.carry.kda, short.carry.kda, strict=True):
        raw = [np.asarray(engine.prefilled.taps[f"kda_conv_{name}_{layer}"][:4]) for name in "qkv"]
        raw = np.concatenate([a.reshape(4, engine.config.kda_num_heads, -1) for a in raw], axis=-1)
        assert same_bits(state.conv[1], raw[1:])
        assert_close(raw[1:], engine.history(layer, *PROMPT), STATE)
        assert_close(young.conv[1], engine.history(layer, *PROMPT[:2]), STATE)
        assert not young.conv[1, 0].any() and young.conv[1, 1].any()


def test_claim_17_the_history_is_36864_channels_of_three_and_an_eighth_of_the_heads_has_4608(engine, k3_prefill):
    """Of shapes: time before channels, and all channels of a head together, so that a share of heads is a slice."""
    assert {state.conv.shape for state in k3_prefill[1].carry.kda} == {(1, 3, 96, 384)}
    assert 96 * 384 == 36864 and 96 // 8 * 384 == 4608
    width, state = engine.config.kda_head_dim, engine.prefilled.carry.kda[0]
    for head in range(engine.config.kda_num_heads):
        own = slice(head * width, (head + 1) * width)
        raw = [engine.prefilled.taps[f"kda_conv_{name}_0"][1:4, own] for name in "qkv"]
        assert same_bits(state.conv[1, :, head], np.concatenate(raw, axis=-1))


def test_claim_18_an_eighth_of_the_heads_has_a_state_of_12_128_128_shape_only(k3_prefill):
    """And of one device: the heads of a share give alone what they give among all. A sharded run is another test."""
    shares = [jax.eval_shape(lambda S: jnp.split(S, 8, axis=1), state.S) for state in k3_prefill[1].carry.kda]
    assert {S.shape for share in shares for S in share} == {(1, 12, 128, 128)}
    x, S = random_inputs(6, heads=16), jnp.asarray(np.random.default_rng(0).normal(size=(16, 5, 5)), jnp.float32)
    run = chunked()
    want, outputs = run(S, x)
    for share in range(8):
        own = slice(2 * share, 2 * share + 2)
        got, o = run(S[own], jax.tree.map(lambda a, own=own: a[:, own], x))
        assert_close(got, want[own], 1e-6)
        assert_close(o, outputs[:, own], 1e-6)


# MLA.


def test_claim_19_after_three_kda_layers_comes_gated_mla_and_the_last_two_layers_are_mla(k3):
    kinds = ["mla" if type(block.self_attn) is MLA else "kda" for block in k3.model.layers]
    assert kinds == [*["kda", "kda", "kda", "mla"] * 23, "mla"]
    assert kinds.count("kda") == 69 and kinds[90:] == ["kda", "mla", "mla"]
    assert {b.self_attn.g_proj.weight.shape for b in k3.model.layers if type(b.self_attn) is MLA} == {(96 * 128, 7168)}


def test_claim_20_D_sees_A_to_D_and_A_sees_itself(engine):
    """In the output of every layer: a changed token is seen by itself and by what follows, and by nothing before it."""
    outputs = [name for name in engine.prefilled.taps if name.startswith(("kda_out", "mla_out"))]
    assert len(outputs) == engine.config.num_hidden_layers
    for at in range(4):
        changed = (*PROMPT[:at], OTHER[0], *PROMPT[at + 1 :])
        got = engine.run([Row(changed, 0, **HOME)], engine.pool())
        for name in outputs:
            old, new = (np.asarray(out.taps[name][:4]) for out in (engine.prefilled, got))
            assert same_bits(new[:at], old[:at]), name
            assert np.abs(new[at:] - old[at:]).max(-1).min() > 1e-5, name
    alone = engine.run([Row(PROMPT[:1], 0, **HOME)], engine.pool())
    assert_close(alone.logits[0], engine.prefilled.logits[0], 2e-5)


def test_claim_21_keys_and_values_are_passing_and_four_normed_unrotated_latents_stay(engine, k3_prefill):
    """K3's prompt has 128 key and 128 value channels a head made from its latents, and 576 channels left in each layer."""
    program, out = k3_prefill
    assert (4, 96, 128 + 128) in shapes(program)
    assert {pool.shape for pool in out.carry.mla} == {(1, 64, 576)}
    for layer, pool in zip(engine.config.mla_layers, engine.prefilled.carry.mla, strict=True):
        parts = [engine.prefilled.taps[f"{name}_{layer}"][:4] for name in ("mla_latent", "mla_krope")]
        assert same_bits(pool[HOME["pages"][0]], np.concatenate(parts, axis=-1))
        assert_close(pool[HOME["pages"][0]], engine.after(*PROMPT)[1].latent[layer], STATE)
        assert np.argwhere(np.isfinite(pool).any(-1)).tolist() == [[HOME["pages"][0], i] for i in range(4)]


# Depth and experts.


def test_claim_22_every_layer_mixes_over_depth_and_all_but_the_first_have_experts(engine, k3):
    for layer, block in enumerate(k3.model.layers):
        assert block.self_attention_res_norm.weight.shape == block.mlp_res_norm.weight.shape == (7168,)
        assert hasattr(block, "block_sparse_moe") == (layer > 0)
    assert sum(type(getattr(block, "block_sparse_moe", None)) is MoE for block in k3.model.layers) == 92
    want, layers = engine.after(*PROMPT)[2], range(engine.config.num_hidden_layers)
    names = [f"{site}_{layer}" for site in ("attnres_attn", "attnres_mlp", "moe_out", "router_ids") for layer in layers]
    for name in {*names} - {"attnres_attn_0", "moe_out_0", "router_ids_0"}:
        assert_close(engine.prefilled.taps[name][:4], want[name], STATE)


def depth_by_hand(layers, block):
    """How many sources each site sees, and the output: the sums that have ended, and the running one."""
    ended, attn, mlp = 0, [], []
    for layer in range(layers):
        attn.append(ended + 1)
        ended += layer % block == 0
        mlp.append(ended + 1)
    return attn, mlp, ended + 1


def test_claim_23_depth_sources_grow_with_the_blocks_to_nine(k3_prefill):
    """The embedding, the finished blocks and the running sum: ceil(L/12) + 1, one more for the MLP where a block begins."""
    taps, (attn, mlp, output) = k3_prefill[1].taps, depth_by_hand(93, 12)
    assert attn == [-(-layer // 12) + 1 for layer in range(93)] and max(*attn, *mlp) == output == 9
    assert mlp == [n + (layer % 12 == 0) for layer, n in enumerate(attn)]
    assert [taps[f"attnres_attn_{layer}"].shape[1] for layer in range(1, 93)] == attn[1:] and attn[0] == 1
    assert [taps[f"attnres_mlp_{layer}"].shape[1] for layer in range(93)] == mlp
    assert taps["attnres_out"].shape == (1, 9)
    assert [K3Config.k3().depth_sources(layer, "attn") for layer in range(93)] == attn
    assert [K3Config.k3().depth_sources(layer, "mlp") for layer in range(93)] == mlp


def test_claim_24_depth_sources_are_not_the_sequence(engine):
    """Eight packed tokens and two have the same."""
    layers = engine.config.num_hidden_layers
    attn, mlp, output = depth_by_hand(layers, engine.config.attn_res_block_size)
    for out in (engine.prefilled, engine.decoded(engine.sampled[0])):
        assert [out.taps[f"attnres_attn_{layer}"].shape[1] for layer in range(1, layers)] == attn[1:]
        assert [out.taps[f"attnres_mlp_{layer}"].shape[1] for layer in range(layers)] == mlp
        assert out.taps["attnres_out"].shape[1] == output
    assert engine.prefilled.taps["embed"].shape[0] != engine.decoded(engine.sampled[0]).taps["embed"].shape[0]


def test_claim_25_depth_sources_live_in_one_pass_and_E_gets_its_own(engine, k3_prefill):
    """No array of the carry is as wide as the stream; for E the first source is E's embedding, and all weigh as they should."""
    e = engine.sampled[0]
    assert all(7168 not in a.shape for a in jax.tree.leaves(k3_prefill[1].carry))
    out, want = engine.decoded(e), engine.after(*PROMPT, e)[2]
    assert same_bits(out.taps["embed"][0], engine.tensors["model.embed_tokens.weight"][e])
    names = [name for name in want if name.startswith("attnres") and want[name].ndim]
    assert len(names) == 2 * engine.config.num_hidden_layers
    for name in names:
        assert_close(out.taps[name][0], want[name][4], STATE)


# The head, and the first sample.


def test_claim_26_after_the_last_layer_come_depth_mixture_norm_and_head(engine):
    """In this order, recomputed from the layers' sums; without the mixture or the norm the logits are others."""
    c, w = engine.config, {name: np.float64(value) for name, value in engine.tensors.items()}
    embedding, sums = np.float64(engine.prefilled.taps["embed"][:4]), np.float64(engine.prefilled.taps["hidden"][:, :4])
    begins = [layer for layer in range(1, c.num_hidden_layers) if layer % c.attn_res_block_size == 0]
    sources = np.stack([embedding, *(sums[layer - 1] for layer in begins), sums[-1]])
    score = w["model.output_attn_res_norm.weight"], w["model.output_attn_res_proj.weight"]
    mixed = attn_res(sources, *score, c.rms_norm_eps)[0]
    gain, head = w["model.norm.weight"], w["lm_head.weight"].T
    assert_close(engine.prefilled.logits[:4], rms_norm(mixed, gain, c.rms_norm_eps) @ head, LOGITS)
    for wrong in (rms_norm(sums[-1], gain, c.rms_norm_eps) @ head, mixed * gain @ head):
        assert np.abs(engine.prefilled.logits[:4] - wrong).max() > 1e-2


def test_claim_27_only_the_last_valid_position_needs_logits(engine, k3_prefill):
    """Of four tokens one has logits (computed as two rows on a CPU), and E is drawn from D's, not from those of padding."""
    program, out = k3_prefill
    rows = {shape[0] for shape in shapes(program) if len(shape) == 2 and shape[-1] == 163840}
    assert out.logits.shape == (1, 163840) and rows and max(rows) <= 2
    want = engine.after(*PROMPT)[0]
    for params in DRAWN[4:]:
        assert engine.request(params, steps=1)[0].tokens[-1] == engine.draw(want[3], params, 4)
    assert engine.sampled[0] == want[3].argmax() == engine.moments[0].tokens[-1]


def test_claim_28_prefill_ends_with_A_to_D_in_the_memory_and_not_E(engine):
    """The token list is one longer than what the carry stands for."""
    moment = engine.moments[0]
    assert moment.tokens == (*PROMPT, engine.sampled[0]) and moment.carry.lengths.tolist() == [4]
    assert_stands_for(engine, moment.carry, PROMPT)
