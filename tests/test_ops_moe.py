"""The router and the experts: selection rules exactly, and both implementations against a loop over experts in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_directions, relative_error, same_bits

from k3jax.ops import moe
from k3jax.ops.act import Activation
from k3jax.ops.mxfp4 import decode_numpy, encode

# Router.

routed = jax.jit(moe.Router.__call__, static_argnums=0, compiler_options=QUICK)


def route(scores, bias=None, ids=None, top=2, groups=1, top_groups=1, renormalise=True, scale=1.0):
    """Ids and weights for given sigmoid scores: x is the logits and the gate is the identity."""
    scores = np.atleast_2d(np.asarray(scores, np.float64))
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    bias = np.zeros(scores.shape[1], np.float32) if bias is None else np.asarray(bias, np.float32)
    router = moe.Router(top, groups, top_groups, renormalise, scale)
    ids, weights = routed(router, logits, np.eye(scores.shape[1], dtype=np.float32), bias, ids)
    assert weights.dtype == jnp.float32
    return np.asarray(ids), np.asarray(weights)


def assert_routed(found, ids, weights):
    """As sets: the order of a token's experts is free."""
    order = np.argsort(found[0], axis=-1)
    assert np.take_along_axis(found[0], order, -1).tolist() == np.atleast_2d(ids).tolist()
    np.testing.assert_allclose(np.take_along_axis(found[1], order, -1), np.atleast_2d(weights), rtol=2e-6)


def test_the_bias_chooses_and_does_not_weigh():
    assert_routed(route([0.2, 0.8, 0.3, 0.7]), [1, 3], [0.8 / 1.5, 0.7 / 1.5])
    assert_routed(route([0.2, 0.8, 0.3, 0.7], bias=[10, 0, 0, 0]), [0, 1], [0.2, 0.8])
    assert_routed(route([0.2, 0.8, 0.3, 0.7], bias=[0, -10, 0, -10]), [0, 2], [0.4, 0.6])


def test_weights_of_given_logits():
    """Logits .2, -1, 1.5, .9 with bias 0, .6, 0, -.3."""
    scores = 1 / (1 + np.exp(-np.array([0.2, -1, 1.5, 0.9])))
    assert_routed(route(scores, bias=[0, 0.6, 0, -0.3]), [1, 2], [0.24752645, 0.75247355])


def test_equal_scores_go_to_the_lowest_index():
    assert route([[0.5] * 6], top=3)[0].tolist() == [[0, 1, 2]]
    assert sorted(route([[0.25, 0.5, 0.5, 0.5]])[0][0]) == [1, 2]
    assert route([[0.5, 0.25, 0.5]], bias=[0, 0.25, 0], top=1)[0].tolist() == [[0]]
    assert route([[0.25, 0.25, 0.5, 0.5, 0.5, 0.5]], top=1, groups=3)[0].tolist() == [[2]]


def test_the_scale_is_on_the_weights():
    assert_routed(route([0.2, 0.8, 0.3, 0.7], scale=2.5), [1, 3], [2.5 * 0.8 / 1.5, 2.5 * 0.7 / 1.5])


def test_without_renormalisation_the_weights_are_the_scaled_scores():
    assert_routed(route([0.2, 0.8, 0.3, 0.7], renormalise=False, scale=1.5), [1, 3], [1.2, 1.05])


def test_a_single_expert_keeps_its_score():
    assert_routed(route([0.2, 0.8, 0.3], top=1, scale=2.5), [1], [2.0])


def test_scores_near_zero_are_renormalised():
    """Sigmoids of 1e-12: the sum of two is far above the 1e-20 that guards it."""
    assert_routed(route([1e-12, 3e-12, 1e-13]), [0, 1], [0.25, 0.75])


def test_group_score_is_the_sum_of_its_two_best_biased_scores():
    # The first group has the best maximum, triple and total, the second the best pair.
    scores = [0.9, 0.1, 0.09, 0.05, 0.55, 0.5, 0.01, 0.02]
    assert_routed(route(scores, groups=2), [4, 5], [0.55 / 1.05, 0.5 / 1.05])
    assert_routed(route(scores, bias=[0, 0.1, 0, 0, 0, 0, 0, 0], groups=2), [0, 1], [0.9, 0.1])


def test_losing_groups_are_excluded_even_where_all_biased_scores_are_negative():
    scores = [0.95, 0.15, 0.7, 0.8, 0.55, 0.05, 0.3, 0.6]
    bias = [-1.5, -2.5, -1.5, -1.5, -1.0, -2.0, -2.0, -2.0]
    assert sorted(route(scores, bias, top=4, groups=4, top_groups=2)[0][0]) == [2, 3, 4, 5]
    assert sorted(route(scores, bias, top=4)[0][0]) == [0, 2, 3, 4]


