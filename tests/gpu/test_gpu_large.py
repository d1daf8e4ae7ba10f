"""Arrays of just above 2^31 elements: offsets of tokens, of what kernels hand each other, of slots and of blocks."""

import functools

import jax
import jax.numpy as jnp
import kda_equations as decode
import numpy as np
import pytest
import test_pallas_conv as conv
from helpers import relative_error, same_bits
from test_pallas_attnres import EPS, draw, draw_gated, exact, exact_gated

from k3jax.ops import kda as plain
from k3jax.pallas import attnres
from k3jax.pallas import kda_prefill as kda
from k3jax.pallas.gated_norm import gated_rms_norm

LIMIT = 2**31


@pytest.mark.parametrize("tuning", [None, kda.Tuning()], ids=["mosaic", "triton"])
def test_prefill(tuning):
    """96 heads, 24 rows; the first row and the last one are compared, token by token, in float32."""
    H, K, B, N = 96, 128, 24, 7_300
    T = B * N
    assert LIMIT < T * H * K < 1.01 * LIMIT
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    q, k, v, f = (normal(T, H, K) for _ in range(4))
    x = kda.Raw(q, k, v, f, normal(T, H), normal(H, dtype="float32"), normal(H, K, dtype="float32"))
    pool = normal(B, H, K, K, dtype=jnp.float32)
    i32 = lambda a: jnp.asarray(a, jnp.int32)  # noqa: E731
    rows = kda.Rows(i32(np.arange(B + 1) * N), i32(np.arange(B)), i32(np.ones(B)))
    call = jax.jit(kda.prefill, static_argnames=("lower_bound", "tuning"))
    states, o = call(pool, x, rows, lower_bound=-5.0, tuning=tuning)

    @jax.jit
    def definition(S, x, row):
        q, k, v, f, b = (jax.lax.dynamic_slice_in_dim(a, row * N, N) for a in x[:5])
        g = plain.log_decay(f, x.A_log, x.dt_bias, -5.0)
        return plain.plain(S, plain.Inputs(q, k, v, g, jax.nn.sigmoid(b.astype(jnp.float32))))

    for row in (0, B - 1):
        S, want = definition(pool[row], x, row)
        assert relative_error(o[row * N : (row + 1) * N].astype(jnp.float32), want) < 6e-3
        assert relative_error(states[row], S) < 6e-3


def test_decode():
    """A pool whose last slots lie beyond; those of nobody hold NaN."""
    K = V = 128
    slots = LIMIT // (decode.H * K * V) + 100
    low, high = np.array([3, 0, 1]), np.array([slots - 1, 0, slots - 57])
    x, gates = decode.draw(0, 3, k=K, v=V)
    small = decode.memory(low, [0, 2], k=K, v=V)
    big = decode.Pools(*(jnp.full((slots, *a.shape[1:]), jnp.nan, a.dtype).at[high].set(a[low]) for a in small))
    assert big.S.size > LIMIT
    computed = [5, 0, 3]
    want, outputs, _, _ = decode.definition(small, x, gates, decode.rows_of(low, computed), -5.0)
    got, o = decode.advance(big, x, gates, decode.rows_of(high, computed))
    assert relative_error(o, outputs) < decode.TOLERANCE
    assert relative_error(got.S[high], want.S[low]) < decode.TOLERANCE
    assert int(jnp.isnan(got.S[:, 0, 0, 0]).sum()) == slots - 3


def spread(a, T):
    """Two tokens as the first and the last of T; the others are NaN. The axis of tokens is the last but one."""
    return jnp.full((*a.shape[:-2], T, a.shape[-1]), jnp.nan, a.dtype).at[..., np.array([0, T - 1]), :].set(a)


def ends(a):
    return np.asarray(a[np.array([0, -1])], np.float64)


MIX = jax.jit(attnres.mix_norm, static_argnames=("eps", "weights", "form"))


@pytest.mark.parametrize("form", ["triton", "mosaic"])
def test_depth_mixture(form):
    D = 7168
    T = LIMIT // D + 5
    running, pending, blocks, *rest = draw(2, T=2, D=D, dtype=jnp.bfloat16)
    big = (spread(a, T) for a in (running, pending, *blocks))
    *got, _ = MIX(next(big), next(big), tuple(big), *rest, eps=EPS, form=form)
    for a, b in zip(got, exact(running, pending, blocks, *rest), strict=False):
        assert relative_error(ends(a), b) < 6e-3


def test_depth_mixture_of_a_bank():
    N, D = 9, 7168
    T = LIMIT // (N * D) + 5
    running, pending, blocks, *rest = draw(N + 1, T=2, D=D, dtype=jnp.bfloat16)
    bank = attnres.Bank(spread(jnp.stack(blocks), T), jnp.int32(N))
    assert bank.blocks.size > LIMIT
    _, x, weights = MIX(spread(running, T), None, bank, *rest, eps=EPS, weights=True)
    _, want, pi = exact(running, jnp.zeros_like(pending), blocks, *rest)
    assert relative_error(ends(weights), pi) < 1e-6
    assert relative_error(ends(x), want) < 6e-3


def test_gated_norm():
    H, V = 96, 128
    T = LIMIT // (H * V) + 5
    o, gate, gain = draw_gated((2, H, V), jnp.bfloat16)
    big = (spread(a.reshape(2, H * V), T).reshape(T, H, V) for a in (o, gate))
    y = jax.jit(gated_rms_norm, static_argnames="eps")(*big, gain, eps=EPS)
    assert relative_error(ends(y), exact_gated(o, gate, gain)) < 6e-3


def test_convolution():
    """Two rows, and between them one without a slot, whose inputs are NaN."""
    H, K, first, last = 96, 128, 5, 7
    T = LIMIT // (H * K) + 5
    *qkv, taps, pool, _, slots, computed = conv.draw((first, last), H, K, K, dtype=jnp.bfloat16, begin=(), lost=())
    want, want_pool = conv.exact(*qkv, taps, pool, np.array([0, first, first + last]), slots, computed)
    big = [jnp.full((T, H, K), jnp.nan, a.dtype).at[:first].set(a[:first]) for a in qkv]
    big = [b.at[T - last :].set(a[first : first + last]) for a, b in zip(qkv, big, strict=True)]
    i32 = functools.partial(jnp.asarray, dtype=jnp.int32)
    rows = i32([0, first, T - last, T]), i32([slots[0], conv.NOWHERE, slots[1]]), i32([7, 7, 7])
    *got, got_pool = jax.jit(conv.packed)(*big, taps, pool, *rows)
    y = np.concatenate([np.asarray(jnp.concatenate([a[:first], a[T - last :]]), np.float64) for a in got], -1)
    assert relative_error(y, want[: first + last]) < 6e-3
    assert same_bits(got_pool, want_pool)
