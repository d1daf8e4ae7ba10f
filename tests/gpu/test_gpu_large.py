"""Arrays of just above 2^31 elements: offsets of tokens, of what kernels hand each other, of slots, and of blocks."""

import jax
import jax.numpy as jnp
import kda_equations as decode
import numpy as np
from helpers import relative_error
from test_pallas_attnres import EPS, draw, exact

from k3jax.ops import kda as plain
from k3jax.pallas import attnres
from k3jax.pallas import kda_prefill as kda

LIMIT = 2**31


def test_prefill():
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
    states, o = jax.jit(kda.prefill, static_argnames="lower_bound")(pool, x, rows, lower_bound=-5.0)

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


def test_depth_mixture():
    """The first and the last token of a bank; the others are NaN."""
    N, D = 9, 7168
    T = LIMIT // (N * D) + 5
    running, pending, blocks, *rest = draw(N + 1, T=2, D=D, dtype=jnp.bfloat16)

    def spread(a):
        return jnp.full((*a.shape[:-2], T, D), jnp.nan, a.dtype).at[..., np.array([0, T - 1]), :].set(a)

    bank = attnres.Bank(spread(jnp.stack(blocks)), jnp.int32(N))
    assert bank.blocks.size > LIMIT
    got = jax.jit(attnres.mix_norm, static_argnames=("eps", "weights"))(
        spread(running), None, bank, *rest, eps=EPS, weights=True
    )
    x, weights = (np.asarray(a[np.array([0, T - 1])], np.float64) for a in got[1:])
    _, want, pi = exact(running, jnp.zeros_like(pending), blocks, *rest)
    assert relative_error(weights, pi) < 1e-6
    assert relative_error(x, want) < 6e-3
