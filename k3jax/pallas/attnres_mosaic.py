"""The Mosaic form of `attnres.mix_norm`, for many tokens on Hopper: TMA brings every row once, through a ring in shared memory.

What lies in registers cannot be under way too, and memory is kept busy only by what is under way. So rows wait in shared
memory, of the next tokens too: a block stays on its multiprocessor, takes every `blocks`-th token, and asks for rows as
soon as their places in the ring are free. Two warpgroups hold half of each source of a token in registers, as bfloat16,
from its score to its share of the mixture: shared memory is read once, and free again when the scores are known.

On H200s (2026-11-30 and 12-01, benchmarks/results), us at T=8192 and D=7168, and with a pending addition:

    R    Triton       here         memory at 4.3 TB/s
    9    412   479    301   390    273   328
    5    298   348    185   241    164   218
    2    120   192    102   171     82   137
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as _fragments
from jax.experimental.mosaic.gpu import utils as _utils
from jax.experimental.pallas import mosaic_gpu as _plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, nvvm, vector
from jaxtyping import Array, BFloat16, Float

from k3jax.pallas import no_mosaic

plgpu: Any = _plgpu  # what the three declare differs between versions of jax
utils: Any = _utils
fragments: Any = _fragments

# Two ways to the two float32, {0}0 and {0}1, in a word of bfloat16, {1}. What one has widened, the compiler keeps in twice
# the registers where it meets the same again; the other it does not recognise.
SHIFT = "shl.b32 {0}0, {1}, 16; and.b32 {0}1, {1}, 0xffff0000;"
PERMUTE = "prmt.b32 {0}0, {1}, 0, 0x1044; prmt.b32 {0}1, {1}, 0, 0x3244;"

_LINE = 256  # channels: the most that TMA takes along an axis
_GROUPS = 2  # warpgroups, which share a row
_LANES, _WARPS = 32, 4 * _GROUPS
_WIDTHS = 2 * _LINE  # a row is a multiple of it, so that each group has whole lines
_SOURCES = _LANES // 2  # at most: a lane for each of two sums
_HELD = 13 * 7168  # bfloat16 in a block's registers, at most: R rows, and two in float32
_ROWS = 32  # of the ring, at most: each has a barrier, of which Mosaic allows so many
_SHARED = 222 * 1024  # bytes of the ring, at most; _HELD lets a token's rows be in it together
_SCALAR = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))


class Tuning(NamedTuple):
    """Launch parameters."""

    blocks: int  # at most
    rows: int  # of the ring: as many fit, and a token's at least
    refill: int  # places are filled again after so many sources, and when the scores are known


def choose(sources: int) -> Tuning:
    """By what was timed on an H200 with 8192 tokens of 7168 channels: 132 multiprocessors hold a block each, or two.

    A token of many sources fills most of the ring: were none of its places filled before the scores, few rows would be under
    way (9 sources and a pending addition take 388 us then). Of few sources there are rows of several tokens.
    """
    if sources <= 2:
        return Tuning(264, 7, sources)
    return Tuning(132, 15, 5) if sources > 5 else Tuning(132, 10, sources)


class _Plan(NamedTuple):
    """What is static."""

    width: int
    eps: float
    refill: int
    interpret: bool

    @property
    def lines(self) -> int:  # of a group's half of a row
        return self.width // _LINE // _GROUPS

    @property
    def layout(self) -> Any:
        """Of a half: a thread's channels lie in twos or fours."""
        return plgpu.Layout.WG_STRIDED((self.lines, _LINE), vec_size=4 if self.lines % 2 == 0 else 2)


