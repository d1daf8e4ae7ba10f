"""Faults that other engines had in sampling, log-probabilities and text, numbered B78 to B87, each with its source."""

import numpy as np
import pytest
from helpers import log_softmax

import k3jax
from k3jax.sampling import SamplingParams

PROMPTS = [[5, 17, 200], [9], [31, 4, 4, 250, 11, 80]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def lm(pair):
    return pair


def test_b78_temperature_zero_beside_other_temperatures(lm):
    """vllm#5404, #5898: temperature 0 was replaced by 1; TensorRT-LLM#1632: a row at 0 changed its neighbours."""
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True, logprobs=5) for t in (0, 1, 0.5)]
    together = lm.generate(PROMPTS, params)
    for prompt, p, found in zip(PROMPTS, params, together, strict=True):
        assert lm.generate([prompt], p)[0].token_ids == found.token_ids
        assert np.isfinite(found.logprobs.tokens).all()
    greedy = together[0].token_ids
    assert greedy == lm.logits(PROMPTS[0] + greedy[:-1])[2:].argmax(-1).tolist()


@pytest.mark.parametrize("off", [dict(top_k=0), dict(top_k=-1), dict(top_p=1), dict(min_p=0), dict(top_k=2048)])
def test_b78_corner_values_change_nothing(lm, off):
    free = dict(seed=3, max_tokens=12, ignore_eos=True)
    assert lm.generate(PROMPTS[:1], SamplingParams(**free, **off)) == lm.generate(PROMPTS[:1], SamplingParams(**free))


def test_b79_parameters_are_neither_ignored_nor_unknown(lm):
    """tpu-inference#3213: min_p was taken and ignored; vllm#16172: seeds were refused."""
    [c] = lm.generate(
        PROMPTS[:1],
        SamplingParams(min_p=0.2, seed=1, max_tokens=12, ignore_eos=True, logprobs=2048, logprobs_mode="processed"),
    )
    for top in c.logprobs.top:
        assert min(top.values()) >= max(top.values()) + np.log(0.2) - 1e-4
    assert min(len(top) for top in c.logprobs.top) < 2048
    [c] = lm.generate(PROMPTS[:1], SamplingParams(logit_bias={77: 1e4}, max_tokens=3))
    assert c.token_ids == [77] * 3
    for unknown in ("min_q", "best_of", "top_n_sigma"):
        with pytest.raises(TypeError, match=unknown):
            SamplingParams(**{unknown: 1})
    with pytest.raises(ValueError, match=r"top_p=0: allowed is a number in \(0, 1\]"):
        SamplingParams(top_p=0)


def test_b81_raw_and_processed_log_probabilities(lm):
    """vllm#42259: raw sums to one over the vocabulary, processed over what was kept; the answer says which it is."""
    everything = dict(temperature=0.7, top_p=0.9, logprobs=2048, seed=1, max_tokens=6)
    [raw] = lm.generate([PROMPTS[0]], SamplingParams(**everything))
    [processed] = lm.generate([PROMPTS[0]], SamplingParams(logprobs_mode="processed", **everything))
    assert (raw.logprobs.mode, processed.logprobs.mode) == ("raw", "processed")
    assert raw.token_ids == processed.token_ids
    for a, b in zip(raw.logprobs.top, processed.logprobs.top, strict=True):
        p, q = np.exp([*a.values()]), np.exp([*b.values()])
        assert len(a) == 2048 and abs(p.sum() - 1) < 1e-4 and abs(q.sum() - 1) < 1e-4
        kept = [*b]
        assert 1 <= len(kept) < 2048
        scaled = np.array([a[token] for token in kept]) / 0.7
        np.testing.assert_allclose([b[token] for token in kept], log_softmax(scaled), atol=1e-4)


@pytest.mark.slow
def test_b83_prompts_in_pieces_have_the_same_log_probabilities(lm, monkeypatch):
    """vllm#37796: a prompt that takes several steps, beside others. Preempted ones are in test_faults_life.py."""
    prompts = [[*range(40, 99)], PROMPTS[1], [*range(300, 340)]]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True)
    wanted = lm.generate(prompts, params)
    monkeypatch.setattr("k3jax.lm.PREFILL", 16)
    for a, b in zip(lm.generate(prompts, params), wanted, strict=True):
        assert a.token_ids == b.token_ids and a.prompt_logprobs.tokens[0] is None
        np.testing.assert_allclose(a.prompt_logprobs.tokens[1:], b.prompt_logprobs.tokens[1:], atol=1e-3)


def test_b84_one_set_of_ends(lm):
    """smg#2571, tt-inference-server#3943: configuration, generation defaults and tokenizer make one set of ends.

    Their names never show.
    """
    names = lm.tokenizer.special_ids
    assert {*lm.end_ids} == {names["[EOS]"], names["<|end_of_msg|>"]}
    for end in lm.end_ids:
        [c] = lm.generate("And", SamplingParams(max_tokens=5, logit_bias={end: 1e4}))
        assert (c.token_ids, c.text, c.finish_reason, c.stop) == ([end], "", "stop", end)
        [c] = lm.generate("And", SamplingParams(max_tokens=2, logit_bias={end: 1e4}, ignore_eos=True))
        assert (c.token_ids, c.text, c.finish_reason) == ([end] * 2, "", "length")


def test_b84_ids_are_as_published():
    """mlx-vlm#1944: a converted tokenizer gave control tokens other ids."""
    config = k3jax.K3Config.k3()
    assert (config.bos_token_id, config.eos_token_id, config.vocab_size) == (163584, 163586, 163840)


@pytest.mark.parametrize("character", "é光🔥")
def test_b86_a_character_over_several_tokens(lm, character):
    """vllm#48853, #44620, #45636: its tokens at the end of the prompt, and between steps, and before a stop text."""
    first, *rest = lm.tokenizer.encode(character)
    assert rest, "no token of this vocabulary is the character"
    forced = [*rest, *lm.encode("a" + character + "b!")]
    made = []
    state = None
    prompt = [*lm.encode("And "), first]
    for token in forced:  # one token a call, each forced: the conversation goes on over every border
        [*_, last] = lm.stream(
            [] if state else prompt, SamplingParams(max_tokens=1, logit_bias={token: 1e4}), state=state, keep_state=True
        )
        assert last.completion.token_ids == [token]
        state = last.completion.state
        made.append(last.completion.text)
    assert "".join(made) == character + "a" + character + "b!"
    shown = lm.decode([*prompt, *forced])
    assert shown == "And " + character + "a" + character + "b!"
    for stop in ("", "!"):
        stream = k3jax.io.tokenizer.TextStream(lm.tokenizer, [stop] if stop else [], prompt)
        text = "".join([*(stream.push(token) for token in forced), stream.finish()])
        assert text == shown.removeprefix("And ").removesuffix(stop) and "\ufffd" not in text


@pytest.mark.parametrize("name", ["<|end_of_msg|>", "<|open|>", "<|close|>", "[EOS]"])
def test_b87_what_a_user_types_controls_nothing(lm, name):
    """sglang#33025: in a prompt and in a message."""
    control = lm.tokenizer.control_ids
    assert name in lm.tokenizer.special_ids
    assert not control & {*lm.encode(f"a {name} b")} and lm.decode(lm.encode(f"a {name} b")) == f"a {name} b"
    plain = lm.chat_format.encode([{"role": "user", "content": "a"}])
    typed = lm.chat_format.encode([{"role": "user", "content": f"a{name}"}])
    assert [i for i in typed if i in control] == [i for i in plain if i in control]
    assert name in lm.decode([i for i in typed if i not in control])
