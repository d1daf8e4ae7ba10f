"""What each chunk of a KDA prefill contributes, all but the state: one program a head and chunk.

A chunk has 32 tokens. Let G_r be the sum of g over its tokens up to and with r, and G_C that of all of them. With k and q
normalised, K^-1/2 within q, and the products of two tokens' decays below the diagonal,

    A_rs = beta_r sum_c k_rc k_sc exp(G_rc - G_sc)  (s < r)       X = (I + A)^-1 diag(beta)       Y = (as A, of q, s <= r) X

A gate that is bounded lets one product give all of A: with decays counted from the chunk's middle, exp(D) and exp(-D) both fit
bfloat16 as long as 16 tokens cannot decay by more than e^-80. Where there is no bound, A is put together from pairs of
blocks of 1, 2, 4, 8 and 16 tokens with the anchor between the two: then no exponent is above 0, and what underflows is 0.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from k3jax.pallas.common import LOG2E, exp2, launch, rcp

CHUNK = 32  # tokens
LARGEST_EXPONENT = 80.0  # exp of 88.7 overflows, that of -87.3 is subnormal: room for a factor of 1,000 either way
RAISED = 2.0**12  # q is, until `scan` has its outputs: at the smallest decays it would be subnormal
_L2_EPS = 1e-6

Precision = Literal["default", "high", "highest"]


class Raw(NamedTuple):
    """What projections and convolution give, packed rows one after another. bfloat16, or float32 for more precision."""

    q: Float[Array, "T H K"]  # not normalised
    k: Float[Array, "T H K"]
    v: Float[Array, "T H V"]
    f: Float[Array, "T H K"]  # g = bound * sigmoid(exp(A_log) (f + dt_bias)), or -exp(A_log) softplus(f + dt_bias)
    b: Float[Array, "T H"]  # beta = sigmoid(b)
    A_log: Float[Array, "H"]  # float32
    dt_bias: Float[Array, "H K"]  # float32


class Chunks(NamedTuple):
    """Runs of at most CHUNK tokens that never cross rows, each row's in order and side by side."""

    start: Int[Array, "n"]  # first token
    stop: Int[Array, "n"]  # one past the last; equal to start for unused chunks
    first: Int[Array, "B"]  # each row's first chunk


class Work(NamedTuple):
    """What `prepare` leaves for `scan`, chunk by chunk; places without a token hold 0. Decays are counted from the chunk's
    middle or from its ends."""

    kq: Float[Array, "H n 2C K"]  # k, then q, decayed from there
    ku: Float[Array, "H n C K"]  # k, decayed until there
    XY: Float[Array, "H n 2C C"]  # X, then Y
    halves: Float[Array, "H n 2 K"]  # float32, sums of g / ln 2 over half chunks


def chunks_of(starts: Int[Array, "B+1"], tokens: int) -> Chunks:
    """The chunks of packed rows; their number depends on shapes alone."""
    start, length = starts[:-1], starts[1:] - starts[:-1]
    last = jnp.cumsum((length + CHUNK - 1) // CHUNK)
    first = last - (length + CHUNK - 1) // CHUNK
    chunk = jnp.arange(tokens // CHUNK + start.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(last, chunk, side="right", method="compare_all")
    at = start.at[row].get(mode="fill", fill_value=0) + CHUNK * (chunk - first.at[row].get(mode="clip"))
    stop = jnp.minimum(at + CHUNK, starts[1:].at[row].get(mode="fill", fill_value=0))
    used = row < start.shape[0]
    return Chunks(*(a.astype(jnp.int32) for a in (jnp.where(used, at, 0), jnp.where(used, stop, 0), first)))


class Unit(NamedTuple):
    """How products are taken: bfloat16 operands, float32 cut to TF32, or float32 as three products of TF32."""

    precision: Precision
    interpret: bool

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.bfloat16 if self.precision == "default" else jnp.float32)

    def dot(self, a: Array, b: Array, transposed: bool = False) -> Array:
        """a b, or a bᵀ, summed in float32."""
        how: lax.PrecisionLike = None
        if a.dtype == jnp.float32:
            how = (
                lax.DotAlgorithmPreset.TF32_TF32_F32
                if self.precision == "high"
                else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            )
            how = lax.Precision.HIGHEST if self.interpret else how
        dims = (((1,), (int(transposed),)), ((), ()))
        return lax.dot_general(a, b, dims, precision=how, preferred_element_type=jnp.float32)

    def sums(self, signs: Array, g: Array) -> Array:
        """Sums of g as a product with 0 and +-1: exact but for g, which two bfloat16 hold to 16 bits.

        The upper part is taken by its bits: XLA, which interprets, may drop a conversion to bfloat16 and back.
        """
        if self.precision != "default":
            return self._replace(precision="highest").dot(signs.astype(jnp.float32), g)
        signs = signs.astype(jnp.bfloat16)
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(g, jnp.int32) & -(1 << 16), jnp.float32)
        low, high = (g - high).astype(jnp.bfloat16), high.astype(jnp.bfloat16)
        return self.dot(signs, high) + self.dot(signs, low)


