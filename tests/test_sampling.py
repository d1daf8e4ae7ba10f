"""The draw: laws of what is kept, of randomness and of rows; distributions against NumPy in float64."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.sampling import SamplingParams, by_row, sample

VOCAB = 12
draw = jax.jit(sample, static_argnames="top")


def sampled(logits, params, positions, *, counts=None, prompts=None, ends=(), top=None, allowed=None):
    rows = len(params)
    return draw(
        np.broadcast_to(logits, (rows, VOCAB)).astype(np.float32),
        np.asarray(positions, np.int32),
        np.zeros((rows, VOCAB), np.int32)
        if counts is None
        else np.broadcast_to(counts, (rows, VOCAB)).astype(np.int32),
        by_row(params, [()] * rows if prompts is None else prompts, ends, rows, VOCAB),
        top=top,
        allowed=allowed,
    )


def tokens(logits, params, positions, **rest):
    return np.asarray(sampled(logits, params, positions, **rest).token)


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=VOCAB) * 2


def many(logits, *, draws=4096, counts=None, prompt=(), ends=(), **settings):
    """Draws of one request's distribution, by seed."""
    params = [SamplingParams(seed=seed, **settings) for seed in range(draws)]
    return tokens(logits, params, np.full(draws, 7), counts=counts, prompts=[prompt] * draws, ends=ends)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def distribution(logits, p, counts, prompt, ends):
    """What a request is drawn from, written out in float64 from the parameters' descriptions."""
    z = np.asarray(logits, np.float64).copy()
    for token, bias in p.logit_bias.items():
        z[token] += bias
    for token in range(len(z)):
        if token in prompt or counts[token]:
            z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
        z[token] -= p.frequency_penalty * counts[token] + p.presence_penalty * (counts[token] > 0)
    if sum(counts) < p.min_tokens:
        z[list(ends)] = -np.inf
    if p.temperature == 0:
        return np.eye(len(z))[z.argmax()]
    q = softmax(z / p.temperature)
    order = sorted(range(len(z)), key=lambda token: (-q[token], token))
    kept = [token for token in order if q[token] >= p.min_p * q[order[0]]]
    kept = kept[: p.top_k] if p.top_k > 0 else kept
    before, total, nucleus = 0.0, q[kept].sum(), []
    for token in kept:
        if before < p.top_p or not nucleus:
            nucleus.append(token)
        before += q[token] / total
    out = np.zeros(len(z))
    out[nucleus] = q[nucleus] / q[nucleus].sum()
    return out


CHI2_99 = [0, 6.63, 9.21, 11.34, 13.28, 15.09, 16.81, 18.48, 20.09, 21.67, 23.21, 24.72]  # by degrees of freedom

SETTINGS = {
    "plain": {},
    "cold": dict(temperature=0.5),
    "hot": dict(temperature=2.0),
    "top_k": dict(top_k=4),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.1),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=-0.7),
    "repetition": dict(repetition_penalty=1.8),
    "bias": dict(logit_bias={0: 2.5, 3: -1.0, 4: -math.inf}),
    "min_tokens": dict(min_tokens=60),
    "all": dict(
        temperature=1.3, top_k=7, top_p=0.9, min_p=0.02, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.3,
        logit_bias={1: 1.0, 2: -2.0}, min_tokens=60,
    ),
}  # fmt: skip
COUNTS, PROMPT, ENDS = [0, 3, 0, 1, 0, 0, 2, 0, 0, 0, 0, 1], (1, 5, 5, 9), (2, 7)


@pytest.mark.parametrize("case", SETTINGS)
def test_frequencies_follow_the_law(logits, case):
    """Chi-square at p > 0.01, for this list of seeds."""
    draws, p = 1 << 13, SamplingParams(**SETTINGS[case])
    found = np.bincount(
        many(logits, draws=draws, counts=COUNTS, prompt=PROMPT, ends=ENDS, **SETTINGS[case]), minlength=VOCAB
    )
    law = distribution(logits, p, COUNTS, PROMPT, ENDS)
    assert not found[law == 0].any()
    expected = draws * law[law > 0]
    assert ((found[law > 0] - expected) ** 2 / expected).sum() < CHI2_99[len(expected) - 1]