def test_groups_of_one_expert():
    assert_routed(route([0.2, 0.8, 0.3, 0.7], groups=4, top_groups=2), [1, 3], [0.8 / 1.5, 0.7 / 1.5])


def test_forced_experts_have_their_own_scores():
    found = route([[0.2, 0.8, 0.3, 0.7]] * 2, ids=jnp.array([[0, 2], [3, 1]]))
    assert_routed(found, [[0, 2], [1, 3]], [[0.4, 0.6], [0.8 / 1.5, 0.7 / 1.5]])
    assert found[0].tolist() == [[0, 2], [3, 1]]


@pytest.mark.parametrize("groups, top_groups", [(1, 1), (4, 2)])
def test_a_token_of_nan_keeps_to_itself_and_in_range(groups, top_groups):
    rng = np.random.default_rng(0)
    x, gate, bias = (np.float32(rng.normal(size=shape)) for shape in ((5, 6), (8, 6), 8))
    router = moe.Router(2, groups, top_groups, True, 1.0)
    want = routed(router, x, gate, bias)
    x[2] = np.nan
    got = routed(router, x, gate, bias)
    others = [0, 1, 3, 4]
    assert same_bits(got.ids[others,], want.ids[others,]) and same_bits(got.weights[others,], want.weights[others,])
    assert ((got.ids >= 0) & (got.ids < 8)).all() and len(set(got.ids[2].tolist())) == 2


def test_scores_are_not_rounded_to_bfloat16():
    """Two experts one bfloat16 step of a logit apart, with bfloat16 activations and gate."""
    x = jnp.asarray([[1.0, 2**-9]], jnp.bfloat16)
    gate = jnp.asarray([[2.0, 0.0], [2.0, 1.0], [-1.0, 0.0]], jnp.bfloat16)
    assert moe.Router(1, 1, 1, True, 1.0)(x, gate, jnp.zeros(3)).ids.tolist() == [[1]]
    weights = moe.Router(2, 1, 1, False, 1.0)(x, gate, jnp.zeros(3)).weights
    np.testing.assert_allclose(sorted(weights[0]), 1 / (1 + np.exp(-np.array([2, 2 + 2**-9]))), rtol=2e-7)


# Experts.

E, TOP, L, F = 7, 3, 32, 64  # multiples of 32, so that they can be packed
SITU = Activation("situ", 4.0, 25.0)
SILU = Activation("silu", 4.0, 25.0)


def weights(packed=False, seed=0):
    """Stacked w1, w3, w2 as the op takes them, and the same in float64."""
    rng = np.random.default_rng(seed)
    dense = [rng.normal(size=shape) * shape[-1] ** -0.5 for shape in ((E, F, L), (E, F, L), (E, L, F))]
    if not packed:
        return [jnp.float32(w) for w in dense], [np.float64(np.float32(w)) for w in dense]
    codes = [moe.Packed(*map(jnp.asarray, encode(w))) for w in dense]
    return codes, [decode_numpy(np.asarray(w.codes), np.asarray(w.scales), np.float64) for w in codes]


def oracle(z, ids, weight, w1, w3, w2, kind):
    """A loop over tokens and their experts in float64."""
    z, weight, y = np.asarray(z, np.float64), np.asarray(weight, np.float64), np.zeros(z.shape)
    for t in range(len(z)):
        for e, share in zip(np.asarray(ids[t]), weight[t], strict=True):
            a, u = w1[e] @ z[t], w3[e] @ z[t]
            gate = (4 * np.tanh(a / 4) if kind == "situ" else a) / (1 + np.exp(-a))
            y[t] += share * (w2[e] @ (gate * (25 * np.tanh(u / 25) if kind == "situ" else u)))
    return y


@partial(jax.jit, static_argnames=("act", "impl"), compiler_options=QUICK)
def run(z, ids, weight, matrices, act, impl):
    return moe.experts(z, moe.Routing(ids, weight), *matrices, act, impl)


def routing(name, tokens, seed=0):
    """Distinct experts of each token, and weights; `uneven` leaves expert 2 empty, `same` sends all tokens to three."""
    rng = np.random.default_rng(seed)
    allowed = {"free": range(E), "uneven": [0, 1, 3, 4, 5, 6], "same": [4, 6, 1]}[name]
    ids = np.stack([rng.permutation(allowed)[:TOP] for _ in range(tokens)]).astype(np.int32)
    return ids, rng.uniform(0.1, 1, size=(tokens, TOP)).astype(np.float32)


