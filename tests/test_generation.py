"""What a request asks for, through the user's object: ends, samples, log-probabilities, streams, conversations."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import log_softmax

import k3jax
from k3jax import generate as generation
from k3jax.sampling import SamplingParams

PROMPTS = [[5, 17, 200], [9], [31, 4, 4, 250, 11, 80]]
FREE = dict(max_tokens=12, ignore_eos=True)


@pytest.fixture
def lm(pair):
    return pair


def ids(completions):
    return [completion.token_ids for completion in completions]


# -- samples -----------------------------------------------------------------------------------------------------------
def test_samples_of_a_prompt_are_the_requests_with_their_seeds(lm):
    """n = 5 beside other requests: distinct, reproducible, and each what its seed gives alone."""
    five = SamplingParams(n=5, seed=3, **FREE)
    params = [SamplingParams(seed=8, **FREE), five, SamplingParams(n=2, seed=9, **FREE)]
    found = ids(lm.generate(PROMPTS, params))
    assert len(found) == 8 and found == ids(lm.generate(PROMPTS, params))
    assert len({*map(tuple, found[1:6])}) == 5
    alone = [
        lm.generate([prompt], sample)[0].token_ids
        for prompt, p in zip(PROMPTS, params, strict=True)
        for sample in p.samples()
    ]
    assert found == alone


@pytest.mark.slow
def test_more_samples_than_decode_together(lm, monkeypatch):
    """Those that wait take the places of those that have ended."""
    params = SamplingParams(n=5, seed=3, max_tokens=4, ignore_eos=True)
    wanted = ids(lm.generate(PROMPTS[:1], params))
    monkeypatch.setattr("k3jax.lm.ROWS", 2)
    assert ids(lm.generate(PROMPTS[:1], params)) == wanted


@pytest.mark.slow
def test_a_sample_that_fails_is_each_samples_own(lm):
    weight = lm.model.model.embed_tokens.weight
    kept = weight[...]
    weight.set_value(kept.at[7].set(np.nan))
    try:
        with pytest.warns(RuntimeWarning, match="not finite after layer 0"):
            found = lm.generate([[7], [5, 17]], SamplingParams(n=2, seed=1, **FREE))
    finally:
        weight.set_value(kept)
    assert [c.finish_reason for c in found] == ["error", "error", "length", "length"]


# -- one program for all ---------------------------------------------------------------------------------------------
def test_parameters_do_not_compile_anything(lm):
    """Requests of every kind in one batch: one decode program, and each request as it is alone."""
    kinds = [
        dict(temperature=0.7),
        dict(temperature=0),
        dict(top_p=0.5, min_p=0.05),
        dict(top_k=3, presence_penalty=2.0),
        dict(repetition_penalty=1.5, frequency_penalty=1.0),
        dict(logit_bias=dict.fromkeys(range(40, 60), 100.0)),
        dict(min_tokens=12, stop_token_ids=[11]),
        dict(stop=("e",)),
    ]
    params = [SamplingParams(**{**FREE, "seed": 4, **kind}) for kind in kinds]
    prompts = [PROMPTS[i % 3] for i in range(len(kinds))]
    lm.generate(prompts, [SamplingParams(**FREE)] * len(kinds))
    programs = generation.decode._cache_size(), generation.step._cache_size()
    together = ids(lm.generate(prompts, params))
    assert (generation.decode._cache_size(), generation.step._cache_size()) == programs
    assert together == [lm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    assert {*together[5]} <= {*range(40, 60)}
    assert len(together[6]) == 12 and 11 not in together[6]


def test_penalties_count_what_was_generated(lm):
    """With a large repetition penalty no positive logit is taken twice, the prompt's included; frequency counts each time."""
    [plain] = lm.generate([[11]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    assert len({*plain.token_ids}) < 40
    forbid = SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1e9, ignore_eos=True)
    [once] = lm.generate([[11]], forbid)
    positive = lm.logits([11, *once.token_ids[:-1]])
    for i, token in enumerate(once.token_ids):  # whatever has a positive logit is out of reach once it was there
        others = np.delete(positive[i], [11, *once.token_ids[:i]])
        assert token not in [11, *once.token_ids[:i]] or others.max() <= 0
    [twice] = lm.generate([[11]], SamplingParams(max_tokens=40, temperature=0, frequency_penalty=2, ignore_eos=True))
    history = [0] * lm.config.vocab_size
    logits = lm.logits([11, *twice.token_ids[:-1]])
    for i, token in enumerate(twice.token_ids):
        assert token == (logits[i] - 2.0 * np.array(history)).argmax()
        history[token] += 1


# -- ends --------------------------------------------------------------------------------------------------------------
def test_a_stop_text_ends_where_it_is_complete(lm):
    """Across token borders; the text ends before it, the tokens with the one that completed it."""
    [free] = lm.generate("And God said", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    for start in range(3, len(free.text) - 4, 5):
        stop = free.text[start : start + 4]
        [cut] = lm.generate("And God said", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=stop))
        assert cut.finish_reason == "stop" and cut.stop == stop
        assert cut.text == free.text[: free.text.index(stop)]
        made = len(cut.token_ids)
        assert cut.token_ids == free.token_ids[:made]
        assert stop in lm.decode(cut.token_ids) and stop not in lm.decode(cut.token_ids[:-1])


def test_the_first_of_several_stop_texts_counts_and_neighbours_go_on(lm):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    free = lm.generate(["And God said", "In the"], params)
    words = free[0].text[10:12], free[0].text[6:9], "\x00"
    stopped = lm.generate(["And God said", "In the"], [dataclasses.replace(params, stop=words), params])
    assert stopped[0].text == free[0].text[: min(free[0].text.index(w) for w in words[:2])]
    assert stopped[1] == free[1]


def test_min_tokens_comes_before_every_end(lm):
    """A stop token is out of reach until then; a stop text that is complete before does not count."""
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    [free] = lm.generate("And God said", greedy)
    letter = max("aeiou", key=free.text.count)
    assert free.text.count(letter) > 2
    for least in (0, 1, 5, 9, 20):
        [by_text] = lm.generate("And God said", dataclasses.replace(greedy, min_tokens=least, stop=letter))
        made = len(by_text.token_ids)
        assert by_text.token_ids == free.token_ids[:made]
        ends = [i for i, token in enumerate(free.token_ids, 1) if letter in lm.decode([token]) and i >= least]
        assert made == min([20, *ends]) and (by_text.finish_reason == "stop") == bool(ends)
        ids = tuple({*free.token_ids[:3], *free.token_ids[6:9]})
        [by_id] = lm.generate("And God said", dataclasses.replace(greedy, min_tokens=least, stop_token_ids=ids))
        assert not {*by_id.token_ids[:least]} & {*ids}
        assert by_id.token_ids == free.token_ids[:1] if least == 0 else len(by_id.token_ids) >= least


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_request_that_may_take_no_token_is_an_error(lm, temperature):
    """Everything forbidden, at once or until min_tokens: no token is made up, and neighbours go on."""
    nothing = SamplingParams(temperature=temperature, max_tokens=4, logit_bias=dict.fromkeys(range(2048), -np.inf))
    ends = SamplingParams(temperature=temperature, max_tokens=4, min_tokens=2, stop_token_ids=range(2048))
    fine = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with pytest.warns(RuntimeWarning, match="every token is forbidden"):
        *bad, good = lm.generate(PROMPTS, [nothing, ends, fine])
    assert all((c.finish_reason, c.token_ids) == ("error", []) and "request" in c.error for c in bad)
    assert good == lm.generate(PROMPTS[2:], fine)[0]


# -- log-probabilities ---------------------------------------------------------------------------------------------------
def test_log_probabilities_are_those_of_one_pass(lm):
    params = [SamplingParams(seed=i, logprobs=i, prompt_logprobs=3 - i, **FREE) for i in range(3)]
    for i, c in enumerate(lm.generate(PROMPTS, params)):
        whole = log_softmax(lm.logits(c.prompt_token_ids + c.token_ids))
        made = len(c.prompt_token_ids)
        assert c.logprobs.mode == c.prompt_logprobs.mode == "raw"
        assert c.prompt_logprobs.tokens[0] is None and len(c.prompt_logprobs.tokens) == made
        for place, (token, found, top, wanted) in enumerate(
            zip(
                c.prompt_token_ids + c.token_ids,
                c.prompt_logprobs.tokens + c.logprobs.tokens,
                c.prompt_logprobs.top + c.logprobs.top,
                [3 - i] * made + [i] * len(c.token_ids),
                strict=True,
            )
        ):
            if place:
                assert abs(found - whole[place - 1, token]) < 1e-3
                assert len(top) == wanted and [*top.values()] == sorted(top.values(), reverse=True)
                best = np.sort(whole[place - 1])[::-1][:wanted]
                np.testing.assert_allclose([*top.values()], best, atol=1e-3)


@pytest.mark.slow
def test_scores_are_prompt_log_probabilities(lm):
    text = "And God said, Let there be light"
    tokens = lm.encode(text)
    [score], [by_ids] = lm.score(text, window=16, stride=16), lm.score([tokens], window=16, stride=16)
    assert score == by_ids and score.token_ids == tokens
    [c] = lm.generate([[lm.config.bos_token_id, *tokens]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    np.testing.assert_allclose(score.logprobs, c.prompt_logprobs.tokens[1:], atol=1e-3)
    assert score.bits_per_byte == lm.bits_per_byte(text, window=16, stride=16)
    np.testing.assert_allclose(score.bits_per_byte, -sum(score.logprobs) / np.log(2) / len(text), rtol=1e-6)
    [empty] = lm.score([[lm.end_ids[0]]], window=16, stride=16)
    assert empty.bits_per_byte is None and len(empty.logprobs) == 1


# -- streams -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("extra", [{}, {"stop": ("he",)}, {"stop_token_ids": (11,)}, {"min_p": 0.01}])
def test_a_stream_is_the_completion_in_pieces(lm, extra):
    params = SamplingParams(max_tokens=30, seed=2, **extra)
    *pieces, last = lm.stream("And God said", params)
    [whole] = lm.generate("And God said", params)
    assert last.completion == whole and all(piece.completion is None for piece in pieces)
    assert "".join(piece.text for piece in [*pieces, last]) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids


@pytest.mark.parametrize(("seconds", "sizes"), [(0.0, [1, 2, 4, 8, 16, 8]), (1.0, [1] * 39)])
def test_a_stream_looks_as_often_as_somebody_would_notice(lm, monkeypatch, seconds, sizes):
    """Steps that take no time are taken in ever larger groups, slow ones one by one; the tokens are the same."""
    made, decode, clock = [], generation.decode, [0.0]

    def watched(model, state, slots, table, steps, *rest):
        made.append(int(steps))
        clock[0] += seconds
        return decode(model, state, slots, table, steps, *rest)

    monkeypatch.setattr(generation, "decode", watched)
    monkeypatch.setattr("k3jax.engine.engine.time.perf_counter", lambda: clock[0])
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    *_, last = lm.stream("And God said", params)
    assert made == sizes
    assert lm.generate("And God said", params) == [last.completion]


def test_a_stream_checks_before_it_starts(lm):
    with pytest.raises(ValueError, match="n=2: allowed is 1 in a stream"):
        lm.stream("a", SamplingParams(n=2))
    with pytest.raises(ValueError, match="prompt 0 has id 2048"):
        lm.stream([2048])


def test_a_stream_that_is_left_frees_its_memory(lm):
    lm.generate("And", SamplingParams(max_tokens=2))
    before = len(jax.live_arrays())
    stream = lm.stream("And", SamplingParams(max_tokens=20, ignore_eos=True))
    next(stream)
    assert len(jax.live_arrays()) > before
    stream.close()
    assert len(jax.live_arrays()) <= before


# -- conversations -------------------------------------------------------------------------------------------------------
def test_a_conversation_goes_on_as_if_it_had_not_stopped(lm):
    """In pieces of any length, and after a stop text, with and without new input."""
    whole = dict(temperature=0.8, seed=5, ignore_eos=True)
    [want] = lm.generate("And God said", SamplingParams(max_tokens=40, **whole))
    state, made = None, []
    for size in (1, 7, 32):
        [c] = lm.generate(
            "" if state else "And God said", SamplingParams(max_tokens=size, **whole), state=state, keep_state=True
        )
        state, made = c.state, made + c.token_ids
        assert state.token_ids == (*want.prompt_token_ids, *made)
        assert int(state.carry.lengths[0]) == len(state.token_ids) - 1
    assert made == want.token_ids
    stop = want.text[4:7]
    [cut] = lm.generate("And God said", SamplingParams(max_tokens=40, stop=stop, **whole), keep_state=True)
    rest = 40 - len(cut.token_ids)
    [c] = lm.generate("", SamplingParams(max_tokens=rest, **whole), state=cut.state)
    assert cut.token_ids + c.token_ids == want.token_ids
    again = lm.encode(" and more")
    [a] = lm.generate([again], SamplingParams(max_tokens=9, **whole), state=state)
    [b] = lm.generate([[*state.token_ids, *again]], SamplingParams(max_tokens=9, **whole))
    assert (a.prompt_token_ids, a.token_ids) == (b.prompt_token_ids, b.token_ids)


def test_a_failed_request_leaves_no_state(lm):
    """And a state that is computed to its end needs a prompt to go on from."""
    nothing = SamplingParams(max_tokens=2, logit_bias=dict.fromkeys(range(2048), -np.inf))
    with pytest.warns(RuntimeWarning, match="every token is forbidden"):
        [c] = lm.generate("And God said", nothing, keep_state=True)
    assert c.finish_reason == "error" and c.state is None
    [c] = lm.generate("And God said", SamplingParams(max_tokens=2), keep_state=True)
    whole = c.state._replace(token_ids=c.state.token_ids[:-1])
    with pytest.raises(ValueError, match="prompt 0 is empty and all tokens of the state are computed"):
        lm.generate("", state=whole)
    assert len(lm.generate(" Let", SamplingParams(max_tokens=2, ignore_eos=True), state=whole)[0].token_ids) == 2


def test_a_state_may_be_used_again(lm):
    """It is not given away: two continuations, and several samples of one, start from the same place."""
    [c] = lm.generate("And God said", SamplingParams(max_tokens=4, temperature=0), keep_state=True)
    go = SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True)
    assert ids(lm.generate("", go, state=c.state)) == ids(lm.generate("", go, state=c.state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(c.state.carry))


def test_states_are_checked(lm):
    params = SamplingParams(max_tokens=2, temperature=0)
    [c] = lm.generate("And God said", params, keep_state=True)
    good, carry = c.state, c.state.carry
    assert repr(good).startswith("<Conversation: 5 tokens") and "\n" not in repr(good)

    def state(**changes):
        return good._replace(carry=carry._replace(**changes))

    half = good._replace(carry=jax.tree.map(lambda a: a.astype(np.float16), carry))
    gone = good._replace(carry=jax.tree.map(jnp.copy, carry))
    jax.tree.map(lambda a: a.delete(), gone.carry)
    for bad, message in (
        (None, "state is a NoneType: allowed is the state of a completion that was made with keep_state=True"),
        (5, "state is a int"),
        (half, r"state.kda\[0\].conv is float16"),
        (state(mla=tuple(a[:0] for a in carry.mla)), "state.carry has 0 pages: allowed are 1 or more for 4 tokens"),
        (state(lengths=carry.lengths + 100), "state.carry.lengths=104: allowed are 1 to 5"),
        (state(lengths=carry.lengths - 9), "state.carry.lengths=-5"),
        (good._replace(token_ids=good.token_ids[:1]), "state.carry.lengths=4: allowed are 1 to 1"),
        (good._replace(token_ids=("a",)), "state.token_ids holds 'a'"),
        (good._replace(token_ids=None), "state.token_ids is a NoneType"),
        (good._replace(carry=None), "state.carry is a NoneType"),
        (gone, "state.carry has arrays that were deleted"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.save_state("never", bad)
        if bad is not None:
            with pytest.raises(ValueError, match=message):
                lm.generate("a", params, state=bad)
    for call, message in (
        (lambda: lm.generate(["a", "b"], params, state=good), "state with 2 prompts"),
        (lambda: lm.generate("a", SamplingParams(prompt_logprobs=0), state=good), "prompt_logprobs with a state"),
        (lambda: lm.generate("a", SamplingParams(max_tokens=4095), state=good), "allowed are 4096 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_a_saved_conversation_goes_on_in_another_process(short, tmp_path):
    params = SamplingParams(max_tokens=10, seed=7, ignore_eos=True)
    program = f"""
import json, k3jax
lm = k3jax.load({str(short)!r}, dtype="float32")
state = lm.load_state({str(tmp_path / "state")!r})
[c] = lm.generate(" Let", k3jax.SamplingParams(max_tokens=10, seed=7, ignore_eos=True), state=state)
print(json.dumps([c.prompt_token_ids, c.token_ids]))
"""
    with k3jax.load(short, dtype="float32") as lm:
        [c] = lm.generate("And God said", params, keep_state=True)
        lm.save_state(tmp_path / "state", c.state)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [here] = lm.generate(" Let", params, state=c.state)
    assert json.loads(done.stdout) == [here.prompt_token_ids, here.token_ids]


def test_a_state_belongs_to_its_weights(lm, tmp_path):
    """Another model of the same architecture is refused, and so is another trunk dtype."""
    [c] = lm.generate("And", SamplingParams(max_tokens=2), keep_state=True)
    lm.save_state(tmp_path / "state", c.state)
    weight = lm.model.model.norm.weight
    kept = weight[...]
    try:
        weight.set_value(kept * 1.01)
        with pytest.raises(k3jax.CheckpointError, match="weights: saved with those of fingerprint"):
            lm.load_state(tmp_path / "state")
    finally:
        weight.set_value(kept)
    assert lm.load_state(tmp_path / "state").token_ids == c.state.token_ids


# -- options -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logit_bias={2048: 1}), "logit_bias has 2048: allowed are 0 to 2047"),
        (dict(logprobs=2049), "logprobs=2049"),
        (dict(prompt_logprobs=5000), "prompt_logprobs=5000"),
    ],
)
def test_what_does_not_fit_the_model_is_named(lm, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate("a", SamplingParams(**options))


def test_the_one_alias(lm):
    assert len(lm.generate([[1]], max_new_tokens=3)[0].token_ids) <= 3  # 64 without it
    with pytest.raises(ValueError, match="max_new_tokens=3: allowed without sampling"):
        lm.generate([[1]], SamplingParams(), max_new_tokens=3)


def test_a_stop_text_needs_a_tokenizer(lm):
    bare = k3jax.LM(lm.model, lm.config, None, lm.kernels)
    with pytest.raises(ValueError, match="stop=.*tokenizer"):
        bare.generate([[1]], SamplingParams(stop="a"))
