"""The life of one request, claim by claim, from the first decode step on: E comes in, F and G are sampled."""

import dataclasses
import re
from itertools import groupby
from pkgutil import resolve_name

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_audit_prefill as prefill
from audit import (
    CONFIG,
    DRAWN,
    GREEDY,
    HOME,
    LOGITS,
    OTHER,
    PAGE,
    PROMPT,
    SHORT,
    STATE,
    WIDTH,
    Engine,
    assert_stands_for,
    begun,
    equations,
    shapes,
    traced,
)
from helpers import Row, assert_close, pack, put_state, same_bits

from k3jax import generate as generation
from k3jax.batch import DecodeRows
from k3jax.carry import empty
from k3jax.config import K3Config
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, Output, forward
from k3jax.ops import mla as ops
from k3jax.reference import State, attend, softmax

HISTORY = 11  # pages of K3's row: 704 cached positions, a number that no other axis has


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG)


@pytest.fixture(scope="module")
def k3_decode():
    """K3's step over one token that continues a request."""
    return traced(K3Config.k3(), Row([0], 4, 0, range(HISTORY)), HISTORY)


def of_history(equation):
    """Whether an equation has an axis over pages or cached positions."""
    return any({HISTORY, HISTORY * 64} & {*out.aval.shape} for out in equation.outvars)


# What the first decode step finds.


def test_claim_29_every_recurrent_state_stands_for_A_to_D(engine):
    for layer, state in zip(engine.config.kda_layers, engine.prefilled.carry.kda, strict=True):
        assert_close(state.S[1].swapaxes(1, 2), engine.after(*PROMPT)[1].recurrent[layer], STATE)


def test_claim_30_every_conv_history_is_what_E_needs(engine):
    """E decoded from it has the core that it has in a pass over A to E."""
    e = engine.sampled[0]
    for layer, state in zip(engine.config.kda_layers, engine.prefilled.carry.kda, strict=True):
        assert_close(state.conv[1], engine.history(layer, *PROMPT), STATE)
        core = engine.after(*PROMPT, e)[2][f"kda_core_{layer}"][4]
        assert_close(engine.decoded(e).taps[f"kda_core_{layer}"][0], core, STATE)


def test_claim_31_every_mla_layer_holds_four_latents(engine):
    for layer, pool in zip(engine.config.mla_layers, engine.prefilled.carry.mla, strict=True):
        assert_close(pool[HOME["pages"][0]], engine.after(*PROMPT)[1].latent[layer], STATE)
        assert np.isnan(pool[HOME["pages"][1]]).all()


@pytest.mark.parametrize("length", [3, 4])
def test_claim_32_four_are_computed_and_E_goes_to_position_4(engine, length):
    """That is slot table[4 // page] * page + 4 % page; likewise the token after a prompt of three, in the same page."""
    prompt, (first, second) = PROMPT[:length], HOME["pages"]
    before = engine.run([Row(prompt, 0, **HOME)], engine.pool()).carry
    row = Row([engine.sampled[0]], length, **HOME)
    after = engine.run([row], before, decode=True).carry
    page, offset = {3: (first, 3), 4: (second, 0)}[length]
    assert pack([row], 1, WIDTH).slot_mapping(PAGE).tolist() == [page * PAGE + offset]
    assert (before.lengths.tolist(), after.lengths.tolist()) == ([0, length, 0], [0, length + 1, 0])
    assert [changed(*pools) for pools in zip(before.mla, after.mla, strict=True)] == [[(page, offset)]] * len(after.mla)


# A step of one token.


def test_claim_33_E_passes_every_layer_from_the_embedding_on(engine, k3_decode):
    """K3's program has its 93 layers one after another; the values are those of a pass over A to E."""
    layers = [re.match(r"/layer_(\d+)", scope) for scope, _ in equations(k3_decode[0])]
    assert [int(layer) for layer, _ in groupby(found[1] for found in layers if found)] == list(range(93))
    e = engine.sampled[0]
    out, want = engine.decoded(e), engine.after(*PROMPT, e)[2]
    assert_close(out.taps["embed"][0], want["embed"][4], 0)
    assert_close(out.taps["hidden"][:, 0], want["hidden"][:, 4], STATE)


