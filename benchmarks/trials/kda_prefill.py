"""KDA prefill as two Pallas-Triton kernels: `prepare`, all chunks at once, and `scan`, the state from chunk to chunk.

Chunks have 32 tokens. Within a chunk let D_r be the running sum of g counted from the chunk's middle: D_15 = 0, and |D| is at
most 16 times the bound of g, so that exp(D) and exp(-D) both fit bfloat16 when the bound is -5. With k and q normalised,

    kd = k exp D      ku = k exp(-D)      qd = K^-1/2 q exp D
    X = (I + diag(beta) tril(kd kuᵀ, -1))^-1 diag(beta)        Y = tril(qd kuᵀ) X

have every product of two tokens' decays right below the diagonal; above it they may overflow and are replaced, never
multiplied, by 0. `scan` holds the state transposed and decayed to the chunk's middle, R = Sᵀ diag(exp(sum of g before it)):

    E = vᵀ - R kdᵀ        oᵀ = R qdᵀ + E Yᵀ        R <- (R + E Xᵀ ku) diag(exp(sum of g to the next middle))

R is the left operand of every product, so it stays in registers; the others stream from memory through shared memory.
`kda_prefill_bench.py` beside this file checks and times both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

CHUNK = 32  # tokens
TILE = 64  # tokens of one program of `prepare`: two chunks, because the matrix unit takes 64 rows
_L2_EPS = 1e-6
_LOG2E = 1.4426950408889634
_LARGEST_EXPONENT = 87.0  # exp of more overflows bfloat16


class Raw(NamedTuple):
    """What the projections and convolutions give, packed sequences one after another."""

    q: Float[Array, "T H K"]  # bfloat16, not normalised
    k: Float[Array, "T H K"]
    v: Float[Array, "T H V"]
    f: Float[Array, "T H K"]  # g = bound * sigmoid(exp(A_log) (f + dt_bias))
    b: Float[Array, "T H"]  # beta = sigmoid(b)
    A_log: Float[Array, "H"]
    dt_bias: Float[Array, "H K"]


class Tiles(NamedTuple):
    """Runs of at most TILE tokens that never cross sequences, each sequence's in order and side by side."""

    start: Int[Array, "n"]  # first token
    stop: Int[Array, "n"]  # one past the last; equal to start for unused tiles
    first: Int[Array, "B"]  # each sequence's first tile


class Work(NamedTuple):
    """What `prepare` leaves for `scan`: P = n * TILE places, those without a token hold 0. Twice P: of each chunk the rows
    of the first named, then the rows of the second."""

    kq: Float[Array, "H 2P K"]  # kd and qd
    ku: Float[Array, "H P K"]
    XY: Float[Array, "H 2P C"]  # X and Y
    halves: Float[Array, "H P/16 K"]  # float32, sums of g / ln 2 over half chunks


class Tuning(NamedTuple):
    """Launch parameters: warps of a program, stages of its pipeline, and how much it does."""

    prepare_warps: int = 4
    prepare_stages: int = 1
    tiles: int = 1  # a program of `prepare`, one after another; with 2 stages the next one's loads run beside the work
    scan_warps: int = 4
    scan_stages: int = 3
    rows: int = 64  # of R a program of `scan`: 16 is faster where 64 leaves most of the card idle


DEFAULT = Tuning()