@pytest.mark.parametrize("case", SETTINGS)
def test_log_probabilities_say_what_was_drawn_from(logits, case):
    """Processed: the law above. Raw: the model's own, whatever was asked for."""
    params = [
        SamplingParams(logprobs=VOCAB, logprobs_mode=mode, seed=4, **SETTINGS[case]) for mode in ("raw", "processed")
    ]
    new = sampled(logits, params, [3, 3], counts=COUNTS, prompts=[PROMPT] * 2, ends=ENDS, top=VOCAB)
    laws = softmax(logits), distribution(logits, params[0], COUNTS, PROMPT, ENDS)
    assert new.token[0] == new.token[1]
    for row, law in enumerate(laws):
        found = np.zeros(VOCAB)
        found[np.asarray(new.top_ids[row])] = np.exp(np.asarray(new.top_logprobs[row]))
        np.testing.assert_allclose(found, law, rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(np.exp(float(new.logprob[row])), law[int(new.token[row])], rtol=2e-5)
        best = np.asarray(new.top_logprobs[row])
        assert (best[1:] <= best[:-1]).all()


def test_processed_log_probabilities_at_temperature_zero_are_certain(logits):
    new = sampled(logits, [SamplingParams(temperature=0, logprobs=2, logprobs_mode="processed")], [0], top=2)
    assert float(new.logprob[0]) == 0 and new.top_ids[0, 0] == logits.argmax() and new.top_logprobs[0, 1] == -np.inf


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_any_mixture_of_rows_is_each_row_alone(cases, greedy, seed):
    """Rows of all kinds share one program and do not touch each other: temperature 0 included."""
    z = np.random.default_rng(seed).normal(size=(4, VOCAB)) * 2
    params = [SamplingParams(seed=seed + i, **SETTINGS[case]) for i, case in enumerate(cases)]
    params += [SamplingParams(seed=9)] * (4 - len(params))
    params[greedy] = dataclasses.replace(params[greedy], temperature=0)
    together = tokens(z, params, [5] * 4, counts=COUNTS, prompts=[PROMPT] * 4, ends=ENDS)
    size = draw._cache_size()
    for row, p in enumerate(params):
        others = [SamplingParams(temperature=0)] * 4
        others[row] = p
        alone = tokens(z, others, [5] * 4, counts=COUNTS, prompts=[PROMPT] * 4, ends=ENDS)
        assert alone[row] == together[row]
        assert together[row] in np.flatnonzero(distribution(z[row], p, COUNTS, PROMPT, ENDS) > 0)
    assert draw._cache_size() == size


def test_a_row_without_limits_keeps_its_tail_beside_one_with_limits():
    """The likeliest token rounds to all of the probability here; top_p of 1 still keeps the others."""
    peaked = np.array([0.0] + [-30.0] * (VOCAB - 1))
    plain = SamplingParams(seed=1, logprobs=VOCAB, logprobs_mode="processed")
    alone = sampled(peaked, [plain, plain], [3, 3], top=VOCAB)
    beside = sampled(peaked, [plain, SamplingParams(top_k=5, seed=1)], [3, 3], top=VOCAB)
    np.testing.assert_array_equal(beside.top_logprobs[0], alone.top_logprobs[0])
    assert np.isfinite(alone.top_logprobs[0]).all()


def test_min_tokens_holds_the_ends_back_until_then(logits):
    """Nothing that ends a request is drawn while fewer tokens were made; the next one may."""
    ends = tuple(np.argsort(-logits)[:2].tolist())
    for made, expected in ((4, False), (5, True)):
        counts = [0] * (VOCAB - 1) + [made]
        assert bool({*ends} & {*many(logits, counts=counts, ends=ends, min_tokens=5)}) == expected


def bits(*rows, vocabulary=VOCAB):
    """A mask's words by row, from the tokens that each may have; bits past the vocabulary are set, and mean nothing."""
    words = np.zeros((len(rows), -(-vocabulary // 32) * 32), np.uint8)
    words[:, vocabulary:] = 1
    for row, ids in zip(words, rows, strict=True):
        row[list(ids)] = 1
    return np.packbits(words, axis=1, bitorder="little").view("<u4")


@pytest.mark.parametrize("case", SETTINGS)
def test_a_mask_leaves_the_law_of_what_it_allows(logits, case):
    """The row is drawn from its law, as if what is forbidden had a bias of -inf; the raw log-probabilities do not see it."""
    may = (0, 2, 5, 6, 7, 10)
    settings_ = {k: v for k, v in SETTINGS[case].items() if k != "logit_bias"}
    bias = {**SETTINGS[case].get("logit_bias", {}), **{i: -math.inf for i in range(VOCAB) if i not in may}}
    p = SamplingParams(logprobs=VOCAB, seed=4, **SETTINGS[case])
    params = [p, dataclasses.replace(p, logprobs_mode="processed"), dataclasses.replace(p, logprobs_mode="processed")]
    rest = dict(counts=COUNTS, prompts=[PROMPT] * 3, ends=ENDS, top=VOCAB)
    new = sampled(logits, params, [3] * 3, allowed=bits(may, may, range(VOCAB)), **rest)
    plain = sampled(logits, params, [3] * 3, **rest)
    laws = [
        softmax(logits),
        distribution(logits, SamplingParams(logit_bias=bias, **settings_), COUNTS, PROMPT, ENDS),
        distribution(logits, p, COUNTS, PROMPT, ENDS),
    ]
    assert new.token[0] == new.token[1] and int(new.token[0]) in may and laws[1][int(new.token[1])] > 0
    for row, law in enumerate(laws):
        found = np.zeros(VOCAB)
        found[np.asarray(new.top_ids[row])] = np.exp(np.asarray(new.top_logprobs[row]))
        np.testing.assert_allclose(found, law, rtol=2e-5, atol=1e-7)
    for row in (0, 2):  # raw, and a row with everything allowed: bit for bit those without a mask
        np.testing.assert_array_equal(new.top_logprobs[row], plain.top_logprobs[row])
    assert new.token[2] == plain.token[2]


def test_a_row_with_nothing_allowed_gets_no_token(logits):
    params = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=1)]
    allowed = bits((), (), (4,))
    assert np.asarray(sampled(logits, params, [0] * 3, allowed=allowed).token).tolist() == [-1, -1, 4]
    early = sampled(logits, [SamplingParams(min_tokens=3)], [0], ends=(4,), allowed=bits((4,)))
    assert int(early.token[0]) == -1  # min_tokens holds the end back, and the mask allows nothing else


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 69), min_size=1), st.integers(0, 2**31))
def test_each_bit_of_a_mask_is_its_token(may, seed):
    """Over more than two words, of which the last is not full."""
    z = np.random.default_rng(seed).normal(size=(1, 70)).astype(np.float32)
    rows = by_row([SamplingParams(temperature=0)], [()], (), 1, 70)
    found = draw(z, np.zeros(1, np.int32), np.zeros((1, 70), np.int32), rows, allowed=bits(may, vocabulary=70))
    assert int(found.token[0]) == max(may, key=lambda token: z[0, token])