def test_claim_34_a_decode_step_is_the_recurrence_in_the_slot_that_the_batch_names(engine):
    """Not the chunk, which solves a triangle; beside a prompt the row may take the chunk's way, with the same result."""
    programs = [traced(SHORT, Row([0] * n, 4, 0, (0,)), 1)[0] for n in (2, 1)]
    solves = [{str(equation.primitive) for _, equation in equations(p)} for p in programs]
    assert ["triangular_solve" in names for names in solves] == [True, False]

    before, e, elsewhere = engine.prefilled.carry, engine.sampled[0], dict(HOME, slot=2)
    alone = engine.decoded(e)
    mixed = engine.run([Row([e], 4, **HOME), Row(OTHER, 0, 2, (3,))], before)
    assert_close(mixed.logits[0], alone.logits[0], 2e-5)
    for one, other in zip(jax.tree.leaves(alone.carry.kda), jax.tree.leaves(mixed.carry.kda), strict=True):
        assert_close(one[1], other[1], 2e-5)
    moved = before._replace(kda=jax.tree.map(lambda a: jnp.roll(a, 1, axis=0), before.kda))
    there = engine.run([Row([e], 4, **elsewhere)], moved, decode=True)
    assert same_bits(there.logits[0], alone.logits[0])
    for one, other in zip(jax.tree.leaves(alone.carry.kda), jax.tree.leaves(there.carry.kda), strict=True):
        assert same_bits(np.roll(one, 1, axis=0), other)


def test_claim_35_what_a_kda_layer_does_for_a_token_does_not_grow_with_the_history(engine, k3_decode):
    """No equation of such a layer of K3 has an axis of pages or positions. Every layer has one state, which does not grow."""
    config = K3Config.k3()
    grows = {
        int(scope.split("/")[1][6:]) for scope, e in equations(k3_decode[0]) if "layer_" in scope and of_history(e)
    }
    assert grows == set(config.mla_layers) and len(config.kda_layers) == 69
    assert {(state.S.shape, state.conv.shape) for state in k3_decode[1].carry.kda} == {
        ((1, 96, 128, 128), (1, 3, 96, 384))
    }
    for moment in engine.moments:
        assert {state.S.shape[0] for state in moment.carry.kda} == {1}


def test_claim_36_mla_writes_c_E_and_then_queries_A_to_E(engine):
    """E finds itself in its page, where NaN was before; without it, or without one of A to D, the result is another."""
    rng = np.random.default_rng(0)
    W_UK_T, W_UV = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 5, 6), (2, 6, 7)))
    q, pages = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((1, 2, 7), (2, PAGE, 8)))
    rows = DecodeRows(jnp.array([5]), jnp.array([[1, 0]]))
    decode = jax.jit(lambda q, pages: ops.decode(q, pages, rows, W_UK_T, W_UV))
    want = decode(q, pages)
    for place in [(1, 0), (1, 1), (1, 2), (1, 3), (0, 0)]:
        without = decode(q, pages.at[place].set(0))
        assert np.abs(without - want).max() > 1e-2
    assert same_bits(decode(q, pages.at[0, 1:].set(np.nan)), want)

    e = engine.sampled[0]
    out, (logits, state, _) = engine.decoded(e), engine.after(*PROMPT, e)
    assert_close(out.logits[0], logits[4], LOGITS)
    for layer, before, after in zip(engine.config.mla_layers, engine.prefilled.carry.mla, out.carry.mla, strict=True):
        assert same_bits(before[HOME["pages"][0]], after[HOME["pages"][0]])
        assert_close(after[HOME["pages"][1], 0], state.latent[layer][4], STATE)


def test_claim_37_no_key_or_value_of_the_history_is_made(k3_decode):
    """Of K3's 704 cached positions and 96 heads there are scores and nothing else; a prompt's continuation makes both."""
    both = {shape for shape in shapes(k3_decode[0]) if {704, 96} <= {*shape}}
    assert both == {(1, 96, 704)}
    continued, _ = traced(K3Config.k3().slice(4), Row([0] * 2, 4, 0, range(HISTORY)), HISTORY)
    assert {(704, 96, 192), (704, 96, 128)} <= shapes(continued)