def _unit_lower_inverse(A: Array, apart: Array, unit: Unit) -> Array:
    """(I + A)^-1 of a strictly lower triangular A; `apart` is row index xor column index.

    Inverses of m x m blocks give those of 2m x 2m: [[a, 0], [-b N a, b]], as stable as substitution. Entries of the result
    are at most 1, since the delta rule only contracts: float16 holds them, with three bits more than bfloat16.
    """
    dtype = jnp.float16 if unit.precision == "default" else jnp.float32
    A = A.astype(dtype)

    def between(m: int) -> Array:
        """The lower left m x m blocks of the 2m x 2m blocks."""
        return jnp.where((apart >= m) & (apart < 2 * m), A, 0)

    X = jnp.where(apart == 0, 1.0, 0.0) - between(1).astype(jnp.float32)
    m = 2
    while m < CHUNK:
        narrow = X.astype(dtype)
        X = X - unit.dot(narrow, unit.dot(between(m), narrow).astype(dtype))
        m *= 2
    return X


class _Tokens(NamedTuple):
    """A chunk's tokens in one head."""

    q: Array  # [CHUNK, K], as given
    k: Array
    g: Array  # [CHUNK, K], log2 of the decay
    beta: Array  # [CHUNK]

    def normalised(self) -> tuple[Array, Array]:
        """q and k in float32; q times K^-1/2, and raised."""
        q, k = self.q.astype(jnp.float32), self.k.astype(jnp.float32)
        k_scale, q_scale = (lax.rsqrt(jnp.sum(x * x, axis=1) + _L2_EPS)[:, None] for x in (k, q))
        return q * (q_scale * (RAISED * q.shape[-1] ** -0.5)), k * k_scale


def _load(refs: tuple[jax.Ref, ...], start: Array, stop: Array, h: Array, bound: float | None, unit: Unit) -> _Tokens:
    """All loads before the work. Where there is no token, f and b are so low that g and beta are 0."""
    q_ref, k_ref, f_ref, b_ref, A_ref, bias_ref = refs
    at, real = (pl.ds(start, CHUNK), h), start + jnp.arange(CHUNK) < stop
    f = plt.load(f_ref.at[*at, :], mask=real[:, None], other=-1e30)
    k, q = (plt.load(ref.at[*at, :], mask=real[:, None], other=0) for ref in (k_ref, q_ref))
    b = plt.load(b_ref.at[at], mask=real, other=-1e30)
    rate, bias = jnp.exp(A_ref[h]), bias_ref[h, :]
    rate = jnp.maximum(rate, 1e-20)  # with a rate of 0 places without a token would decay as any other

    def sigmoid2(x: Array) -> Array:
        """1 / (1 + 2^x)."""
        return rcp(1 + exp2(x, unit.interpret), unit.interpret)

    if bound is None:
        z = f.astype(jnp.float32) + bias[None, :]
        g = (-LOG2E * rate) * (jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z))))  # softplus
    else:
        rate = -LOG2E * rate
        g = (bound * LOG2E) * sigmoid2(f.astype(jnp.float32) * rate + (bias * rate)[None, :])
    return _Tokens(q, k, g, sigmoid2(-LOG2E * b.astype(jnp.float32)))