def test_a_schema_is_stored_as_one_text():
    """However it is given; the order of its keys is a part of it, for properties are written in that order."""
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {}}}
    text = '{"type": "object", "properties": {"b": {"const": "\\u00e9"}, "a": {}}}'
    a, b = SamplingParams(json_schema=schema), SamplingParams(json_schema=text)
    assert a == b and hash(a) == hash(b) and dataclasses.replace(a) == a
    assert a.json_schema == '{"type":"object","properties":{"b":{"const":"é"},"a":{}}}'
    turned = SamplingParams(json_schema={"properties": schema["properties"], "type": "object"})
    assert turned != a


def test_a_text_follows_a_schema_or_a_regex():
    with pytest.raises(ValueError, match="regex='a': allowed is None beside json_schema"):
        SamplingParams(regex="a", json_schema={})


def test_further_samples_get_seeds_of_their_own():
    params = SamplingParams(n=5, seed=11)
    seeds = [p.seed for p in params.samples()]
    assert seeds[0] == 11 and len({*seeds}) == 5 and seeds == [p.seed for p in params.samples()]
    assert all(p.n == 1 for p in params.samples())
    free = SamplingParams(n=2)
    assert {p.seed for p in free.samples()}.isdisjoint(p.seed for p in free.samples())


def test_temperature_zero_is_argmax_with_the_lowest_index_on_ties(logits):
    assert (many(logits, temperature=0) == logits.argmax()).all()
    tie = np.zeros(VOCAB)
    tie[[3, 5]] = 1
    assert (many(tie, temperature=0) == 3).all()


