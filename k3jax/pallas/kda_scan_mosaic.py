"""The scan of `kda_scan`, with decays from the chunks' middles, in Mosaic GPU for Hopper.

With groups = V / 64 a block takes all of a head's S through a row, so that what `kda_prepare` left is read once. One warpgroup
loads it by TMA into a ring of stages in shared memory; the others hold 64 rows of S each in registers, and share it. S, E and
E X^T are left operands of `wgmma`; S has been decayed into the chunk's middle:

    E = v^T - S k^T        o^T = S q^T + E Y^T        S <- (S + (E X^T) k') out

The products of o, which nobody waits for, run beside the others. Decays are exponentiated once, by the warpgroup that loads.
Only a row's last chunk can have fewer tokens: it stands after the loop, where tokens of the next row are told apart by a
select and not written over.

On an H200 (K = V = 128; a trial, benchmarks/results/notes.md) a row of 8,192 tokens took 0.326 ms with 96 heads, and `kda_scan`
0.470. With 12 heads and groups = 1 it took 0.214 ms, 0.84 us a chunk, and `kda_scan` in 8 segments 0.176: chunks follow one
another, so few heads leave most of a card idle, and this form does not cut rows into segments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as _plgpu
from jaxtyping import Array

from k3jax.pallas.kda_prepare import CHUNK, RAISED, Chunks, Work
from k3jax.pallas.kda_scan import Rows, Snapshots

plgpu: Any = _plgpu  # what the two declare differs between versions of jax

K = 128  # of keys
GROUP = 64  # rows of S that a warpgroup holds: the height of a wgmma
_HALVES = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)  # k and q, X and Y


class Tuning(NamedTuple):
    """Launch parameters."""

    groups: int = 2  # warpgroups of a block that hold S
    stages: int = 4


class _Tokens(NamedTuple):
    """Tokens by GROUP columns in shared memory, which is one tile across: both views give it the same order.

    TMA takes whole tiles, counted from where an array begins, so copies that start at any token must be told of none.
    """

    tiled: Any  # for registers
    plain: Any  # for TMA


class _Shared(NamedTuple):
    """Shared memory. A stage has what a chunk needs."""

    kq: Any  # [stages, 2 CHUNK, K]
    ku: Any  # [stages, CHUNK, K]
    XY: Any  # [stages, 2 CHUNK, CHUNK]
    v: Any  # _Tokens of [stages, groups, CHUNK, GROUP]
    decays: Any  # [stages, 2, K], into the chunk's middle and out of it
    full: Any  # a barrier a stage
    empty: Any
    o: Any  # _Tokens of [groups, 2, CHUNK, GROUP]
    rest: Any  # [groups, CHUNK, GROUP], outputs of a chunk with fewer tokens
    left: Any  # [groups, GROUP, K], or None: interpreted, registers hold no left operand, and no accumulator begins with S


class _Row(NamedTuple):
    """What a block goes through: the chunks of a row, in one head."""

    h: Array
    columns: Array  # of v, the first one
    begin: Array  # tokens
    end: Array
    first: Array  # its first chunk

    @property
    def whole(self) -> Array:
        """Chunks without a place that has no token."""
        return (self.end - self.begin) // CHUNK

    @property
    def rest(self) -> Array:
        """Tokens of the chunk after them."""
        return (self.end - self.begin) % CHUNK


def _load(work: Work, v: Any, to: _Shared, row: _Row, tuning: Tuning) -> None:
    """Chunk after chunk, as stages become free."""

    def log2_decays(i: Array) -> Array:  # also after the last chunk, where nobody looks at them
        return work.halves[row.h, jnp.minimum(row.first + i, work.halves.shape[1] - 1)]

    def one(i: Array, sums: Array) -> Array:
        stage, at, tokens = lax.rem(i, tuning.stages), (row.h, row.first + i), pl.ds(row.begin + i * CHUNK, CHUNK)
        pl.when(i >= tuning.stages)(lambda: plgpu.barrier_wait(to.empty.at[stage]))
        copies = [(x.at[at], y.at[stage]) for x, y in ((work.kq, to.kq), (work.ku, to.ku), (work.XY, to.XY))]
        for group in range(tuning.groups):
            columns = pl.ds(row.columns + group * GROUP, GROUP)
            copies.append((v.at[tokens, row.h, columns], to.v.plain.at[stage, group]))
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, to.full.at[stage])
        to.decays[stage] = jnp.exp2(sums)
        plgpu.barrier_arrive(to.full.at[stage])
        return log2_decays(i + 1)  # a chunk ahead: plain loads are slow

    chunks = row.whole + (row.rest > 0).astype(jnp.int32)
    lax.fori_loop(0, chunks, one, log2_decays(jnp.int32(0)))

    @pl.loop(jnp.maximum(chunks - tuning.stages, 0), chunks)
    def _drained(i: Array) -> None:  # every arrival is waited for, or Pallas' interpreter objects
        plgpu.barrier_wait(to.empty.at[lax.rem(i, tuning.stages)])


class _Group(NamedTuple):
    """A warpgroup that holds GROUP rows of S."""

    index: Array
    columns: Array  # of v and o, the first of this group's
    row: _Row
    tuning: Tuning
    shared: _Shared
    o: Any  # all outputs

    def product(self, left: Array, right: Any, onto: Any) -> None:
        """onto += left right, begun."""
        operand: Any = left
        if self.shared.left is not None:
            operand = self.shared.left.at[self.index, :, : left.shape[1]]
            operand[...] = left
        plgpu.wgmma(onto, operand, right)

    def decayed(self, S: Array, stage: Array, half: int) -> Array:
        decay = self.shared.decays.at[stage, half]
        decay = plgpu.load(decay, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return S * lax.broadcast_in_dim(decay, S.shape, (1,))

    def chunk(self, i: Array, S: Array, tokens: Array | None = None) -> Array:
        """S after chunk i, whose outputs are on their way; `tokens` is their number where it is not CHUNK."""
        stage = lax.rem(i, self.tuning.stages)
        kq, ku, XY = (a.at[stage] for a in (self.shared.kq, self.shared.ku, self.shared.XY))
        (k, q), (X, Y) = ([a.at[half].transpose((1, 0)) for half in _HALVES] for a in (kq, XY))
        plgpu.barrier_wait(self.shared.full.at[stage])
        v = self.shared.v.tiled.at[stage, self.index].transpose((1, 0))
        v = plgpu.load(v, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        if tokens is not None:
            place = plgpu.broadcasted_iota(jnp.int32, v.shape, 1, layout=plgpu.Layout.WGMMA)
            v = jnp.where(place < tokens, v, 0.0)
        S = self.decayed(S, stage, 0)
        low = S.astype(jnp.bfloat16)

        def products(predicted: Any, delta: Any, o: Any) -> Array:
            self.product(low, k, predicted)
            self.product(low, q, o)
            E = (v - plgpu.wgmma_accumulator_load(predicted, wait_n=1)).astype(jnp.bfloat16)
            self.product(E, X, delta)
            self.product(E, Y, o)
            change = plgpu.wgmma_accumulator_load(delta, wait_n=1).astype(jnp.bfloat16)

            def update(S: Any) -> None:
                self.product(change, ku, S)
                outputs = plgpu.wgmma_accumulator_load(o, wait_n=1) * (1 / RAISED)
                self.store(i, outputs.astype(jnp.bfloat16), tokens)

            if self.shared.left is None:
                return pl.run_state(update)(plgpu.ACC.init(S))
            return S + pl.run_scoped(lambda new: (update(new), new[...])[1], plgpu.ACC(S.shape))

        S = self.decayed(pl.run_scoped(products, *[plgpu.ACC((GROUP, CHUNK))] * 3), stage, 1)
        plgpu.barrier_arrive(self.shared.empty.at[stage])
        return S

    def store(self, i: Array, o: Array, tokens: Array | None) -> None:
        """Writes a chunk's outputs, given as [GROUP, CHUNK]."""
        at = self.row.begin + i * CHUNK
        if tokens is None:
            turn = self.index, lax.rem(i, 2)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            self.shared.o.tiled.at[turn].transpose((1, 0))[...] = o
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.shared.o.plain.at[turn], self.to(at, CHUNK))
        else:  # a copy has a fixed size
            rest = self.shared.rest.at[self.index]
            rest.transpose((1, 0))[...] = o
            plgpu.commit_smem()

            @pl.loop(0, tokens)
            def _copy(j: Array) -> None:
                plgpu.copy_smem_to_gmem(rest.at[pl.ds(j, 1)], self.to(at + j, 1))

    def to(self, token: Array, size: int) -> Any:
        return self.o.at[pl.ds(token, size), self.row.h, pl.ds(self.columns, GROUP)]

    def padding(self) -> None:
        """Zeros after the row's end."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        zeros = plgpu.layout_cast(jnp.zeros((GROUP, CHUNK), jnp.bfloat16), plgpu.Layout.WGMMA)
        self.shared.o.tiled.at[self.index, 0].transpose((1, 0))[...] = zeros
        plgpu.commit_smem()

        @pl.loop(0, (self.o.shape[0] - self.row.end + CHUNK - 1) // CHUNK)
        def _zero(i: Array) -> None:
            plgpu.copy_smem_to_gmem(self.shared.o.plain.at[self.index, 0], self.to(self.row.end + i * CHUNK, CHUNK))


def _kernel(
    starts, firsts, slots, computed, after_ref, keep_ref, kq, ku, XY, halves, v, pool, o,
    *, shared: _Shared, tuning: Tuning, keeps: bool,
) -> None:  # fmt: skip
    head, block, b, group = map(lax.axis_index, ("head", "block", "row", "group"))
    row = _Row(head, block * tuning.groups * GROUP, starts[b], starts[b + 1], firsts[b])
    views = (_Tokens(*x) if shared.left is None else _Tokens(x, x) for x in (shared.v, shared.o))
    shared = shared._replace(**dict(zip("vo", views, strict=True)))

    @pl.when(group == tuning.groups)
    def _loads() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _load(Work(kq, ku, XY, halves), v, shared, row, tuning)

    @pl.when(group < tuning.groups)
    def _computes() -> None:
        plgpu.set_max_registers(232, action="increase")
        part = _Group(group, row.columns + group * GROUP, row, tuning, shared, o)
        rows, slot = pl.ds(part.columns, GROUP), slots[b]

        def owned(slot: Array, wanted: Array) -> Array:
            return wanted & (slot >= 0) & (slot < pool.shape[0])

        def keep(slot: Array, S: Array, wanted: Array) -> None:
            @pl.when(owned(slot, wanted))
            def _write() -> None:
                pool[slot, row.h, rows, :] = S

        def until(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            """On to the next snapshot, if the row has it."""
            S, at = carry
            after = after_ref[b, j]
            here = (after % CHUNK == 0) & (after > at * CHUNK) & (after <= row.end - row.begin)
            stop = jnp.where(here, after // CHUNK, at)
            S = lax.fori_loop(at, stop, part.chunk, S)
            keep(keep_ref[b, j], S, here)
            return S, stop

        begun, at = owned(slot, computed[b] > 0), jnp.int32(0)
        S = pool.at[jnp.where(begun, slot, 0), row.h, rows]
        S = jnp.where(begun, plgpu.load(S, layout=plgpu.Layout.WGMMA, optimized=False), 0.0)
        if keeps:
            S, at = lax.fori_loop(0, after_ref.shape[1], until, (S, at))
        S = lax.fori_loop(at, row.whole, part.chunk, S)
        S = lax.cond(row.rest > 0, lambda S: part.chunk(row.whole, S, row.rest), lambda S: S, S)
        keep(slot, S, row.end > row.begin)
        pl.when(b == slots.shape[0] - 1)(part.padding)
        plgpu.wait_smem_to_gmem(0)


def refuse(v: Array, tuning: Tuning) -> str | None:
    """Why this form of `scan` cannot take what `kda_prepare_mosaic.refuse` lets pass, or None."""
    for (name, value), most in zip(tuning._asdict().items(), (2, 5), strict=True):  # what fits a multiprocessor
        if not 1 <= value <= most:
            return f"tuning.{name}={value}: allowed are 1 to {most}"
    if v.shape[-1] % (tuning.groups * GROUP):
        return f"V={v.shape[-1]}: allowed are multiples of {tuning.groups * GROUP}"
    return None


def scan(
    S_pool: Array, work: Work, v: Array, chunks: Chunks, rows: Rows, snapshots: Snapshots | None, tuning: Tuning,
    interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """The pool, in place if donated, and outputs [T, H, V] in bfloat16. Inside shard_map check_vma must be False, for `jax.new_ref`."""
    B, (T, H, V), (groups, stages) = rows.slots.shape[0], v.shape, tuning
    tables = snapshots or [jnp.zeros((B, 1), jnp.int32)] * 2  # an array must have a size
    v = jnp.pad(v, ((0, max(CHUNK - T, 0)), (0, 0), (0, 0)))  # an array must hold what a copy takes

    def tiles(*shape: int, swizzle: int = 128, tiled: bool = True) -> Any:
        """bfloat16 as wgmma takes it: of operands swizzle / 2 tokens at a time."""
        tiling = (plgpu.TilingTransform((8, swizzle // 2)),) if tiled else ()
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=(*tiling, plgpu.SwizzleTransform(swizzle)))

    def tokens(*shape: int) -> Any:
        """Two views; the interpreter has but one, and needs no other."""
        tiled, plain = (tiles(*shape, CHUNK, GROUP, tiled=tiled) for tiled in (True, False))
        return tiled if interpret else plgpu.RefUnion(tiled, plain)

    shared = _Shared(
        kq=tiles(stages, 2 * CHUNK, K), ku=tiles(stages, CHUNK, K, swizzle=64),
        XY=tiles(stages, 2 * CHUNK, CHUNK, swizzle=64), v=tokens(stages, groups),
        decays=plgpu.SMEM((stages, 2, K), jnp.float32), o=tokens(groups, 2),
        rest=plgpu.SMEM((groups, CHUNK, GROUP), jnp.bfloat16),
        left=plgpu.SMEM((groups, GROUP, K), jnp.bfloat16) if interpret else None,
        full=plgpu.Barrier(num_arrivals=3 + groups + 1, num_barriers=stages),  # copies, and the decays
        empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )  # fmt: skip
    pool, lane = jax.new_ref(S_pool), plgpu.LoweringSemantics.Lane
    call = plgpu.kernel(
        functools.partial(_kernel, tuning=tuning, keeps=bool(snapshots)), out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types={"shared": shared}, grid=(V // (groups * GROUP), H, B), grid_names=("block", "head", "row"),
        num_threads=groups + 1, thread_name="group", kernel_name="kda_scan_mosaic",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=lane),
    )  # fmt: skip
    o = call(rows.starts, chunks.first, rows.slots, rows.num_computed, *tables, *work, v, pool)
    return jax.freeze(pool), o[:T]
