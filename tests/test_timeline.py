"""The timeline of one request: what it says against one pass over everything, and broken engines that it must find."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import generate as generation
from k3jax import timeline as timelines
from k3jax.timeline import Item, Moment, Timeline, Token, render, timeline

TINY = Path(__file__).parents[1] / "checkpoints" / "k3-tiny"
GOLDEN = Path(__file__).parent / "golden"
PROMPT = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def golden():
    with k3jax.load(GOLDEN / "kimi_linear_b", dtype="float32") as lm:
        yield lm


@pytest.fixture(scope="module")
def tiny():
    with k3jax.load(TINY, dtype="float32") as lm:
        yield lm


@pytest.fixture(
    scope="module", params=["pair", *(pytest.param(name, marks=pytest.mark.slow) for name in ("golden", "tiny"))]
)
def lm(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def seen(lm):
    return timeline(lm, PROMPT)


def ids(tokens):
    return [token.id for token in tokens]


def letters(tokens):
    return "".join(token.letter for token in tokens)


def test_the_table_of_one_request(lm, seen):
    """Prefill takes A to D and gives E; each decode takes what was sampled last, and caches stand for all but the newest."""
    c, moments = lm.config, seen.moments
    assert [m.name for m in moments] == ["prefill", "decode #1", "decode #2"]
    assert [letters(m.inputs) for m in moments] == ["ABCD", "E", "F"]
    assert [letters(m.holds) for m in moments] == ["ABCD", "ABCDE", "ABCDEF"]
    assert [m.distribution for m in moments] == ["p(next | A...D)", "p(next | A...E)", "p(next | A...F)"]
    assert [m.sampled.letter for m in moments] == ["E", "F", "G"]
    assert letters(seen.tokens) == "ABCDEFG" and ids(seen.tokens)[:4] == PROMPT
    assert ids(seen.tokens)[4:] == [m.sampled.id for m in moments]
    for moment, positions in zip(moments, [(0, 1, 2, 3), (4,), (5,)], strict=True):
        assert moment.latents == (positions,) * len(c.mla_layers)
        assert moment.states == moment.histories == len(c.kda_layers)
    assert all(token.text == (lm.decode([token.id]) if lm.tokenizer else None) for token in seen.tokens)


def test_distributions_are_those_of_one_pass(lm, seen):
    """Teacher-forced over all that was sampled. Logits within 1e-4 move a log-probability by 2e-4 at most."""
    logits = lm.logits(ids(seen.tokens)).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for moment in seen.moments:
        p = moment.probabilities
        assert p.shape == (lm.config.vocab_size,) and abs(p.sum() - 1) < 1e-5
        assert np.abs(np.log(p) - log_p[len(moment.holds) - 1]).max() < 2e-4
        best = np.argsort(-p, kind="stable")[: len(moment.top)]
        assert [i for i, _, _ in moment.top] == best.tolist() and len(best) == 3
        assert [q for _, _, q in moment.top] == p[best].tolist()
        assert moment.sampled.id == best[0]


@pytest.mark.slow
def test_the_tokens_are_those_of_generate(lm, seen):
    """Which runs the same compiled steps where it is asked for log-probabilities of the whole vocabulary."""
    greedy = k3jax.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=lm.config.vocab_size)
    assert lm.generate([PROMPT], greedy)[0].token_ids == [m.sampled.id for m in seen.moments]


def test_the_snapshot_is_of_the_prompt(lm, seen, monkeypatch):
    c, S, conv, latents, length, tokens, table = (lm.config, *seen.snapshot)
    H, K, W = c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size
    assert (S.content, S.groups, S.stands_for) == (f"[{H}, {K}, {K}] float32", len(c.kda_layers), "A...D")
    assert conv.content == f"[{3 * H * K}, {W - 1}] as [{W - 1}, {H}, {3 * K}] float32"
    assert (conv.groups, conv.stands_for) == (len(c.kda_layers), "B, C, D")
    assert latents.content == f"[4, {c.kv_lora_rank + c.qk_rope_head_dim}] float32"
    assert (latents.groups, latents.stands_for) == (len(c.mla_layers), "c_A...c_D")
    assert length.content == "4" and tokens.content == "[5]" and "E, which is in no cache" in tokens.stands_for
    assert table.stands_for == "E goes to page 0, place 4"
    assert all(0 <= item.error < 1e-5 for item in (S, conv, latents))
    trace = lm.trace
    monkeypatch.setattr(lm, "trace", lambda ids, sites: trace([9, *ids[:-1]], sites))  # one token off
    shifted = timeline(lm, PROMPT, steps=1).snapshot
    assert all(item.error > 1e-2 for item in shifted[:3])


@pytest.mark.slow
def test_sampling_draws_as_generate_and_leaves_the_distribution(golden):
    hot = k3jax.SamplingParams(max_tokens=3, temperature=5.0, top_k=50, seed=3, ignore_eos=True)
    asked = dataclasses.replace(hot, logprobs=golden.config.vocab_size)
    cold = timeline(golden, PROMPT)
    drawn = timeline(golden, PROMPT, hot)
    assert [m.sampled.id for m in drawn.moments] == golden.generate([PROMPT], asked)[0].token_ids
    assert drawn.tokens != cold.tokens
    np.testing.assert_array_equal(drawn.moments[0].probabilities, cold.moments[0].probabilities)


@pytest.mark.slow
def test_a_stop_token_ends_the_run(golden):
    second = timeline(golden, PROMPT).moments[1].sampled.id
    stop = k3jax.SamplingParams(temperature=0, stop_token_ids=[second], ignore_eos=True)
    ended = timeline(golden, PROMPT, stop, steps=5)
    assert [m.name for m in ended.moments] == ["prefill", "decode #1"] and ended.tokens[-1].id == second


def test_one_token_and_one_step(golden):
    seen = timeline(golden, [7], steps=1)
    assert letters(seen.tokens) == "AB" and seen.moments[0].distribution == "p(next | A)"
    assert seen.moments[0].latents == ((0,),) * 2 and seen.snapshot[1].stands_for == "zeros, A"
    assert all(item.error < 1e-5 for item in seen.snapshot[:3])


@pytest.mark.slow
def test_a_long_prompt_in_pieces_over_pages(golden, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL", 48)
    prompt = list(range(70))
    seen = timeline(golden, prompt, steps=2)
    assert [m.latents for m in seen.moments] == [(tuple(range(70)),) * 2, ((70,),) * 2]
    assert [m.name for m in seen.moments] == ["prefill", "decode #1"] and seen.tokens[69].letter == "BR"
    assert seen.snapshot[-1].content == "pages 0, 1" and "page 1, place 6" in seen.snapshot[-1].stands_for
    assert all(item.error < 1e-5 for item in seen.snapshot[:3])
    assert "A...BR" in render(seen) and all(len(line) <= 120 for line in render(seen).splitlines())


def test_the_last_history_may_stay_while_states_move(golden):
    """A token that repeats has the same raw inputs in layer 0: what changed is measured, not assumed."""
    token = 5
    after = k3jax.SamplingParams(temperature=0, logit_bias={token: 1e4}, ignore_eos=True)
    seen = timeline(golden, [token] * 4, after)
    kda = len(golden.config.kda_layers)
    assert [m.states for m in seen.moments] == [kda] * 3 and [m.histories for m in seen.moments] == [
        kda,
        kda - 1,
        kda - 1,
    ]


# Engines that are broken in one way each. The carry goes in after the real step.


def lengths_too_far(carry):
    return carry._replace(lengths=carry.lengths + 1)


def latents_one_slot_late(carry):
    return carry._replace(mla=tuple(jnp.roll(pages, 1, axis=1) for pages in carry.mla))


def a_latent_is_lost(carry):
    return carry._replace(mla=(*carry.mla[:-1], carry.mla[-1].at[0, 4].set(0)))


@pytest.mark.parametrize(
    ("step", "broken", "message"),
    [
        ("step", lengths_too_far, "prefill: the carry stands for 5 tokens, not for the 4"),
        ("decode", lengths_too_far, "decode #1: the carry stands for 6 tokens, not for the 5"),
        ("step", latents_one_slot_late, r"prefill: layer 2 wrote latents \(1, 2, 3, 4\), not 0 to 3"),
        ("decode", latents_one_slot_late, r"decode #1: layer 2 wrote latents \(0, 1, 2, 3, 4, 5\), not 4 to 4"),
        ("decode", a_latent_is_lost, r"decode #1: layer 5 wrote latents \(\), not 4 to 4"),
    ],
)
def test_a_broken_engine_is_found(golden, monkeypatch, step, broken, message):
    real = getattr(timelines, step)

    def run(*args, **options):
        state, *rest = real(*args, **options)
        return state._replace(carry=broken(state.carry)), *rest

    monkeypatch.setattr(timelines, step, run)
    with pytest.raises(RuntimeError, match=message):
        timeline(golden, PROMPT)


def test_an_engine_that_writes_the_sampled_token_at_once_is_found(golden, monkeypatch):
    """It would compute E in the prefill: every cache is one token ahead."""
    real = timelines.step

    def run(model, state, batch, sampled, ctx, sampling):
        state, *rest = real(model, state, batch, sampled, ctx, sampling)
        slots, table = batch.state_indices[:1], batch.block_table[:1]
        state, _ = generation.decode(model, state, slots, table, np.int32(1), ctx, sampling)
        return state, *rest

    monkeypatch.setattr(timelines, "step", run)
    with pytest.raises(RuntimeError, match="prefill: the carry stands for 5 tokens, not for the 4"):
        timeline(golden, PROMPT)


def test_values_that_are_not_finite_are_an_error(golden):
    weight = golden.model.model.embed_tokens.weight
    kept = weight.get_value()
    weight.set_value(kept.at[2].set(np.nan))
    try:
        with pytest.raises(RuntimeError, match="prefill: values are not finite after layer 0"):
            timeline(golden, PROMPT)
    finally:
        weight.set_value(kept)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt_ids is empty"),
        ([320], {}, "prompt_ids has id 320: allowed are 0 to 319"),
        ([-1], {}, "prompt_ids has id -1"),
        ("text", {}, "prompt_ids is a str"),
        ([1.5], {}, "prompt_ids holds 1.5"),
        ([1], dict(steps=0), "steps=0: allowed is an integer of 1 or more"),
        ([1], dict(steps=True), "steps=True"),
        ([1], dict(steps=1.0), "steps=1.0"),
        ([1], dict(steps=2**21), "prompt_ids of 1 tokens with max_tokens=2097152: allowed are"),
        ([1], dict(sampling=3), "sampling=3"),
        ([1], dict(sampling=k3jax.SamplingParams(n=2)), "n=2: allowed is 1 in a timeline"),
        ([1], dict(sampling=k3jax.SamplingParams(stop="a")), "stop=.* in a timeline"),
        ([1], dict(sampling=k3jax.SamplingParams(logprobs=0)), "logprobs=0: allowed is None in a timeline"),
        ([1], dict(sampling=k3jax.SamplingParams(prompt_logprobs=0)), "prompt_logprobs=0"),
        ([1], dict(sampling=k3jax.SamplingParams(stop_token_ids=[320])), "stop_token_ids has 320"),
        ([1], dict(sampling=k3jax.SamplingParams(min_tokens=9)), "min_tokens=9: allowed is 0 to max_tokens=3"),
    ],
)
def test_bad_input_is_named(golden, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        timeline(golden, prompt, **options)


# The text.


def test_letters_go_on_after_z():
    names = [timelines._letter(place) for place in range(18278)]
    assert names[:2] == ["A", "B"] and names[25:28] == ["Z", "AA", "AB"] and names[51:53] == ["AZ", "BA"]
    assert names[701:703] == ["ZZ", "AAA"] and names[-1] == "ZZZ"
    assert names == sorted(set(names), key=lambda name: (len(name), name))


def test_the_rendered_table(lm, seen):
    text = render(seen)
    lines = text.splitlines()
    assert str(seen) == text and all(len(line) <= 120 and line.isprintable() for line in lines)
    [start] = [i for i, line in enumerate(lines) if line.startswith("step") and "caches then hold" in line]
    head = lines[start]
    columns = [head.index(name) for name in ("step", "input", "caches then hold", "the model gives", "sampled")]
    rows = [line for line in lines[start + 1 :][:12] if line[:1].strip()]
    cells = [[line[a:b].strip() for a, b in zip(columns, [*columns[1:], None], strict=True)] for line in rows]
    assert [row[:4] for row in cells] == [
        ["prefill", "A, B, C, D", "A...D", "p(next | A...D)"],
        ["decode #1", "E", "A...E", "p(next | A...E)"],
        ["decode #2", "F", "A...F", "p(next | A...F)"],
    ]
    for row, moment in zip(cells, seen.moments, strict=True):
        assert row[4].startswith(f"{moment.sampled.letter} = {moment.sampled.id}")
        assert any(f"{moment.top[0][2]:.4f} {moment.top[0][0]}" in line for line in lines)
    c = lm.config
    assert f"4 in {len(c.mla_layers)} of {len(c.mla_layers)} layers" in text
    assert f"{len(c.kda_layers)} of {len(c.kda_layers)} layers" in text


def test_text_of_tokens_cannot_break_the_table():
    """Control characters, markup and emoji codes are written out."""
    nasty = Token("A", 3, "\x1b[31m[red]:smile:\n\t")
    moment = Moment("prefill", (nasty,), (nasty,), (), 0, 0, np.ones(4) / 4, ((3, nasty.text, 0.25),), nasty)
    text = render(Timeline((nasty,), (moment,), (Item("x", "[4]", 1, "A", None),), 0, 0))
    assert all(line.isprintable() for line in text.splitlines())
    assert text.count(r"'\x1b[31m[red]:smile:\n\t'") == 3
