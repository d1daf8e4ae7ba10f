"""Activations, norms, products, the mixture over depth and pools, against float64 and at their bfloat16 rounding points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import QUICK, assert_close, relative_error, same_bits

from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.layers.mlp import MLP
from k3jax.layers.param import Maker
from k3jax.ops import attnres
from k3jax.ops.act import Activation
from k3jax.ops.linear import einsum, gated_rms_norm, linear, rms_norm
from k3jax.ops.pool import MANY, after, filled, put

SITU = Activation("situ", 4.0, 25.0)
mix = jax.jit(attnres.mix, compiler_options=QUICK)


def bf16(a):
    """The nearest bfloat16 values, as float64."""
    return np.asarray(jnp.asarray(np.float32(a), jnp.bfloat16), np.float64)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Activations.


def test_situ_values():
    gate, up = jnp.float32([1, -2, 10, 0.5]), jnp.float32([1, 3, -40, 0.25])
    want = np.array([0.71581783, -0.65787382, -90.92900922, 0.07740211])
    np.testing.assert_allclose(SITU(gate, up), want, rtol=3e-7)


def test_both_branches_of_situ_are_limited():
    """Gate 100 and up 1000 give 4 * 25; a limit on the gate alone would give 4000."""
    assert_close(SITU(jnp.float32([100, 100, -100]), jnp.float32([1000, -1000, 1000])), [100, -100, 0], 1e-5)


def test_the_sigmoid_of_situ_sees_the_raw_gate():
    """Of the limited gate it would be 0.98201 at most."""
    assert_close(SITU(jnp.float32([30.0]), jnp.float32([25 * np.arctanh(0.5)])), [50.0], 1e-4)
    assert abs(float(SITU(jnp.float32([-30.0]), jnp.float32([1000.0]))[0])) < 1e-10


@pytest.mark.parametrize("kind", ["situ", "silu"])
def test_activation_equals_float64(kind):
    a, u = 8 * normal(1000), 40 * normal(1000, seed=1)
    gate, up = np.float64(a), np.float64(u)
    want = gate / (1 + np.exp(-gate)) * up
    if kind == "situ":
        want = 0.7 * np.tanh(gate / 0.7) / (1 + np.exp(-gate)) * 1.3 * np.tanh(up / 1.3)
    assert relative_error(Activation(kind, 0.7, 1.3)(a, u), want) < 2e-7


def test_activations_are_rounded_once():
    """float32 inside: the result in bfloat16 is the nearest to the exact one."""
    a, u = (jnp.asarray(8 * normal(1000, seed=i), jnp.bfloat16) for i in (0, 1))
    gate, up = np.asarray(a, np.float64), np.asarray(u, np.float64)
    exact = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    assert SITU(a, u).dtype == jnp.bfloat16
    assert (np.asarray(SITU(a, u), np.float64) != bf16(exact)).mean() < 0.002


@pytest.mark.parametrize("gate, up", [(100.0, 1000.0), (-100.0, 1000.0), (0.0, 0.0)])
def test_saturated_activations_have_finite_gradients(gate, up):
    slopes = jax.grad(lambda a, u: SITU(a, u), argnums=(0, 1))(jnp.float32(gate), jnp.float32(up))
    assert all(np.isfinite(slopes))


# Norms.


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(eps):
    """The epsilon is added to the mean: at a mean square of 1e-6 it halves the result or worse."""
    x = normal(6, 48) * np.float32([[1e-4], [1e-3], [1e-2], [1], [1e3], [0]])
    weight, wide = 1 + 0.3 * normal(48, seed=1), np.float64(x)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(rms_norm(x, weight, eps), want, rtol=1e-6, atol=1e-30)


def test_the_gain_of_a_norm_is_multiplied_after_the_rounding():
    """y is rounded to bfloat16, and its product with the gain again, as the release does."""
    x, weight = jnp.asarray(normal(50, 64), jnp.bfloat16), jnp.asarray(1 + 0.3 * normal(64, seed=1), jnp.bfloat16)
    wide, gain = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    y = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    got = np.asarray(rms_norm(x, weight, 1e-5), np.float64)
    assert (got != bf16(gain * bf16(y))).mean() < 0.003
    assert (got != bf16(gain * y)).mean() > 0.1, "these inputs tell the two apart"


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_gated_norm(eps):
    """Norm, then gain, then sigmoid of the gate."""
    o, gate, weight = normal(5, 3, 16) * np.float32(1e-2), normal(5, 3, 16, seed=1), 1 + 0.3 * normal(16, seed=2)
    wide = np.float64(o)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight / (1 + np.exp(-np.float64(gate)))
    assert relative_error(gated_rms_norm(o, gate, weight, eps), want) < 2e-7


def test_gated_norm_of_a_printed_case():
    o, gate, weight = np.float32([[1.10236873, -0.63863816]]), np.float32([[0.3, -0.7]]), np.float32([1.1, 0.9])
    assert_close(gated_rms_norm(o, gate, weight, 1e-5), [[0.77323073, -0.21170578]], 2e-7)


def test_gated_norm_is_rounded_once():
    """The gain is float32, as the release stores it, and nothing is rounded before the end."""
    o, gate = (jnp.asarray(normal(50, 64, seed=i), jnp.bfloat16) for i in (0, 1))
    weight, wide = 1 + 0.3 * normal(64, seed=2), np.asarray(o, np.float64)
    y = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight / (1 + np.exp(-np.asarray(gate, np.float64)))
    assert (np.asarray(gated_rms_norm(o, gate, weight, 1e-5), np.float64) != bf16(y)).mean() < 0.003


# Products.


def test_products_of_float32_are_float32():
    x, weight = normal(64, 96), normal(40, 96, seed=1)
    assert relative_error(linear(x, weight), np.float64(x) @ np.float64(weight).T) < 5e-7


def test_products_of_bfloat16_are_summed_in_float32():
    """4096 ones and a half: a bfloat16 sum would stop at 256."""
    x, weight = jnp.ones((1, 4096), jnp.bfloat16), jnp.full((1, 4096), 1.0, jnp.bfloat16).at[0, 0].set(1.5)
    assert linear(x, weight).dtype == jnp.bfloat16 and linear(x, weight)[0, 0] == 4096
    assert einsum("ti,oi->to", x, weight).dtype == jnp.float32 and einsum("ti,oi->to", x, weight)[0, 0] == 4096.5


# The mixture over depth.


def exact_mix(sources, norm, query, eps):
    sources, norm, query = (np.float64(a) for a in (sources, norm, query))
    normed = sources / np.sqrt((sources**2).mean(-1, keepdims=True) + eps) * norm
    score = (normed @ query[0]).T
    pi = np.exp(score - score.max(-1, keepdims=True))
    pi = pi / pi.sum(-1, keepdims=True)
    return np.einsum("tr,rtd->td", pi, sources), pi


def test_depth_mixture_of_a_printed_case():
    sources = [jnp.float32([s]) for s in ([1, 2, -1], [0.5, 0, 0.25], [-2, 1, 3])]
    mixed, pi = mix(sources, jnp.float32([1, 0.5, 2]), jnp.float32([[0.2, -0.4, 0.1]]), 1e-5)
    assert_close(pi, [[0.22528745, 0.47577965, 0.29893290]], 1e-7)
    assert_close(mixed, [[-0.13468853, 0.74950780, 0.79045617]], 2e-7)


@pytest.mark.parametrize("R", [1, 2, 9])
def test_depth_mixture(R):
    """Sources of very different sizes, one so small that the epsilon decides its score."""
    sizes = np.float32([1, 1e-3, 30, 1, 1, 1, 1e3, 1, 0])[:R, None, None]
    sources = normal(R, 5, 48) * sizes
    norm, query = 1 + 0.3 * normal(48, seed=1), normal(1, 48, seed=2)
    mixed, pi = mix(list(sources), norm, query, 1e-5)
    want_mixed, want_pi = exact_mix(sources, norm, query, 1e-5)
    assert pi.dtype == jnp.float32 and pi.shape == (5, R)
    assert relative_error(pi, want_pi) < 2e-6 and relative_error(mixed, want_mixed) < 2e-6


def test_a_query_of_zero_weighs_all_sources_alike():
    sources = normal(4, 5, 48)
    mixed, pi = mix(list(sources), normal(48), np.zeros((1, 48), np.float32), 1e-5)
    assert (np.asarray(pi) == 0.25).all()
    assert_close(mixed, sources.mean(0), 1e-6)


def test_the_mixture_is_of_the_sources_as_they_are():
    """Doubling all sources and no epsilon: the weights stay and the mixture doubles. The gain touches scores alone."""
    sources, norm, query = normal(3, 5, 48), 1 + 0.3 * normal(48, seed=1), normal(1, 48, seed=2)
    mixed, pi = mix(list(sources), norm, query, 1e-30)
    doubled, pi_doubled = mix(list(2 * sources), norm, query, 1e-30)
    assert_close(pi_doubled, pi, 1e-6)
    assert_close(doubled, 2 * mixed, 1e-5)
    folded = mix(list(sources), np.ones_like(norm), norm * query, 1e-30)
    assert_close(folded[0], mixed, 1e-6)


def test_a_mixture_of_bfloat16_is_rounded_once():
    """Gain and query are multiplied in float32, scores and weights too: only the mixture is rounded."""
    sources = [jnp.asarray(s, jnp.bfloat16) for s in normal(4, 50, 64)]
    norm, query = (jnp.asarray(a, jnp.bfloat16) for a in (1 + 0.3 * normal(64, seed=1), normal(1, 64, seed=2)))
    mixed, pi = mix(sources, norm, query, 1e-5)
    want_mixed, want_pi = exact_mix(*(np.asarray(a, np.float64) for a in (jnp.stack(sources), norm, query)), 1e-5)
    assert mixed.dtype == jnp.bfloat16 and pi.dtype == jnp.float32
    assert relative_error(pi, want_pi) < 1e-6
    assert (np.asarray(mixed, np.float64) != bf16(want_mixed)).mean() < 0.003


# The MLP that dense layers and shared experts are.


def test_the_mlp_applies_both_limits():
    """Hidden channels of gate 100 and up 1000, summed by the down matrix."""
    mlp = nnx.eval_shape(lambda: MLP(Maker(jnp.dtype("float32"), nnx.Rngs(0)), 2, 3, SITU))
    mlp.gate_proj.weight.set_value(jnp.float32([[100, 0]] * 3))
    mlp.up_proj.weight.set_value(jnp.float32([[1000, 0]] * 3))
    mlp.down_proj.weight.set_value(jnp.float32([[1, 1, 1], [0, 1, 0]]))
    assert_close(mlp(jnp.float32([[1, 7]]), Context(Kernels())), [[300, 100]], 1e-3)


def test_defaults_of_the_limits_are_k3s():
    assert (K3Config.k3().activation_situ_beta, K3Config.k3().activation_situ_linear_beta) == (4.0, 25.0)


# Pools.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_writing_into_a_pool(dtype):
    """Bits as they are, NaN's too; what lies outside is dropped."""
    rng = np.random.default_rng(0)
    itemsize = jnp.dtype(dtype).itemsize
    pool, values = (rng.integers(0, 256, (n, 3, itemsize), np.uint8).view(jnp.dtype(dtype))[..., 0] for n in (5, 4))
    got = jax.jit(put)(pool, jnp.array([3, 0, 2**31 - 1, 7]), values)
    assert same_bits(got[3], values[0]) and same_bits(got[0], values[1])
    assert all(same_bits(got[i], pool[i]) for i in (1, 2, 4))


def test_an_index_that_waits_is_the_same():
    """Whatever the arrays hold that it waits for."""
    index, bits = jnp.array([0, 5, 2**31 - 1]), (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x7FC00000)
    for n in bits:
        pool = jax.lax.bitcast_convert_type(jnp.full((2, 2), n, jnp.uint32), jnp.float32)
        small = jnp.full(3, n % 2**16, jnp.uint16).view(jnp.bfloat16)
        np.testing.assert_array_equal(jax.jit(after)(index, pool, small, jnp.int32(n % 2**31)), index)


@pytest.mark.parametrize("tokens", [1, MANY - 1, MANY, 3 * MANY])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_filled_depends_on_an_array_and_not_on_its_values(tokens, dtype):
    """From MANY tokens on no compiler can make it before the array is there, whatever that holds."""

    def f(when):
        return filled((2, 3), -7, dtype, when)

    for value in (0.0, 1.5, -3e38, np.nan, np.inf):
        got = jax.jit(f)(jnp.full((tokens, 2), value))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.full((2, 3), -7, dtype))
    reads = "bitcast" in str(jax.make_jaxpr(f)(jnp.zeros((tokens, 2))))
    assert reads == (tokens >= MANY)