class _Sums(NamedTuple):
    """Sums over a row, each warpgroup giving those of its half.

    Both methods write for all warps, let all threads meet, and read. They are called in turns: who writes for one has met
    all others since they read.
    """

    plan: _Plan
    group: Array
    scores: Any  # shared memory for `score`
    totals: Any  # and for `total`
    met: Any  # a barrier, when interpreted

    def pair(self, square: Array, product: Array) -> Array:
        """The sums of both over a warp, one in the even lanes and one in the odd: half the shuffles."""
        if self.plan.interpret:
            return jnp.stack([square.sum(), product.sum()])

        def sums(_: Any, *halves: Any) -> Any:
            even, odd = map(_own, halves)
            mine, other = arith.select(_odd(), odd, even), arith.select(_odd(), even, odd)
            return _scalar(_over_lanes(arith.addf(mine, utils.shfl_bfly(other, 1)), (2, 4, 8, 16)))

        return _inline(sums, [self.plan.layout] * 2, _SCALAR)(square, product)

    def score(self, pairs: Sequence[Array]) -> list[Array]:
        """Of every source, from its pair: all of them in one exchange, each sum in a lane of its own."""
        R, width, eps = len(pairs), self.plan.width, self.plan.eps
        if self.plan.interpret:
            self.scores[self.group, :R] = jnp.stack(pairs)
            self.meet()
            square, product = self.scores[0, :R].T + self.scores[1, :R].T
            return list(product * lax.rsqrt(square / width + eps))

        def scores(_: Any, to: ir.Value, *pairs: Any) -> list[Any]:
            value, *others = (pair.registers.item() for pair in pairs)
            for r, other in enumerate(others, 1):
                mine = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(_lane(), _i32(1)), _i32(r))
                value = arith.select(mine, other, value)
            memref.store(value, to, _at(utils.warp_idx(), _lane()))
            gpu.barrier()
            mine = _sum(memref.load(to, _at(_i32(warp), _lane())) for warp in range(_WARPS))
            other = utils.shfl_bfly(mine, 1)
            square, product = arith.select(_odd(), other, mine), arith.select(_odd(), mine, other)
            square = arith.addf(arith.mulf(square, utils.c(1 / width, _f32())), utils.c(eps, _f32()))
            score = arith.mulf(product, utils.inline_ptx("rsqrt.approx.ftz.f32 $0, $1;", square, result_types=_f32()))
            mask, last = _i32(-1), _i32(_LANES - 1)
            return [_scalar(nvvm.shfl_sync(mask, score, _i32(2 * r), last, nvvm.ShflKind.idx)) for r in range(R)]

        types = [plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * R]
        return _inline(scores, types, [_SCALAR] * R)(self.scores, *pairs)

    def total(self, x: Array) -> Array:
        if self.plan.interpret:
            self.totals[self.group] = x.sum()
            self.meet()
            return self.totals[0] + self.totals[1]

        def total(_: Any, to: ir.Value, half: Any) -> Any:
            memref.store(_over_lanes(_own(half), (1, 2, 4, 8, 16)), to, _at(utils.warp_idx()))
            gpu.barrier()
            return _scalar(_sum(memref.load(to, _at(_i32(warp))) for warp in range(_WARPS)))

        return _inline(total, [plgpu.RefType(), self.plan.layout], _SCALAR)(self.totals, x)

    def meet(self) -> None:
        """All threads."""
        if self.plan.interpret:
            plgpu.commit_smem()  # its detector of races wants that between reads and TMA's writes; a barrier is enough
            plgpu.barrier_arrive(self.met)
            plgpu.barrier_wait(self.met)
            return

        @plgpu.inline_mgpu()
        def all_threads(_: Any) -> None:
            gpu.barrier()

        all_threads()