def test_claim_38_the_absorbed_weights_are_made_after_loading():
    """The two halves of kv_b_proj head by head, [96, 128, 512] and [96, 512, 128] in K3; without them decoding is refused."""
    layer = jax.eval_shape(lambda model: model.absorb(), K3.abstract(K3Config.k3().slice(4))).model.layers[3].self_attn
    assert (layer.W_UK_T.shape, layer.W_UV.shape) == ((96, 128, 512), (96, 512, 128))
    engine = Engine(SHORT)
    made, c = engine.model.model.layers[1].self_attn, engine.config
    for head in range(c.num_attention_heads):
        rows = engine.tensors["model.layers.1.self_attn.kv_b_proj.weight"].reshape(
            c.num_attention_heads, -1, c.kv_lora_rank
        )[head]
        assert same_bits(made.W_UK_T[...][head], rows[: c.qk_nope_head_dim])
        assert same_bits(made.W_UV[...][head], rows[c.qk_nope_head_dim :].T)
    batch, ctx = pack([Row([0], 4, 0, (0,))], 1, 1), Context(Kernels(), decode_rows=1)
    raw, carry = K3.abstract(SHORT), jax.eval_shape(lambda: empty(SHORT, slots=1, pages=1))
    with pytest.raises(AssertionError, match=r"absorb\(\)"):
        jax.eval_shape(lambda model, carry: forward(model, batch, carry, ctx), raw, carry)


def test_claim_39_decoding_multiplies_into_the_latent_attends_there_and_multiplies_out(engine):
    """Three products in float64, with the shared key beside the latent query and the scale of the key's own size, are the
    expanded attention and the decoded one; with the scale of the latent's size they are not. The output gate follows."""
    rng, (H, N, R, C, V) = np.random.default_rng(0), (3, 5, 2, 6, 7)
    kv_b, q, latents = rng.normal(size=(H, N + V, C)), rng.normal(size=(H, N + R)), rng.normal(size=(5, C + R))

    def absorbed(scale):
        q_c = np.concatenate([np.einsum("hn,hnc->hc", q[:, :N], kv_b[:, :N]), q[:, N:]], -1)
        weights = softmax(scale * q_c @ latents.T, -1)
        return np.einsum("hc,hvc->hv", weights @ latents[:, :C], kv_b[:, N:])

    k = np.concatenate(
        [np.einsum("sc,hnc->shn", latents[:, :C], kv_b[:, :N]), np.repeat(latents[:, None, C:], H, 1)], -1
    )
    expanded = attend(q, k, np.einsum("sc,hvc->shv", latents[:, :C], kv_b[:, N:]))
    halves = ops.absorb(jnp.asarray(kv_b.reshape(-1, C), jnp.float32), heads=H, nope=N)
    pages = jnp.asarray(np.pad(latents, ((0, 3), (0, 0))).reshape(2, 4, -1), jnp.float32)
    rows = DecodeRows(jnp.array([5]), jnp.array([[0, 1]]))
    got = ops.decode(jnp.asarray(q, jnp.float32)[None], pages, rows, *halves)[0]
    assert_close(absorbed((N + R) ** -0.5), expanded, 1e-12)
    assert_close(got, expanded, 2e-6)
    assert np.abs(absorbed((C + R) ** -0.5) - got).max() > 1e-2

    e = engine.sampled[0]
    for layer in engine.config.mla_layers:
        assert_close(
            engine.decoded(e).taps[f"mla_out_{layer}"][0], engine.after(*PROMPT, e)[2][f"mla_out_{layer}"][4], STATE
        )


# What has no memory.


def test_claim_40_E_is_routed_anew(engine, k3_decode):
    """[1, 896] scores and 16 experts in K3; E's experts come from E's own vector and may differ from D's."""
    assert (1, 896) in shapes(k3_decode[0])
    assert {k3_decode[1].taps[f"router_ids_{layer}"].shape for layer in range(1, 93)} == {(1, 16)}
    e, differ = engine.sampled[0], 0
    for layer in engine.config.moe_layers:
        ids = np.asarray(engine.decoded(e).taps[f"router_ids_{layer}"][0])
        assert ids.tolist() == engine.after(*PROMPT, e)[2][f"router_ids_{layer}"][4].tolist()
        differ += ids.tolist() != engine.prefilled.taps[f"router_ids_{layer}"][3].tolist()
        moe = engine.model.model.layers[layer].block_sparse_moe
        x = jnp.asarray(np.random.default_rng(layer).normal(size=(3, engine.config.hidden_size)), jnp.float32)
        gate = moe.gate.weight[...], moe.gate.e_score_correction_bias[...]
        pairs = [moe.router(jnp.stack([before, x[2]]), *gate) for before in x[:2]]
        assert all(same_bits(one[1], other[1]) for one, other in zip(*pairs, strict=True))
    assert differ


