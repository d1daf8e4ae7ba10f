"""Kimi Delta Attention: every implementation against a float64 recurrence, its gates, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import QUICK, assert_directions, lengths_batch, relative_error, same_bits, small

from k3jax import batch as batches
from k3jax.batch import prepare, single
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.layers.kda import KDA
from k3jax.layers.param import Maker
from k3jax.ops import kda

# Around 1, the sub-block of 16 and the chunk of 64; empty rows between. The lengths leave padding behind the last row.
LENGTHS = (1, 2, 3, 0, 15, 16, 17, 63, 0, 0, 64, 65, 200)
TOKENS = 460
H = 3
WIDE = 24  # value channels where the 16 key channels must not be confused with them


# The oracle, written from the equations alone: one token, one head and one row at a time would be the same.


def oracle(S_BHKV, x, lengths):
    """float64 states [B, H, K, V] and outputs [T, H, V] of packed rows."""
    q, k, v, g, beta = (np.asarray(a, np.float64) for a in x)
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    S_BHKV, o, ends = np.array(S_BHKV, np.float64), np.zeros(v.shape), np.cumsum(lengths)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        S = S_BHKV[row]
        for t in range(end - length, end):
            S = np.exp(g[t])[..., None] * S
            u = beta[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], S))
            S = S + k[t][..., None] * u[:, None]
            o[t] = q.shape[-1] ** -0.5 * np.einsum("hk,hkv->hv", q[t], S)
        S_BHKV[row] = S
    return S_BHKV, o


# The implementations, all as (S_BHVK, inputs, lengths) -> (S_BHVK, o).


def prefill(impl, **options):
    compiled = jax.jit(lambda S, x, batch: kda.prefill(S, x, prepare(batch, 0, 8, 4).prefill, impl), **options)
    return lambda S, x, lengths: compiled(S, x, lengths_batch(lengths, len(x.q)))


def by_row(x, lengths):
    """[T, ...] to [B, longest, ...]; what is past a row's end has beta 0 and decay 1, which changes no state."""
    ends = np.cumsum(lengths)
    rows = [[np.asarray(a)[end - n : end] for a in x] for end, n in zip(ends, lengths, strict=True)]
    filled = [[np.pad(a, [(0, max(lengths) - len(a)), *[(0, 0)] * (a.ndim - 1)]) for a in row] for row in rows]
    return kda.Inputs(*map(np.stack, zip(*filled, strict=True)))


def packed_again(o, lengths, tokens):
    o = np.concatenate([o[row, :n] for row, n in enumerate(lengths)])
    return np.pad(o, [(0, tokens - len(o)), (0, 0), (0, 0)])


plain_rows, one_step = jax.jit(jax.vmap(kda.plain)), jax.jit(kda.step)


def plain(S, x, lengths):
    S, o = plain_rows(S, by_row(x, lengths))
    return S, packed_again(np.asarray(o), lengths, len(x.q))


def steps(S, x, lengths):
    """One call a token for all rows, as in decoding."""
    by_token = [kda.Inputs(*(a[:, t] for a in by_row(x, lengths))) for t in range(max(lengths))]
    o = []
    for token in by_token:
        S, o_t = one_step(S, token)
        o.append(o_t)
    return S, packed_again(np.stack(o, 1), lengths, len(x.q))


IMPLS = {"plain": plain, "step": steps, "scan": prefill("scan"), "chunk": prefill("chunk")}
QUICK_IMPLS = {impl: prefill(impl, compiler_options=QUICK) for impl in ("scan", "chunk")}


# The inputs.


def local_index(lengths, tokens):
    """Index of each token in its row."""
    index = np.concatenate([np.arange(n) for n in lengths])
    return np.pad(index, (0, tokens - len(index)))


def mixture(*values):
    return lambda rng, local, K: rng.choice(values, size=(len(local), H, K))


def constant(value):
    return lambda rng, local, K: np.full((len(local), H, K), value)


def where_local(chosen, inside, outside):
    """One gate for the tokens whose index in the row is chosen, another for the rest."""
    return lambda rng, local, K: np.where(chosen(local)[:, None, None], inside, outside) * np.ones((len(local), H, K))


GATES = {
    "0": constant(0.0),
    "-1e-6": constant(-1e-6),
    "-2.5": constant(-2.5),
    "-4.99": constant(-4.99),
    "-5": constant(-5.0),
    "-30": constant(-30.0),
    "spread": lambda rng, local, K: -5 * rng.uniform(size=(len(local), H, K)) ** 4,
    "0 or -5": mixture(0.0, -5.0),
    "-1e-3 or -5": mixture(-1e-3, -5.0),
    "-1e-3 or -30": mixture(-1e-3, -30.0),
    "-5 first in each chunk": where_local(lambda i: i % 64 == 0, -5.0, -1e-4),
    "0 on tokens 3 to 9": where_local(lambda i: (i >= 3) & (i <= 9), 0.0, -1.5),
}