def _wide(x: Array, plan: _Plan, way: str = SHIFT) -> Array:
    """In float32."""
    if plan.interpret:
        return x.astype(jnp.float32)

    def widened(register: ir.Value) -> ir.Value:
        n = ir.VectorType(register.type).shape[0]
        words = _elements(vector.bitcast(ir.VectorType.get((n // 2,), _i32(0).type), register))
        code, types = way.format("$", "$2"), [_f32()] * 2
        wide = [half for word in words for half in utils.inline_ptx(code, word, result_types=types)]
        return vector.from_elements(ir.VectorType.get((n,), _f32()), wide)

    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plan.layout)
    return _inline(lambda _, x: x._pointwise(widened), [plan.layout], result)(x)


# What one thread does.


def _inline(f: Any, args: Sequence[Any], result: Any) -> Any:
    return plgpu.inline_mgpu(arg_types=tuple(args), return_type=result)(f)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _i32(x: int) -> ir.Value:
    return utils.c(x, ir.IntegerType.get_signless(32))


def _at(*indices: ir.Value) -> list[ir.Value]:
    return [arith.index_cast(ir.IndexType.get(), index) for index in indices]


def _elements(register: ir.Value) -> list[ir.Value]:
    n = ir.VectorType(register.type).shape[0]
    return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(n)]


def _scalar(x: ir.Value) -> Any:
    """A thread's own, which need not be that of others."""
    return fragments.FragmentedArray.splat(x, (), is_signed=None)


def _lane() -> ir.Value:
    return arith.andi(utils.thread_idx(), _i32(_LANES - 1))


def _odd() -> ir.Value:
    """Whether the lane is."""
    return arith.trunci(ir.IntegerType.get_signless(1), utils.thread_idx())


def _sum(values: Iterable[ir.Value]) -> ir.Value:
    """Products among the values may be fused with it."""
    return functools.reduce(functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract), values)


def _own(half: Any) -> ir.Value:
    """The sum of a thread's channels, by four that do not wait for each other."""
    channels = [channel for register in half.registers for channel in _elements(register)]
    return _sum(_sum(channels[i::4]) for i in range(min(4, len(channels))))


def _over_lanes(x: ir.Value, distances: Sequence[int]) -> ir.Value:
    return functools.reduce(lambda x, distance: arith.addf(x, utils.shfl_bfly(x, distance)), distances, x)


# The kernel.


def _kernel(
    blocks, running, pending, norm, query, gain, x_ref, sum_ref, weights_ref, ring, full, scores, totals, met, *, plan: _Plan
) -> None:  # fmt: skip
    block, group, stride = lax.axis_index("block"), lax.axis_index("group"), lax.axis_size("block")
    sources = [*blocks, running, *([] if pending is None else [pending])]
    N, R, T, S = len(sources), len(blocks) + 1, x_ref.shape[0], ring.shape[0]
    own = pl.ds(group * plan.lines, plan.lines)
    sums = _Sums(plan, group, scores, totals, met)

    def load(ref: Any) -> Array:
        return plgpu.load(ref.at[own], layout=plan.layout)

    def place(begin: Array, r: int) -> Array:
        """In the ring, of a token's row, or of the one S rows further on."""
        slot = begin + r % S
        return jnp.where(slot >= S, slot - S, slot)

    def fetch(t: Array, begin: Array, rows: range) -> None:
        """Rows by their distance from the first row of token t, whose place is `begin`."""

        @pl.when(group == 0)
        def _() -> None:
            for r in rows:
                token, slot = t + r // N * stride, place(begin, r)

                @pl.when(token < T)
                def _(r: int = r, token: Array = token, slot: Array = slot) -> None:
                    plgpu.copy_gmem_to_smem(sources[r % N].at[token], ring.at[slot], full.at[slot])

    def row(begin: Array, r: int) -> Array:
        slot = place(begin, r)
        plgpu.barrier_wait(full.at[slot])
        return load(ring.at[slot])

    fetch(block, jnp.int32(0), range(S))
    w = load(norm).astype(jnp.float32) * load(query).astype(jnp.float32)

    def token(i: Array, begin: Array) -> Array:
        t = block + i * stride
        held, pairs, free = [], [], 0
        for r in range(R):
            s = row(begin, r)
            if r == R - 1 and pending is not None:
                s = (_wide(s, plan) + _wide(row(begin, R), plan)).astype(s.dtype)
                sum_ref[t, own] = s
            wide = _wide(s, plan)
            pairs.append(sums.pair(wide * wide, wide * w))
            held.append(s)
            if (r + 1) % plan.refill == 0 and r + 1 < R:
                sums.meet()  # whose loads are done
                fetch(t, begin, range(S + free, S + r + 1))
                free = r + 1
        score = sums.score(pairs)
        fetch(t, begin, range(S + free, S + N))
        gains = load(gain).astype(x_ref.dtype)  # again for every token: a cache has it, and registers are few
        highest = functools.reduce(jnp.maximum, score)
        p = [jnp.exp(a - highest) for a in score]
        whole = 1 / functools.reduce(jnp.add, p)
        p = [a * whole for a in p]
        if weights_ref is not None:

            @pl.when(group == 0)
            def _() -> None:
                for r, a in enumerate(p):
                    weights_ref[t, r] = a

        m = functools.reduce(jnp.add, (_wide(s, plan, PERMUTE) * a for s, a in zip(held, p, strict=True)))
        m = _wide(m.astype(x_ref.dtype), plan)
        scale = lax.rsqrt(sums.total(m * m) / plan.width + plan.eps)
        y = _wide((m * scale).astype(x_ref.dtype), plan)
        x_ref[t, own] = (_wide(gains, plan) * y).astype(x_ref.dtype)
        return lax.rem(begin + N, S)

    lax.fori_loop(0, (T - block + stride - 1) // stride, token, jnp.int32(0))


def refuse(running: Array, blocks: Sequence[Array]) -> str | None:
    """Why `mix_norm` here cannot take arrays that `attnres.refuse` lets pass, or None."""
    D, R = running.shape[1], len(blocks) + 1
    if running.dtype != jnp.bfloat16:
        return f"running={running.dtype}: allowed is bfloat16"
    if D % _WIDTHS or 5 * D > _HELD:
        return f"D={D}: allowed are multiples of {_WIDTHS} up to {_HELD // 5 // _WIDTHS * _WIDTHS}"
    if R > (most := min(_SOURCES, _HELD // D - 4)):
        return f"R={R} D={D}: allowed is R from 1 to {most}"
    return no_mosaic()


def mix_norm(
    running: BFloat16[Array, "T D"],
    pending: BFloat16[Array, "T D"] | None,
    blocks: Sequence[BFloat16[Array, "T D"]],
    norm: Float[Array, "D"],
    query: Float[Array, "D"] | Float[Array, "1 D"],
    gain: Float[Array, "D"],
    eps: float,
    *,
    weights: bool = False,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[BFloat16[Array, "T D"], BFloat16[Array, "T D"], Float[Array, "T R"] | None]:
    """As `attnres.mix_norm`, which is the door, and rounded at the same places. Raises ValueError for what `refuse` names."""
    if reason := refuse(running, blocks):
        raise ValueError(reason)
    (T, D), R = running.shape, len(blocks) + 1
    tuning = tuning or choose(R)
    plan = _Plan(D, eps, tuning.refill, interpret)
    rows = max(R + (pending is not None), min(tuning.rows, _ROWS, _SHARED // (2 * D)))
    row = jax.ShapeDtypeStruct((T, D // _LINE, _LINE), running.dtype)
    shapes = {"x": row} | ({} if pending is None else {"sum": row})
    if weights:
        shapes["weights"] = jax.ShapeDtypeStruct((T, R), jnp.float32)

    def kernel(blocks, running, pending, norm, query, gain, *outs, **scratch) -> None:
        out = dict(zip(shapes, outs, strict=True))
        outs = (out.get(name) for name in ("x", "sum", "weights"))
        _kernel(blocks, running, pending, norm, query, gain, *outs, **scratch, plan=plan)

    call = plgpu.kernel(
        kernel, out_type=list(shapes.values()), grid=(min(T, tuning.blocks),), grid_names=("block",), num_threads=_GROUPS,
        thread_name="group", kernel_name="attnres_mosaic", interpret=plgpu.InterpretGPUParams() if interpret else None,
        scratch_types={
            "ring": plgpu.SMEM((rows, D // _LINE, _LINE), running.dtype),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=rows),
            "scores": plgpu.SMEM((_GROUPS, _SOURCES, 2) if interpret else (_WARPS, _LANES), jnp.float32),
            "totals": plgpu.SMEM((_WARPS,), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=_GROUPS) if interpret else None,
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )  # fmt: skip
    lined = jax.tree.map(lambda a: a.reshape(*a.shape[:-1], -1, _LINE), (tuple(blocks), running, pending))
    outs = call(*lined, *(a.reshape(-1, _LINE) for a in (norm, query, gain)))
    outs = {name: a.reshape(T, -1) for name, a in zip(shapes, outs, strict=True)}
    return outs.get("sum", running), outs["x"], outs.get("weights")