def test_claim_41_experts_and_depth_have_no_memory(k3_decode):
    """In K3's step only attention of MLA layers has an axis over the history; without experts and depth the carry is the same."""
    inside = [scope for scope, equation in equations(k3_decode[0]) if "/layer_" in scope and of_history(equation)]
    assert inside and all(re.match(r"/layer_\d+/mla", scope) for scope in inside)
    assert not any(of_history(equation) for scope, equation in equations(k3_decode[0]) if "/head" in scope)
    plain = dataclasses.replace(CONFIG, attn_res_block_size=None, first_k_dense_replace=CONFIG.num_hidden_layers)
    carries = [jax.eval_shape(lambda config=config: empty(config, slots=3, pages=5)) for config in (CONFIG, plain)]
    assert jax.tree.leaves(carries[0]) == jax.tree.leaves(carries[1])


def test_claim_42_E_sees_the_past_through_kda_states_and_mla_latents_alone(engine):
    """With the states of one past and the latents of another, E's logits are the reference's for that mixture; with neither,
    those of the prompt [E], whatever the slot and the pages hold."""
    e, other = engine.sampled[0], (*OTHER, PROMPT[0])
    pasts = {ids: engine.run([Row(ids, 0, **HOME)], engine.pool()).carry for ids in (PROMPT, other)}
    found = []
    for states in pasts:
        for latents in pasts:
            a, b = engine.after(*states)[1], engine.after(*latents)[1]
            want = engine.reference.forward([e], State(a.recurrent, a.conv, b.latent))[0]
            found.append(engine.decoded(e, pasts[latents]._replace(kda=pasts[states].kda)).logits[0])
            assert_close(found[-1], want[0], LOGITS)
    assert min(np.abs(one - two).max() for i, one in enumerate(found) for two in found[:i]) > 10 * LOGITS
    forgotten = engine.run([Row([e], 0, **HOME)], engine.prefilled.carry, decode=True).logits[0]
    assert same_bits(forgotten, engine.run([Row([e], 0, **HOME)], engine.pool(), decode=True).logits[0])
    assert_close(forgotten, engine.after(e)[0][0], LOGITS)


def test_claim_43_the_step_that_takes_E_gives_the_distribution_of_F(engine):
    """F is drawn from it, at position 5 of the request, for any seed."""
    for params in DRAWN:
        first, second = engine.request(params, steps=2)
        e, f = second.tokens[4:]
        assert second.inputs == (e,) and first.tokens[4] == e
        assert f == engine.draw(engine.after(*PROMPT, e)[0][4], params, 5)


# The whole, step by step.


def assert_moment(engine, step):
    """Step 0 is prefill. Input, memory, distribution and sample are those of the table's row, for greedy requests."""
    moment, told = engine.moments[step], (*PROMPT, *engine.sampled)
    n = len(PROMPT) + step
    assert moment.inputs == (told[:4] if step == 0 else told[n - 1 : n])
    assert moment.carry.lengths.tolist() == [n]
    assert_stands_for(engine, moment.carry, told[:n])
    assert moment.tokens == told[: n + 1]
    assert moment.tokens[-1] == engine.after(*told[:n])[0][-1].argmax()


def test_claim_60_prefill_takes_A_to_D_keeps_A_to_D_and_samples_E(engine):
    assert_moment(engine, 0)


def test_claim_61_the_first_decode_takes_E_keeps_A_to_E_and_samples_F(engine):
    assert_moment(engine, 1)


def test_claim_62_the_second_decode_takes_F_keeps_A_to_F_and_samples_G(engine):
    assert_moment(engine, 2)


def commit(engine, params):
    """A group of one whose prompt's pass is done: its carry, and its state after its sample is taken."""
    state = begun(engine.model, params)
    logits, memory, _ = engine.after(*PROMPT)
    carry = put_state(engine.config, state.carry, Row((), 4, 0, (0,)), memory)
    out = Output(jnp.asarray(logits[3:], jnp.float32), carry, {}, jnp.array([-1]))
    sampled, layers = jnp.array([True]), engine.config.num_hidden_layers
    return carry, generation.commit(state, jnp.array([4]), sampled, out, layers)[0]


def changed(before, after):
    """Indices of the slots, or of the places in pages, whose bytes differ."""
    axes = 2 if before.ndim == 3 else 1
    return [i for i in np.ndindex(before.shape[:axes]) if not same_bits(before[i], after[i])]


