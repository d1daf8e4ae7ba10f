"""`kda_prepare` in Mosaic GPU, for bfloat16 and a bounded gate: the same results by the same steps.

A block is one warpgroup and takes two neighbouring chunks of a head, stacked to the 64 rows of a matrix instruction; the two
may belong to different rows. Tiles of q, k and f come by TMA, and stay in shared memory, where wgmma and the stores read what
becomes of them: what is held in registers is a half of K at a time. Three blocks fit a multiprocessor (167 registers, 70 KB).
Matrices of a chunk by a chunk are folded to [64, 32], a column being a token of the row's own chunk; products are taken for
each chunk and chosen by row, so that no number of one, be it NaN, reaches the other.

On an H200 a prefill of 8,192 tokens by 96 heads takes 0.80 ms with it and the scan in Mosaic GPU, and 1.08 ms with neither.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as _utils
from jax.experimental.pallas import mosaic_gpu as _plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array

from k3jax.pallas import no_mosaic
from k3jax.pallas.common import LOG2E
from k3jax.pallas.kda_prepare import _L2_EPS, CHUNK, RAISED, Chunks, Raw, Work

plgpu: Any = _plgpu  # what the two declare differs between versions of jax
utils: Any = _utils

ROWS = 2 * CHUNK  # tokens of a block
K = 128
PART = 64  # columns of K at a time
_LOW = -3e38  # f of no token: its g is 0


def _tile(*shape: int, swizzle: int, dtype: Any = jnp.bfloat16, tiled: bool = True) -> Any:
    """Shared memory as wgmma takes it. Sums over rows take a multiple of swizzle / 2 of them.

    TMA makes tiles of 8 rows only where those of the whole array begin; of others it must be told nothing. One tile wide, the
    two ways give the same order.
    """
    tiling = (plgpu.TilingTransform((8, swizzle // 2)),) if tiled else ()
    return plgpu.SMEM(shape, dtype, transforms=(*tiling, plgpu.SwizzleTransform(swizzle)))


def _kernel(
    spans, rate, beta, bias, q, k, f, kq, ku, XY, halves,
    tiles, beta_s, bias_s, halves_s, shared, first, second, *staging,
    n: int, offset: float,
):  # fmt: skip
    (q_s, k_s, f_s), *arriving = [tiles] if staging else tiles
    q_in, k_in, f_in = arriving[0] if arriving else (q_s, k_s, f_s)
    (high_s, low_s), (inverse_s, product_s), (X_s, Y_s) = shared
    h, pair = lax.axis_index("head"), lax.axis_index("pair")
    starts, lengths = ([spans[pair, i] for i in at] for at in ((0, 1), (2, 3)))
    both = upper, lower = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
    parts = range(K // PART)
    columns = [pl.ds(c * PART, PART) for c in parts]

    def fetch(x: Any, to: Any, barrier: Any) -> None:
        for start, half in zip(starts, both, strict=True):
            for c in parts:
                plgpu.copy_gmem_to_smem(x.at[pl.ds(start, CHUNK), h, columns[c]], to.at[c, half], barrier)

    fetch(f, f_in, first)
    plgpu.copy_gmem_to_smem(bias.at[h], bias_s, first)
    fetch(k, k_in, second)
    fetch(q, q_in, second)
    plgpu.copy_gmem_to_smem(beta.at[h, pair], beta_s, second)

    def index(shape: tuple[int, ...], axis: int) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def per_row(x: Array, columns: int) -> Array:
        return lax.broadcast_in_dim(x, (ROWS, columns), [0])

    def per_column(x: Any) -> Array:
        x = plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(x, (ROWS, *x.shape), [1])

    def clear(refs: list[Any], value: float) -> None:
        """Where there is no token."""

        @pl.when((lengths[0] < CHUNK) | (lengths[1] < CHUNK))
        def _() -> None:
            row = index((ROWS, PART), 0)
            real = jnp.where(row < CHUNK, row < lengths[0], row - CHUNK < lengths[1])
            for ref in refs:
                for c in parts:
                    ref[c] = jnp.where(real, ref[c], jnp.full((), value, jnp.bfloat16))

    def own(*products: Any) -> list[Array]:
        """Sums of matrix products, which are given for one chunk's tokens. Rows of each chunk come from that chunk alone, so
        that nothing, be it NaN, reaches the other."""
        terms = [product(half) for product in products for half in both]

        def body(*accs: Any) -> list[Array]:
            for acc, pairs in zip(accs, terms, strict=True):
                for a, b in pairs:
                    plgpu.wgmma(acc, a, b)
            return [acc[...] for acc in accs]

        shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in terms]
        sums = pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
        return [jnp.where(index(x.shape, 0) < CHUNK, x, y) for x, y in zip(sums[::2], sums[1::2], strict=True)]

    plgpu.barrier_wait(first)
    clear([f_s], _LOW)
    factor = rate[h]

    def left(a: Array) -> Any:
        """An operand in registers."""
        if not staging:
            return a
        to = staging[a.dtype == jnp.float16]
        to[...] = a
        plgpu.commit_smem()
        return to

    # From here on [ROWS, CHUNK], where a column is a token of the row's chunk.
    row, col = (index((ROWS, CHUNK), axis) & (CHUNK - 1) for axis in (0, 1))
    half = CHUNK // 2
    signs = jnp.where(
        row < half, jnp.where((row < col) & (col < half), 1.0, 0.0), jnp.where((half <= col) & (col <= row), -1.0, 0.0)
    )
    signs = signs.astype(jnp.bfloat16)

    def gates(c: int) -> Array:
        """-g, also left in two parts."""
        # 1 / x as the square of 1 / sqrt(x), which is one instruction; a division is several.
        z = f_s[c].astype(jnp.float32) * factor + per_column(bias_s.at[columns[c]])
        root = lax.rsqrt(jnp.exp2(z) + offset)
        g = root * root
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(g, jnp.int32) & -(1 << 16), jnp.float32)
        high_s[...] = high.astype(jnp.bfloat16)
        low_s[...] = (g - high).astype(jnp.bfloat16)
        return g

    def scale(x: Any, factor: float) -> Array:
        squares = [jnp.square(x[c].astype(jnp.float32)).sum(axis=1) for c in parts]
        return per_row(lax.rsqrt(squares[0] + squares[1] + _L2_EPS) * factor, PART)

    scales: list[Array] = []
    for c in parts:
        if c:
            plgpu.commit_smem()  # what the products read is overwritten
        g = gates(c)
        plgpu.commit_smem()
        [D] = own(lambda half: [(left(signs), x.at[half]) for x in (high_s, low_s)])
        if staging:
            sums = jnp.stack([-(g + D)[::CHUNK], D[CHUNK - 1 :: CHUNK]], axis=1)
            halves_s[:, columns[c]] = sums.reshape(4, PART)
        else:
            layouts = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType())
            plgpu.inline_mgpu(arg_types=layouts)(functools.partial(_edges, column=c * PART))(g, D, halves_s)
        if not scales:
            plgpu.barrier_wait(second)
            clear([q_s, k_s], 0)
            scales = [scale(q_s, RAISED * K**-0.5), scale(k_s, 1)]
        from_there, until = jnp.exp2(D), jnp.exp2(-D)
        q_s[c] = (q_s[c].astype(jnp.float32) * scales[0] * from_there).astype(jnp.bfloat16)
        k_c = k_s[c].astype(jnp.float32) * scales[1]
        k_s[c] = (k_c * from_there).astype(jnp.bfloat16)
        f_s[c] = (k_c * until).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def leave(i: int) -> None:
        at = 2 * pair + i
        for c in parts:
            plgpu.copy_smem_to_gmem(k_s.at[c, both[i]], kq.at[h, at, upper, columns[c]])
            plgpu.copy_smem_to_gmem(q_s.at[c, both[i]], kq.at[h, at, lower, columns[c]])
            plgpu.copy_smem_to_gmem(f_s.at[c, both[i]], ku.at[h, at, :, columns[c]])
        plgpu.copy_smem_to_gmem(halves_s.at[pl.ds(2 * i, 2)], halves.at[h, at])

    def for_both(leave: Any) -> None:
        leave(0)
        pl.when(2 * pair + 1 < n)(functools.partial(leave, 1))

    for_both(leave)

    kk, qk = own(*(lambda half, x=x: [(x.at[c], f_s.at[c, half].T) for c in parts] for x in (k_s, q_s)))
    apart = row ^ col
    b_rows = per_row(plgpu.load(beta_s, layout=plgpu.Layout.WGMMA.reduce(1)), CHUNK)
    A = jnp.where(col < row, kk * b_rows, 0)
    Q = jnp.where(col <= row, qk, 0).astype(jnp.bfloat16)

    def between(m: int) -> Array:
        return jnp.where(apart & -m == m, A, 0)

    def times(a: Array, b: Any) -> Array:
        """Each chunk's a b."""
        a = left(a)
        return own(lambda half: [(a, b.at[half])])[0]

    X = jnp.where(apart == 0, 1.0, 0.0) - between(1)
    for m in (2, 4, 8, 16):
        narrow = X.astype(jnp.float16)
        inverse_s[...] = narrow
        plgpu.commit_smem()
        product_s[...] = times(between(m).astype(jnp.float16), inverse_s).astype(jnp.float16)
        plgpu.commit_smem()
        X = X - times(narrow, product_s)
    b_columns = jnp.where(index(X.shape, 0) < CHUNK, *(per_column(beta_s.at[half]) for half in both))
    X_s[...] = (X * b_columns).astype(jnp.bfloat16)
    plgpu.commit_smem()
    Y_s[...] = times(Q, X_s).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def leave_squares(i: int) -> None:
        at = 2 * pair + i
        plgpu.copy_smem_to_gmem(X_s.at[both[i]], XY.at[h, at, upper])
        plgpu.copy_smem_to_gmem(Y_s.at[both[i]], XY.at[h, at, lower])

    for_both(leave_squares)
    plgpu.wait_smem_to_gmem(0)