def keys(rng, tokens, K, correlation):
    common = np.sqrt(correlation) * rng.normal(size=(1, H, K))
    return common + np.sqrt(1 - correlation) * rng.normal(size=(tokens, H, K))


def inputs(gate="spread", correlation=0.0, beta=None, K=16, V=WIDE, lengths=LENGTHS, tokens=TOKENS, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(tokens, H, K)), keys(rng, tokens, K, correlation), rng.normal(size=(tokens, H, V))
    g = GATES[gate](rng, local_index(lengths, tokens), K)
    beta = np.full((tokens, H), beta) if beta else rng.uniform(0.05, 0.95, size=(tokens, H))
    return kda.Inputs(*(np.asarray(a, np.float32) for a in (q, k, v, g, beta)))


def states(size, lengths=LENGTHS, K=16, V=WIDE):
    return (size * np.random.default_rng(1).normal(size=(len(lengths), H, V, K))).astype(np.float32)


def errors(impl, S, x, lengths=LENGTHS):
    """The largest relative error (norms) of any row's outputs and of any row's state."""
    want_S, want_o = oracle(np.swapaxes(S, -1, -2), x, lengths)
    got_S, got_o = impl(S, x, lengths)
    ends = np.cumsum(lengths)
    of_o = [relative_error(got_o[end - n : end], want_o[end - n : end]) for end, n in zip(ends, lengths, strict=True)]
    of_S = [relative_error(np.swapaxes(got, -1, -2), want) for got, want in zip(got_S, want_S, strict=True)]
    return max(of_o), max(of_S)


# Values. In float32 the recurrence was seen within 2.6e-6 (identical keys, beta 1, decays near 1) and mostly within 3e-7.
# The chunk takes decays from differences of sums over 16 tokens: with -1e-3 among gates of -30, which only a gate without a
# bound reaches, these are rounded by 3e-5, and so are the small decays (seen: 1.4e-5). Nothing else loses more than 2.2e-6.
# Among gates of -5 that is 1.1e-6; sums over the whole chunk would lose 3e-6.
BOUND = 4e-6
CHUNK_BOUND = {"-1e-3 or -5": 2e-6, "-1e-3 or -30": 2.5e-5}

CASES = [(gate, *keys_beta, 1.0) for gate in GATES for keys_beta in ((0.0, None), (1.0, 1.0))]
CASES += [(gate, *keys_beta, 1.0) for gate in ("0", "-1e-6", "spread") for keys_beta in ((0.5, None), (0.9, 0.999))]
CASES += [(gate, 0.0, None, size) for gate in ("0", "spread") for size in (0.0, 7e4)]


@pytest.mark.parametrize("impl", ["plain", "scan", "chunk"])
@pytest.mark.parametrize("gate, correlation, beta, size", CASES)
def test_packed_rows_equal_the_recurrence(impl, gate, correlation, beta, size):
    """Keys: independent, correlated, or one unit key for all with beta 1, where inverting by powers loses everything."""
    bound = CHUNK_BOUND.get(gate, BOUND) if impl == "chunk" else BOUND
    assert max(errors(IMPLS[impl], states(size), inputs(gate, correlation, beta))) < bound


def test_steps_equal_the_recurrence():
    lengths = (1, 0, 17, 65)
    x = inputs("-1e-6", 0.9, lengths=lengths, tokens=sum(lengths))
    assert max(errors(steps, states(1.0, lengths), x, lengths)) < BOUND


@pytest.mark.parametrize("impl", ["scan", "chunk"])
@pytest.mark.parametrize("gate", ["spread", "-5"])
def test_as_many_value_as_key_channels(impl, gate):
    lengths = (65, 0, 17)
    x = inputs(gate, 0.5, K=32, V=32, lengths=lengths, tokens=90)
    assert max(errors(QUICK_IMPLS[impl], states(1.0, lengths, 32, 32), x, lengths)) < BOUND


# Lengths that decide how many tokens a tile has (16, 32, 48 or 64), alone and without padding, and rows of few tokens.
SHAPES = [(1,), (17,), (64,), (1000,), (1, 1, 37, 1), (0, 5, 0, 1, 0)]


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_any_number_of_tokens(lengths):
    """B29, vllm#50649: rows of one token with a state, beside a longer one, through the chunk form."""
    tokens = sum(lengths)
    x = inputs("spread", 0.9, lengths=lengths, tokens=tokens)
    assert max(errors(QUICK_IMPLS["chunk"], states(1.0, lengths), x, lengths)) < BOUND