CASES = [(tokens, name) for tokens in (1, 2, 13) for name in ("free", "uneven", "same")] + [
    (150, "same"),
    (150, "free"),
]


@pytest.mark.parametrize("impl", ["dense", "grouped"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens, name", CASES)
def test_experts_equal_a_loop_over_experts(impl, packed, tokens, name):
    """One token, fewer assignments than experts, empty experts, all tokens at the same ones, more than a tile holds."""
    z = np.random.default_rng(1).normal(size=(tokens, L)).astype(np.float32)
    matrices, exact = weights(packed)
    got = run(z, *routing(name, tokens), matrices, SITU, impl)
    assert relative_error(got, oracle(z, *routing(name, tokens), *exact, "situ")) < 5e-7


@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_silu_experts(impl):
    z = np.random.default_rng(1).normal(size=(13, L)).astype(np.float32)
    matrices, exact = weights()
    got = run(z, *routing("free", 13), matrices, SILU, impl)
    assert relative_error(got, oracle(z, *routing("free", 13), *exact, "silu")) < 5e-7


@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_an_expert_of_nan_reaches_only_its_tokens(impl):
    z = np.random.default_rng(1).normal(size=(13, L)).astype(np.float32)
    matrices, (ids, weight) = weights()[0], routing("free", 13)
    want = run(z, ids, weight, matrices, SITU, impl)
    got = run(z, ids, weight, [w.at[2].set(jnp.nan) for w in matrices], SITU, impl)
    hit = (ids == 2).any(-1)
    assert 0 < hit.sum() < 13 and np.isnan(got[hit]).all() and same_bits(got[~hit], want[~hit])


@pytest.mark.parametrize("impl", ["dense", "grouped"])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_a_bad_token_does_not_reach_others(impl, poison):
    """B36, pytorch#193633: padding may hold anything, weights included."""
    z = np.random.default_rng(1).normal(size=(13, L)).astype(np.float32)
    matrices, (ids, weight) = weights()[0], routing("uneven", 13)
    want = run(z, ids, weight, matrices, SITU, impl)
    z[[4, 12]], weight[[4, 12]] = poison, np.nan
    got, good = run(z, ids, weight, matrices, SITU, impl), np.delete(np.arange(13), [4, 12])
    assert same_bits(got[good], want[good])


@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_bfloat16_rounding_points(impl):
    """gate, up, their product and the expert's output are rounded; the weighted sum is float32 until its end."""
    ids, weight = routing("free", 13)
    z = jnp.asarray(np.random.default_rng(1).normal(size=(13, L)), jnp.bfloat16)
    w1, w3, w2 = (w.astype(jnp.bfloat16) for w in weights()[0])
    got = run(z, ids, weight, [w1, w3, w2], SITU, impl)

    def bf(a):
        return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)

    wide, want = [np.asarray(w, np.float64) for w in (w1, w3, w2)], np.zeros((13, L))
    for t in range(13):
        for e, share in zip(ids[t], weight[t], strict=True):
            a, u = (bf(w[e] @ np.asarray(z[t], np.float64)) for w in wide[:2])
            want[t] += share * bf(wide[2][e] @ bf(4 * np.tanh(a / 4) / (1 + np.exp(-a)) * 25 * np.tanh(u / 25)))
    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got, np.float64) != bf(want)).mean() < 0.01, "float32 sums may round a near tie the other way"


@pytest.mark.parametrize("impl", ["dense", "grouped"])
def test_gradients(impl):
    """For the latents, the weights and all three matrices, with an empty expert, whose gradient is zero."""
    tokens, matrices = 9, weights()[0]
    ids, weight = routing("uneven", tokens)
    z, seen = (np.random.default_rng(i).normal(size=(tokens, L)) for i in (1, 2))

    def loss(z, weight, *matrices):
        return (moe.experts(z, moe.Routing(ids, weight), *matrices, SITU, impl) * seen).sum()

    arguments = (np.float32(z), weight, *matrices)
    found = jax.jit(jax.grad(loss, argnums=range(5)), compiler_options=QUICK)(*arguments)
    assert_directions(lambda z, weight, *w: (oracle(z, ids, weight, *w, "situ") * seen).sum(), arguments, found, 1e-5)
    assert not any(np.asarray(g[2]).any() for g in found[2:])


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="kernels.moe='sparse'"):
        run(np.zeros((1, L), np.float32), *routing("free", 1), weights()[0], SITU, "sparse")