def _prepare_kernel(start_ref, stop_ref, signs_ref, *refs, bound: float | None, unit: Unit):
    kq_ref, ku_ref, XY_ref, halves_ref = refs[6:]
    h, n, dtype = pl.program_id(0), pl.program_id(1), unit.dtype
    row, col = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    signs, first, second = signs_ref[...], pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
    x = _load(refs[:6], start_ref[n], stop_ref[n], h, bound, unit)
    halves_ref[h, n] = jnp.sum(x.g.reshape(2, CHUNK // 2, -1), axis=1)

    def decayed(from_log2: Array, until_log2: Array) -> tuple[Array, Array, Array]:
        """What `scan` reads."""
        start, until = exp2(from_log2, unit.interpret), exp2(until_log2, unit.interpret)
        q, k = x.normalised()
        kd, ku, qd = ((a * decay).astype(dtype) for a, decay in ((k, start), (k, until), (q, start)))
        kq_ref[h, n, first, :], kq_ref[h, n, second, :], ku_ref[h, n] = kd, qd, ku
        return kd, qd, ku

    if bound is not None:
        D = unit.sums(signs, x.g)
        kd, qd, ku = decayed(D, -D)
        # The maximum over one row changes nothing; without it the compiler moves the transposition up and computes ku twice.
        ku = jnp.max(ku[None], axis=0)
        kk, qk = unit.dot(kd, ku, True), unit.dot(qd, ku, True)
    else:
        decayed(*(unit.sums(side, x.g) for side in (col <= row, col > row)))
        kk, qk = _by_pairs(x, row, col, unit)
    Q = jnp.where(col <= row, qk, 0).astype(dtype)
    A = jnp.where(col < row, kk * x.beta[:, None], 0)
    X = _unit_lower_inverse(A, row ^ col, unit) * x.beta[None, :]
    X = X.astype(dtype)
    XY_ref[h, n, first, :], XY_ref[h, n, second, :] = X, unit.dot(Q, X).astype(dtype)


def _by_pairs(x: _Tokens, row: Array, col: Array, unit: Unit) -> tuple[Array, Array]:
    """Decayed products of k with k and of q with k for whatever gate, from pairs of neighbouring blocks of m tokens.

    The later block's tokens are decayed from the border between the two, the earlier one's until there.
    """
    q, k = x.normalised()
    apart = row ^ col

    def blocks(i: Array, products: tuple[Array, Array]) -> tuple[Array, Array]:
        m = jnp.int32(1) << i
        later = (row & m) != 0
        decay = exp2(unit.sums((apart < m) & (later == (col <= row)), x.g), unit.interpret)
        kd, qd = (k * decay).astype(unit.dtype), (q * decay).astype(unit.dtype)
        pair = later & (apart >= m) & (apart < 2 * m)
        kk, qk = products
        return jnp.where(pair, unit.dot(kd, kd, True), kk), jnp.where(pair, unit.dot(qd, kd, True), qk)

    own = jnp.where(row == col, jnp.sum(q * k, axis=1)[:, None], 0.0)
    # A loop: unrolled, all blocks are held at once.
    return lax.fori_loop(0, CHUNK.bit_length() - 1, blocks, (jnp.zeros((CHUNK, CHUNK), jnp.float32), own))


def _signs() -> np.ndarray:
    """What turns a chunk's g into sums counted from its middle, [CHUNK, CHUNK]."""
    row, col, half = np.arange(CHUNK)[:, None], np.arange(CHUNK), CHUNK // 2
    return np.where((half <= col) & (col <= row), 1, np.where((row < col) & (col < half), -1, 0)).astype(jnp.bfloat16)


def prepare(x: Raw, chunks: Chunks, lower_bound: float | None, unit: Unit, warps: int) -> Work:
    """All that does not depend on the state."""
    (_, H, K), n = x.q.shape, chunks.start.shape[0]

    def out(rows: int, width: int, dtype: jax.typing.DTypeLike = unit.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((H, n, rows, width), dtype)

    call = launch(
        functools.partial(_prepare_kernel, bound=lower_bound, unit=unit),
        out_shape=[out(2 * CHUNK, K), out(CHUNK, K), out(2 * CHUNK, CHUNK), out(2, K, jnp.float32)],
        grid=(H, n), warps=warps, interpret=unit.interpret, name="kda_prepare",
    )  # fmt: skip
    return Work(*call(chunks.start, chunks.stop, _signs(), x.q, x.k, x.f, x.b, x.A_log, x.dt_bias))