@pytest.mark.parametrize("impl", ["scan", "chunk"])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_padding_and_empty_rows_touch_nothing(impl, poison):
    x, S = inputs(), states(1.0)
    empty, end = np.array(LENGTHS) == 0, sum(LENGTHS)
    clean_S, clean_o = IMPLS[impl](S, x, LENGTHS)
    bad_x, bad_S = kda.Inputs(*map(np.copy, x)), S.copy()
    for a in bad_x:
        a[end:] = poison
    bad_S[empty] = poison
    got_S, got_o = IMPLS[impl](bad_S, bad_x, LENGTHS)
    assert same_bits(got_o[:end], clean_o[:end]) and not np.asarray(got_o[end:]).any()
    assert same_bits(got_S[~empty], clean_S[~empty]) and same_bits(got_S[empty], bad_S[empty])


def test_a_row_of_one_tile_does_not_see_its_neighbours():
    """NaN in the tokens and the state of one row stays there."""
    x, S = kda.Inputs(*map(np.copy, inputs())), states(1.0)
    want_S, want_o = IMPLS["chunk"](S, x, LENGTHS)
    row, start = 6, sum(LENGTHS[:6])
    tokens = np.arange(TOKENS)
    outside = (tokens < start) | (tokens >= start + LENGTHS[row])
    for a in x:
        a[~outside] = np.nan
    S[row] = np.nan
    got_S, got_o = IMPLS["chunk"](S, x, LENGTHS)
    assert same_bits(got_o[outside], want_o[outside]) and np.isnan(got_o[~outside]).all()
    assert same_bits(np.delete(got_S, row, 0), np.delete(want_S, row, 0))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="kernels.kda='doubling'"):
        prefill("doubling")(states(1.0), inputs(), LENGTHS)


# Gates.


def exact_log_decay(f, A_log, dt_bias, bound):
    f, A_log, dt_bias = (np.asarray(a, np.float64) for a in (f, A_log, dt_bias))
    z, rate = f + dt_bias, np.exp(A_log)[:, None]
    return -rate * np.logaddexp(0, z) if bound is None else bound * np.exp(-np.logaddexp(0, -rate * z))


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_decay(bound, dtype):
    """Every element, from gates that are off to gates that saturate; a rate for each head, a bias for each channel."""
    rng = np.random.default_rng(0)
    f = jnp.asarray(rng.uniform(-12, 12, size=(50, H, 7)), dtype)
    A_log, dt_bias = np.float32([-3, 0.5, 2]), rng.normal(size=(H, 7)).astype(np.float32)
    got = kda.log_decay(f, A_log, dt_bias, bound)
    assert got.dtype == jnp.float32 and (got <= 0).all() and (bound is None or (got >= bound).all())
    np.testing.assert_allclose(got, exact_log_decay(f, A_log, dt_bias, bound), rtol=3e-5, atol=1e-37)


def test_the_tail_of_softplus_is_not_zero():
    """log(1 + exp(-18)) is 0 in float32; at A_log 12 the decay it loses is 0.0025."""
    f, A_log = np.float32([[[-18.0]], [[-40.0]], [[-80.0]]]), np.float32([12.0])
    got = kda.log_decay(f, A_log, np.zeros((1, 1), np.float32), None)
    np.testing.assert_allclose(got, -np.exp(12 + f.astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_saturated_gates_have_finite_gradients(bound):
    f = jnp.float32([[[50.0, -50.0]]])
    value, gradients = jax.value_and_grad(lambda *a: kda.log_decay(*a, bound).sum(), argnums=(0, 1, 2))(
        f, jnp.float32([60.0 if bound else 3.0]), jnp.zeros((1, 2))
    )
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)
    if bound:
        assert value == -5 and not any(np.asarray(g).any() for g in gradients)


def test_gradients_of_the_gates():
    """Against differences in float64, for the projection, the rate and the bias."""
    rng = np.random.default_rng(0)
    f, A_log, dt_bias = rng.normal(size=(9, H, 5)), rng.normal(size=H), rng.normal(size=(H, 5))
    w = rng.normal(size=f.shape)
    for bound in (-5.0, None):
        arguments = [np.float32(a) for a in (f, A_log, dt_bias)]
        gradients = jax.grad(lambda *a, bound=bound: (kda.log_decay(*a, bound) * w).sum(), argnums=(0, 1, 2))(
            *arguments
        )
        assert_directions(lambda *a, bound=bound: (exact_log_decay(*a, bound) * w).sum(), arguments, gradients, 1e-6)


def test_the_epsilon_of_unit_length():
    """Added to the sum of squares, inside the root: at 1e-3 a mean or a maximum would give something else."""
    x = np.float32(np.random.default_rng(0).normal(size=(5, 16)) * np.array([[1e-6], [1e-4], [1e-3], [1], [1e3]]))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(kda.l2_normalise(x), wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-6)
    zero, slope = jax.value_and_grad(lambda x: kda.l2_normalise(x).sum())(jnp.zeros(16))
    assert zero == 0
    np.testing.assert_allclose(slope, 1e3, rtol=1e-6)


def test_unit_length_is_float32_whatever_comes_in():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.bfloat16)
    got = kda.l2_normalise(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), 1, rtol=1e-6)