def tiles_of(cu_seqlens: Int[Array, "B+1"], tokens: int) -> Tiles:
    """The tiles of packed sequences; their number depends on shapes alone."""
    start, length = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    last = jnp.cumsum((length + TILE - 1) // TILE)
    first = last - (length + TILE - 1) // TILE
    tile = jnp.arange(tokens // TILE + start.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(last, tile, side="right", method="compare_all")
    at = start.at[row].get(mode="fill", fill_value=0) + TILE * (tile - first.at[row].get(mode="clip"))
    stop = jnp.minimum(at + TILE, cu_seqlens[1:].at[row].get(mode="fill", fill_value=0))
    used = row < start.shape[0]
    return Tiles(*(a.astype(jnp.int32) for a in (jnp.where(used, at, 0), jnp.where(used, stop, 0), first)))


def _dot(a: Array, b: Array, transposed: bool = False) -> Array:
    """a b, or a bᵀ, summed in float32."""
    return lax.dot_general(a, b, (((1,), (int(transposed),)), ((), ())), preferred_element_type=jnp.float32)


# -- prepare -------------------------------------------------------------------------------------------------------


def _approximate(instruction: str, x: Array, interpret: bool) -> Array:
    """2^x ("ex2") or 1/x ("rcp") by one instruction with a relative error near 2^-22; exactly when interpreted."""
    if interpret:
        return jnp.exp2(x) if instruction == "ex2" else 1 / x
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return plt.elementwise_inline_asm(
        f"{instruction}.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[result]
    )[0]


def _unit_lower_inverse(A: Array, apart: Array, size: int) -> Array:
    """(I + A)^-1 of strictly lower triangular blocks of `size` on the diagonal of A; `apart` is row index xor column index.

    Inverses of m x m blocks give those of 2m x 2m: [[a, 0], [-b N a, b]], as stable as substitution. Entries of the result
    are at most 1, since the delta rule only contracts: float16 holds them, with three bits more than bfloat16.
    """
    A = A.astype(jnp.float16)

    def between(m: int) -> Array:
        """The lower left m x m blocks of the 2m x 2m blocks."""
        return jnp.where((apart >= m) & (apart < 2 * m), A, 0)

    X = jnp.where(apart == 0, 1.0, 0.0) - between(1).astype(jnp.float32)
    m = 2
    while m < size:
        X16 = X.astype(jnp.float16)
        X = X - _dot(X16, _dot(between(m), X16).astype(jnp.float16))
        m *= 2
    return X


def _signs() -> np.ndarray:
    """What turns a tile's g into D, [TILE, TILE]."""
    half = CHUNK // 2
    row, col = np.arange(TILE)[:, None], np.arange(TILE)
    same, late = row // CHUNK == col // CHUNK, col % CHUNK >= half
    return np.where(same & late & (col <= row), 1, np.where(same & ~late & (col > row), -1, 0)).astype(jnp.bfloat16)


def _prepare_kernel(
    start_ref, stop_ref, signs_ref, q_ref, k_ref, f_ref, b_ref, A_ref, bias_ref, *outs,
    tiles: int, lower_bound: float, interpret: bool,
):  # fmt: skip
    kq_ref, ku_ref, XY_ref, halves_ref = outs
    K, count = q_ref.shape[-1], 2 * TILE // CHUNK
    h, first = pl.program_id(0), pl.program_id(1) * tiles
    signs = signs_ref[...]
    rate = -_LOG2E * jnp.exp(A_ref[h])
    bias = (bias_ref[h, :] * rate)[None, :]
    row, col = (lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis) for axis in (0, 1))
    apart = row ^ col  # below CHUNK within a chunk

    def exp2(x: Array) -> Array:
        return _approximate("ex2", x, interpret)

    def sigmoid2(x: Array) -> Array:
        """1 / (1 + 2^x)."""
        return _approximate("rcp", 1 + exp2(x), interpret)

    def own_chunk(a: Array) -> Array:
        """[TILE, TILE] with blocks on the diagonal to [TILE, CHUNK]."""
        return jnp.sum(a.reshape(TILE, TILE // CHUNK, CHUNK), axis=1).astype(jnp.bfloat16)

    def one(i: Array | int, none: Array | int) -> Array | int:
        n = first + i
        start = start_ref[n]
        real = start + jnp.arange(TILE) < stop_ref[n]
        at = (pl.ds(start, TILE), h)
        # All loads before the work. Where there is no token, f and b are so low that g and beta are 0.
        f = plt.load(f_ref.at[*at, :], mask=real[:, None], other=-1e30)
        k, q = (plt.load(ref.at[*at, :], mask=real[:, None], other=0) for ref in (k_ref, q_ref))
        b = plt.load(b_ref.at[at], mask=real, other=-1e30)

        # Sums as products with 0 and +-1, exact but for g, which two bfloat16 hold to 16 bits. The upper part is taken by
        # its bits: XLA, which interprets, may drop a conversion to bfloat16 and back.
        g = (lower_bound * _LOG2E) * sigmoid2(f.astype(jnp.float32) * rate + bias)
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(g, jnp.int32) & -(1 << 16), jnp.float32)
        low, high = (g - high).astype(jnp.bfloat16), high.astype(jnp.bfloat16)
        D = _dot(signs, high) + _dot(signs, low)
        halves_ref[h, pl.ds(n * count, count), :] = jnp.sum(g.reshape(count, TILE // count, K), axis=1)

        up, k, q = exp2(D), k.astype(jnp.float32), q.astype(jnp.float32)
        k_scale, q_scale = (lax.rsqrt(jnp.sum(x * x, axis=1) + _L2_EPS)[:, None] for x in (k, q))
        kd = (k * (up * k_scale)).astype(jnp.bfloat16)
        ku = (k * (exp2(-D) * k_scale)).astype(jnp.bfloat16)
        qd = (q * (up * (q_scale * K**-0.5))).astype(jnp.bfloat16)
        place = jnp.arange(TILE) + n * TILE
        pair = (2 * place - place % CHUNK)[:, None]  # the first of two in each chunk
        wide, narrow = jnp.arange(K)[None, :], jnp.arange(CHUNK)[None, :]
        plt.store(kq_ref.at[h, pair, wide], kd)
        plt.store(kq_ref.at[h, pair + CHUNK, wide], qd)
        ku_ref[h, pl.ds(n * TILE, TILE), :] = ku

        # The maximum over one row changes nothing; without it the compiler moves the transposition up and computes ku twice.
        ku = jnp.max(ku[None], axis=0)
        beta = sigmoid2(-_LOG2E * b.astype(jnp.float32))
        Q = jnp.where((apart < CHUNK) & (col <= row), _dot(qd, ku, True), 0).astype(jnp.bfloat16)
        A = jnp.where((apart < CHUNK) & (col < row), _dot(kd, ku, True) * beta[:, None], 0)
        X = _unit_lower_inverse(A, apart, CHUNK) * beta[None, :]
        Y = _dot(Q, X.astype(jnp.bfloat16))
        plt.store(XY_ref.at[h, pair, narrow], own_chunk(X))
        plt.store(XY_ref.at[h, pair + CHUNK, narrow], own_chunk(Y))
        return none

    if tiles == 1:
        one(0, 0)
    else:
        lax.fori_loop(0, jnp.minimum(tiles, start_ref.shape[0] - first), one, jnp.int32(0))


def prepare(x: Raw, tiles: Tiles, lower_bound: float, tuning: Tuning, interpret: bool = False) -> Work:
    """All that does not depend on the state. Raises ValueError for a bound whose decays over half a chunk overflow."""
    (_, H, K), n = x.q.shape, tiles.start.shape[0]
    if -lower_bound * CHUNK / 2 > _LARGEST_EXPONENT or lower_bound > 0:
        raise ValueError(f"lower_bound={lower_bound}: allowed is {-_LARGEST_EXPONENT * 2 / CHUNK} to 0")

    def out(rows: int, width: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((H, rows, width), dtype)

    P = n * TILE
    kernel = functools.partial(_prepare_kernel, tiles=tuning.tiles, lower_bound=lower_bound, interpret=interpret)
    return Work(
        *pl.pallas_call(
            kernel,
            out_shape=[out(2 * P, K), out(P, K), out(2 * P, CHUNK), out(P * 2 // CHUNK, K, jnp.float32)],
            grid=(H, pl.cdiv(n, tuning.tiles)),
            compiler_params=plt.CompilerParams(num_warps=tuning.prepare_warps, num_stages=tuning.prepare_stages),
            interpret=interpret,
            name="kda_prepare",
        )(tiles.start, tiles.stop, _signs(), x.q, x.k, x.f, x.b, x.A_log, x.dt_bias)
    )


# -- scan ----------------------------------------------------------------------------------------------------------


def _scan_kernel(cu_ref, first_ref, kq_ref, ku_ref, XY_ref, halves_ref, v_ref, S_ref, o_ref, S_out_ref, *, rows: int):
    h, b = pl.program_id(1), pl.program_id(2)
    column = pl.program_id(0) * rows
    columns = pl.ds(column, rows)
    begin, end = cu_ref[b], cu_ref[b + 1]
    chunks = (end - begin + CHUNK - 1) // CHUNK
    first = first_ref[b] * (TILE // CHUNK)

    def half(j: Array) -> Array:
        """Sum of g / ln 2 over half chunk j of the sequence; 0 after the last."""
        inside = jnp.broadcast_to(j < 2 * chunks, halves_ref.shape[-1:])
        return plt.load(halves_ref.at[h, 2 * first + j, :], mask=inside, other=0)

    def decays(i: Array) -> tuple[Array, Array]:
        """Log2-decays from the middle of chunk i to its end, and on to the next middle."""
        return half(2 * i + 1), half(2 * i + 2)

    def pair(a: Array) -> tuple[Array, Array]:
        """The two halves of [rows, 2 CHUNK], which no slice of registers can give. To add -0 is free, to add 0 is not."""
        a = a.reshape(rows, 2, CHUNK)
        second = lax.broadcasted_iota(jnp.int32, a.shape, 1) == 1
        return jnp.sum(jnp.where(second, -0.0, a), axis=1), jnp.sum(jnp.where(second, a, -0.0), axis=1)

    def one(i: Array, carry: tuple[Array, tuple[Array, Array]]) -> tuple[Array, tuple[Array, Array]]:
        R, (out, into) = carry
        place, token = (first + i) * CHUNK, begin + i * CHUNK
        both = pl.ds(2 * place, 2 * CHUNK)
        inside = (token + jnp.arange(CHUNK)) < end
        upcoming = decays(i + 1)  # a chunk ahead: plain loads are slow, and these are not pipelined
        v = plt.load(v_ref.at[pl.ds(token, CHUNK), h, columns], mask=inside[:, None], other=0)
        predicted, o = pair(_dot(R.astype(jnp.bfloat16), kq_ref[h, both, :], True))
        E = (v.T.astype(jnp.float32) - predicted).astype(jnp.bfloat16)
        delta, inner = pair(_dot(E, XY_ref[h, both, :], True))
        R = R + _dot(delta.astype(jnp.bfloat16), ku_ref[h, pl.ds(place, CHUNK), :])
        to = (token + jnp.arange(CHUNK)[None, :], h, (column + jnp.arange(rows))[:, None])
        plt.store(o_ref.at[to], (o + inner).astype(o_ref.dtype), mask=inside[None, :])
        # Two factors: their product may underflow where ku is large.
        return R * jnp.exp2(out)[None, :] * jnp.exp2(into)[None, :], upcoming

    R = S_ref[b, h, columns, :] * jnp.exp2(half(jnp.int32(0)))[None, :]
    R, _ = lax.fori_loop(0, chunks, one, (R, decays(jnp.int32(0))))
    S_out_ref[b, h, columns, :] = R


def scan(
    work: Work, v: Array, cu_seqlens: Array, first: Array, S_BHVK: Array, tuning: Tuning, interpret: bool = False
) -> tuple[Array, Array]:
    """Outputs [T, H, V] in the dtype of v, and the states after each sequence."""
    B, H, V, _ = S_BHVK.shape
    return pl.pallas_call(
        functools.partial(_scan_kernel, rows=tuning.rows),
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(S_BHVK.shape, jnp.float32)],
        grid=(V // tuning.rows, H, B),
        compiler_params=plt.CompilerParams(num_warps=tuning.scan_warps, num_stages=tuning.scan_stages),
        interpret=interpret,
        name="kda_scan",
    )(cu_seqlens, first, *work, v, S_BHVK)


def prefill(
    S_BHVK: Float[Array, "B H V K"],
    x: Raw,
    cu_seqlens: Int[Array, "B+1"],
    lower_bound: float = -5.0,
    tuning: Tuning = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "B H V K"], Float[Array, "T H V"]]:
    """Packed sequences, each continuing its own float32 state. Outputs past the last sequence are not written."""
    tiles = tiles_of(cu_seqlens, x.q.shape[0])
    work = prepare(x, tiles, lower_bound, tuning, interpret)
    o, S = scan(work, x.v, cu_seqlens.astype(jnp.int32), tiles.first, S_BHVK, tuning, interpret)
    return S, o
