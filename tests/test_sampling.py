"""The draw: laws of what is kept, of randomness and of rows."""

import jax
import numpy as np
import pytest

from k3jax.sampling import SamplingParams, by_row, sample

VOCAB = 12
draw = jax.jit(sample)


def tokens(logits, params, positions):
    rows = len(params)
    return np.asarray(
        draw(
            np.broadcast_to(logits, (rows, VOCAB)).astype(np.float32),
            np.asarray(positions, np.int32),
            by_row(params, (), rows),
        )
    )


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=VOCAB) * 2


def many(logits, **settings):
    """4,096 draws of one request's distribution, by seed."""
    params = [SamplingParams(seed=seed, **settings) for seed in range(4096)]
    return tokens(logits, params, np.full(4096, 7))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(logits, temperature):
    counts = np.bincount(many(logits, temperature=temperature), minlength=VOCAB)
    expected = 4096 * softmax(logits / temperature)
    # 11 degrees of freedom: 31.3 is passed by one sample in a thousand; the seeds are fixed.
    assert (((counts - expected) ** 2) / expected).sum() < 31.3


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
    assert set(many(logits, top_p=1e-6)) == {0}
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
    assert by_row([SamplingParams()], (), 1).seed.tolist() != by_row([SamplingParams()], (), 1).seed.tolist()


def test_stop_ids_are_the_models_and_the_users():
    params = [SamplingParams(stop_token_ids=[9]), SamplingParams(stop_token_ids=[9], ignore_eos=True), SamplingParams()]
    table = by_row(params, (4, 6), 4).stop_ids
    assert [set(row) - {-1} for row in table.tolist()] == [{4, 6, 9}, {9}, {4, 6}, set()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("max_tokens", 0), ("max_tokens", 2.0),
        ("max_tokens", True), ("seed", -1), ("seed", 2**63), ("seed", 1.0), ("stop_token_ids", (-1,)), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*allowed is"):
        SamplingParams(**{field: value})


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="min_q"):
        SamplingParams(min_q=0.1)