def _edges(_: Any, g: Any, D: Any, to: ir.Value, *, column: int) -> None:
    """Sums of g over halves of 16 tokens, which are a warp's: what stands in a later half's last row, and what lacks the
    first token in an earlier half's first. A thread has rows lane / 4 and 8 further, columns 2 (lane % 4) and the next."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

    def c(x: int) -> ir.Value:
        return utils.c(x, i32)

    def equal(x: ir.Value, y: ir.Value) -> ir.Value:
        return arith.cmpi(arith.CmpIPredicate.eq, x, y)

    thread = utils.thread_idx()
    warp, lane = arith.andi(arith.shrui(thread, c(5)), c(3)), arith.andi(thread, c(31))
    later = equal(arith.andi(warp, c(1)), c(1))
    with utils.when(equal(arith.shrui(lane, c(2)), arith.select(later, c(7), c(0)))):
        first = arith.addi(arith.shli(arith.andi(lane, c(3)), c(1)), c(column))
        for j in range(PART // 8):
            at = (0, j, 0, 0, slice(None), 0, 0, 0, 0)
            (g_first, _), (D_first, D_last) = (x.registers[at] for x in (g, D))
            value = arith.select(later, D_last, arith.negf(arith.addf(g_first, D_first)))
            where = arith.index_cast(index, warp), arith.index_cast(index, arith.addi(first, c(8 * j)))
            vector.store(value, to, list(where))


def refuse(x: Raw, lower_bound: float | None, precision: str) -> str | None:
    """Why this form cannot take what `kda_prefill.refuse` lets pass, or None."""
    for name in ("q", "k", "v", "f", "b"):
        if (dtype := getattr(x, name).dtype) != jnp.bfloat16:
            return f"{name}={dtype}: allowed is bfloat16"
    if x.q.shape[-1] != K:
        return f"K={x.q.shape[-1]}: allowed is {K}"
    if lower_bound is None:
        return "lower_bound=None: allowed is a number"
    if precision != "default":
        return f"precision={precision!r}: allowed is 'default'"
    return no_mosaic()


def prepare(x: Raw, chunks: Chunks, lower_bound: float, interpret: bool = False) -> Work:
    """All that does not depend on the state. What it cannot take `refuse` names, and `kda_prefill.refuse`."""
    T, H, _ = x.q.shape
    # Odd, if need be by an unused one: for an even number ptxas takes 197 registers, and two blocks fit, not three.
    n = chunks.start.shape[0] // 2 * 2 + 1
    if T < CHUNK:  # no tile fits
        x = x._replace(**{name: jnp.pad(getattr(x, name), [(0, CHUNK - T), (0, 0), (0, 0)]) for name in "qkf"})
    pairs, bf16 = pl.cdiv(n, 2), jnp.bfloat16
    start, stop = (jnp.pad(a, (0, n + 1 - a.shape[0])) for a in (chunks.start, chunks.stop))
    spans = jnp.concatenate([a.reshape(pairs, 2) for a in (start, stop - start)], axis=1)
    at = start[:, None] + jnp.arange(CHUNK)
    beta = jax.nn.sigmoid(x.b.at[at].get(mode="clip").astype(jnp.float32))
    beta = jnp.where((at < stop[:, None])[..., None], beta, 0)
    beta = jnp.moveaxis(beta, 2, 0).reshape(H, pairs, ROWS)
    rate = -LOG2E * jnp.maximum(jnp.exp(x.A_log), 1e-20)
    least = max(-lower_bound * LOG2E, 1e-30)  # log2 of the smallest decay, not 0
    bias = x.dt_bias * rate[:, None] - math.log2(least)

    def out(rows: int, width: int, dtype: Any = bf16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((H, n, rows, width), dtype)

    def numbers(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.float32)

    three = [_tile(K // PART, ROWS, PART, swizzle=2 * PART)] * 3
    split = [_tile(ROWS, PART, swizzle=2 * CHUNK)] * 2
    folded = [[_tile(ROWS, CHUNK, swizzle=2 * CHUNK, dtype=d)] * 2 for d in (jnp.float16, bf16)]
    scratch = [
        three, numbers(ROWS), numbers(K), numbers(4, K), plgpu.RefUnion(split, *folded),
        plgpu.Barrier(num_arrivals=5), plgpu.Barrier(num_arrivals=9),
    ]  # fmt: skip
    if not interpret:
        scratch[0] = plgpu.RefUnion(three, [_tile(K // PART, ROWS, PART, swizzle=2 * PART, tiled=False)] * 3)
    else:  # it has no left operands in registers, and memory of one view
        scratch += [folded[1][0], folded[0][0]]
    call = plgpu.kernel(
        functools.partial(_kernel, n=n, offset=1 / least),
        out_type=[out(2 * CHUNK, K), out(CHUNK, K), out(2 * CHUNK, CHUNK), out(2, K, jnp.float32)],
        scratch_types=scratch, grid=(pairs, H), grid_names=("pair", "head"),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="kda_prepare_mosaic",
    )  # fmt: skip
    return Work(*call(spans, rate, beta, bias, x.q, x.k, x.f))