def test_claim_63_no_memory_contains_E_when_it_is_sampled(engine):
    """Only the token list does. One decode step then changes every S, every conv history and one latent a layer, and else
    not a byte of the pools."""
    for params in (GREEDY, *DRAWN[:2]):
        carry, after = commit(engine, params)
        assert all(map(same_bits, jax.tree.leaves(after.carry), jax.tree.leaves(carry)))
        assert after.last.tolist() == [engine.draw(engine.after(*PROMPT)[0][3], params, 4)]
    before = engine.prefilled.carry
    after, (slot, pages) = engine.decoded(engine.sampled[0]).carry, HOME.values()
    for old, new in zip(jax.tree.leaves(before.kda), jax.tree.leaves(after.kda), strict=True):
        assert changed(old, new) == [(slot,)]
    for old, new in zip(before.mla, after.mla, strict=True):
        assert changed(old, new) == [(pages[1], 0)]
    assert after.lengths.tolist() == [0, 5, 0]
    first, second = (moment.carry for moment in engine.moments[:2])
    assert [changed(a, b) for a, b in zip(first.mla, second.mla, strict=True)] == [[(0, 4)]] * len(first.mla)
    assert {
        tuple(changed(a, b)) for a, b in zip(jax.tree.leaves(first.kda), jax.tree.leaves(second.kda), strict=True)
    } == {((0,),)}


# The tests themselves.


def keeping_what_was_convolved(good):
    def packed(x, weight, history, rows):
        y, _ = good(x, weight, history, rows)
        return y, good(y, weight, history, rows)[1]

    return packed


def committed(change):
    """A commit whose new state is changed, given the one before."""

    def broken(good):
        def commit(state, *args):
            new, sampled = good(state, *args)
            return change(state, new), sampled

        return commit

    return broken


def counting_the_sample(_, new):
    return new._replace(carry=new.carry._replace(lengths=new.carry.lengths + 1))


def forgetting_the_sample(old, new):
    return new._replace(last=jnp.where(old.made > 0, old.last, new.last))


def rounding_the_states(_, new):
    kda = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), new.carry.kda)
    return new._replace(carry=new.carry._replace(kda=kda))


# What is wrong in the code: the claim that is broken, the function, and what stands in its place.
BROKEN = {
    "the chunk does not decay": (
        lambda _: prefill.test_claim_13_a_head_takes_A_B_C_D_in_this_order(),
        "k3jax.ops.kda.decay_sums",
        lambda good: lambda g: good(0 * g),
    ),
    "the history is what came out of the convolution": (
        prefill.test_claim_16_the_convolution_keeps_its_last_three_raw_inputs,
        "k3jax.ops.conv.packed",
        keeping_what_was_convolved,
    ),
    "A, B and C see what D sees": (
        prefill.test_claim_20_D_sees_A_to_D_and_A_sees_itself,
        "k3jax.ops.mla._attend",
        lambda good: lambda q, k, v, mask_of: good(q, k, v, lambda t: mask_of(jnp.maximum(t, 3))),
    ),
    "the head reads the running sum": (
        prefill.test_claim_26_after_the_last_layer_come_depth_mixture_norm_and_head,
        "k3jax.model.mix",
        lambda good: lambda depth, *_: depth.running,
    ),
    "the shared key lies before the latent": (
        test_claim_31_every_mla_layer_holds_four_latents,
        "k3jax.ops.mla.write",
        lambda good: lambda pages, latents, step: good(pages, jnp.roll(latents, 2, axis=-1), step),
    ),
    "attention does not find E": (
        test_claim_36_mla_writes_c_E_and_then_queries_A_to_E,
        "k3jax.ops.mla.decode",
        lambda good: lambda q, pages, rows, *w: good(q, pages, rows._replace(seq_lens=rows.seq_lens - 1), *w),
    ),
    "the scale is the latent's": (
        test_claim_39_decoding_multiplies_into_the_latent_attends_there_and_multiplies_out,
        "k3jax.ops.mla.decode",
        lambda good: lambda q, pages, *rest: good(q * (q.shape[-1] / pages.shape[-1]) ** 0.5, pages, *rest),
    ),
    "E goes in again instead of F": (
        test_claim_62_the_second_decode_takes_F_keeps_A_to_F_and_samples_G,
        "k3jax.generate.commit",
        committed(forgetting_the_sample),
    ),
    "the sample counts as computed": (
        test_claim_63_no_memory_contains_E_when_it_is_sampled,
        "k3jax.generate.commit",
        committed(counting_the_sample),
    ),
    "sampling rounds the states": (
        test_claim_63_no_memory_contains_E_when_it_is_sampled,
        "k3jax.generate.commit",
        committed(rounding_the_states),
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