def test_top_k_keeps_the_k_likeliest(logits):
    assert set(many(logits, top_k=3)) == set(np.argsort(-logits)[:3])
    assert (many(logits, top_k=1) == logits.argmax()).all()
    for off in (0, -1, VOCAB, 1000):
        np.testing.assert_array_equal(many(logits, top_k=off), many(logits))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1] + [1e-9] * (VOCAB - 4)))
    assert set(many(logits, top_p=0.7)) == {0, 1}
    assert set(many(logits, top_p=0.76)) == {0, 1, 2}
    assert set(many(logits, top_p=1e-6)) == set(many(logits, top_p=1e-39)) == {0}
    np.testing.assert_array_equal(many(logits, top_p=1.0), many(logits))


def test_top_p_counts_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [1e-9] * (VOCAB - 4)))
    assert set(many(logits, top_k=2, top_p=0.6)) == {0, 1}  # 0.4 / 0.7 = 0.57 < 0.6
    assert set(many(logits, top_k=2, top_p=0.5)) == {0}


def test_a_row_does_not_depend_on_its_neighbours(logits):
    mixed = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(temperature=0.5, top_p=0.9, seed=2)]
    alone = [tokens(logits, [p], [9])[0] for p in mixed]
    np.testing.assert_array_equal(tokens(logits, mixed, [9, 9, 9]), alone)
    np.testing.assert_array_equal(tokens(logits, mixed[::-1], [9, 9, 9]), alone[::-1])


def test_draws_are_keyed_by_seed_and_position(logits):
    same = [SamplingParams(seed=5)] * 64
    by_position = tokens(logits, same, np.arange(64))
    assert len(set(by_position)) > 3
    np.testing.assert_array_equal(by_position, tokens(logits, same, np.arange(64)))
    assert len(set(tokens(logits, same, np.zeros(64)))) == 1
    big = [SamplingParams(seed=5 + (1 << 40))] * 64  # the high word counts
    assert (tokens(logits, big, np.arange(64)) != by_position).any()
    fresh = [by_row([SamplingParams()], [()], (), 1, VOCAB).seed.tolist() for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_stop_ids_are_the_models_and_the_users():
    params = [SamplingParams(stop_token_ids=[9]), SamplingParams(stop_token_ids=[9], ignore_eos=True), SamplingParams()]
    table = np.asarray(by_row(params, [()] * 3, (4, 6), 4, VOCAB).ends)
    assert [set(np.flatnonzero(row)) for row in table] == [{4, 6, 9}, {9}, {4, 6}, set()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("max_tokens", 0), ("max_tokens", 2.0),
        ("max_tokens", True), ("seed", -1), ("seed", 2**63), ("seed", 1.0), ("stop_token_ids", (-1,)), ("ignore_eos", 1),
        ("min_p", -0.1), ("min_p", 1.5), ("min_p", None), ("presence_penalty", 2.5), ("frequency_penalty", "x"),
        ("repetition_penalty", 0), ("repetition_penalty", 1e-46), ("repetition_penalty", 10**400), ("temperature", 1e39),
        ("temperature", 10**400), ("logit_bias", {1: 1e39}), ("logit_bias", {1: -(10**400)}), ("n", 10**5),
        ("max_tokens", 2**31), ("logprobs_mode", np.array(["raw", "raw"])), ("top_p", np.ones((3, 3))),
        ("logit_bias", [1, 2]), ("logit_bias", {"a": 1}), ("logit_bias", {-1: 1}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf}), ("stop", ""), ("stop", ("a", "")), ("stop", 5),
        ("stop", ("\ud800",)), ("n", 0), ("n", 2.0), ("min_tokens", -1), ("min_tokens", 65), ("logprobs", -1), ("logprobs", True),
        ("prompt_logprobs", 1.5), ("logprobs_mode", "cooked"), ("logprobs_mode", "processed"),
        ("regex", ""), ("regex", 5), ("regex", "\ud800"), ("json_schema", "{"), ("json_schema", "[]"), ("json_schema", 5),
        ("json_schema", {"const": math.nan}), ("json_schema", {"const": {1}}), ("json_schema", {"const": "\ud800"}),
        ("json_schema", "[" * 100_000),
    ],
)  # fmt: skip
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*allowed is") as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="min_q"):
        SamplingParams(min_q=0.1)


def test_greedy_samples_would_all_be_one():
    with pytest.raises(ValueError, match="n=2: allowed is 1 at temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_parameters_are_values():
    a, b = (SamplingParams(logit_bias={3: 1}, stop="x", stop_token_ids=[np.int64(4)]) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a.stop == ("x",)