def test_beta_and_decay_stay_float32_in_a_bfloat16_layer():
    """beta of 0.5 is 0.62245935; rounded to bfloat16 it would be 0.62109375, an error of 0.2% in every write."""
    config = small(gate_lower_bound=-5.0)
    layer = nnx.eval_shape(lambda: KDA(Maker(jnp.dtype("bfloat16"), nnx.Rngs(0)), config))
    layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layer)
    layer.b_proj.weight[...] = layer.b_proj.weight[...].at[:, 0].set(0.5)
    layer.A_log[...], layer.dt_bias[...] = jnp.full(3, 0.3), jnp.full(12, 0.2)

    @jax.jit
    def sites(layer, x):
        seen = {}
        layer(
            x,
            None,
            prepare(single(jnp.zeros(1, jnp.int32), 1), 0, 8, 4),
            Context(Kernels(kda="scan")),
            lambda site, a: seen.setdefault(site, a),
        )
        return seen

    seen = sites(layer, jnp.zeros((1, config.hidden_size), jnp.bfloat16).at[0, 0].set(1))
    assert seen["kda_beta"].dtype == seen["kda_log_decay"].dtype == seen["kda_core"].dtype == jnp.float32
    np.testing.assert_allclose(seen["kda_beta"], 0.6224593312018546, rtol=1e-7)
    np.testing.assert_allclose(seen["kda_log_decay"], -5 / (1 + np.exp(-0.2 * np.exp(0.3))), rtol=3e-7)


# Gradients of the recurrence.

GRAD_LENGTHS = (1, 15, 0, 16, 17, 40)
GRAD_TOKENS = 92


def weighted(S, o):
    """A loss that sees every real output and every state."""
    rng = np.random.default_rng(5)
    seen_S = rng.normal(size=S.shape) * (np.array(GRAD_LENGTHS) > 0)[:, None, None, None]
    return (S * seen_S).sum() + (o * rng.normal(size=o.shape)).sum()


def exact_loss(S, *x):
    S, o = oracle(np.swapaxes(S, -1, -2), x, GRAD_LENGTHS)
    return weighted(np.swapaxes(S, -1, -2), o)


@pytest.fixture(scope="module")
def gradients():
    """Gradients of both packed forms; tiles of 32, so that rows span tiles and tiles span sub-blocks."""
    sizes, batches.TILE, batches._TILE_MULTIPLE = (batches.TILE, batches._TILE_MULTIPLE), 32, 32
    step = jax.jit(lambda batch: prepare(batch, 0, 8, 4))(lengths_batch(GRAD_LENGTHS, GRAD_TOKENS))
    batches.TILE, batches._TILE_MULTIPLE = sizes
    assert step.prefill.tile_token.shape[1] == 32

    def loss(impl):
        return lambda S, *x: weighted(*kda.prefill(S, kda.Inputs(*x), step.prefill, impl))

    return {impl: jax.jit(jax.grad(loss(impl), argnums=range(6)), compiler_options=QUICK) for impl in ("scan", "chunk")}


@pytest.mark.parametrize("gate, correlation", [("spread", 0.0), ("0", 0.9), ("-5", 0.5), ("0 or -5", 0.5)])
def test_gradients(gradients, gate, correlation):
    """Both forms against differences in float64, for the state and all inputs, and against each other."""
    x = inputs(gate, correlation, lengths=GRAD_LENGTHS, tokens=GRAD_TOKENS)
    arguments = [states(1.0, GRAD_LENGTHS), *x]
    found = {impl: gradient(*arguments) for impl, gradient in gradients.items()}
    for impl in found:
        assert_directions(exact_loss, arguments, found[impl], 1e-5)
        assert not any(np.asarray(g[sum(GRAD_LENGTHS) :]).any() for g in found[impl][1:]), "padding has no gradient"
    assert max(map(relative_error, found["chunk"], found["scan"])) < 1e-5
