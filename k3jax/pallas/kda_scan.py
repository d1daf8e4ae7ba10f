"""The state of a KDA prefill from chunk to chunk, with what `kda_prepare` made of each.

With S a head's state as [V, K], always on the left, where it stays in registers:

    E = vᵀ - S (k exp G)ᵀ        oᵀ = S (q exp G)ᵀ + E Yᵀ        S <- S diag(exp G_C) + E Xᵀ (k exp(G_C - G))

Where decays are counted from the chunk's middle, the same tiles serve: S moves to the middle first.

Few heads leave most of a card idle, as chunks follow one another. A long row is then cut into segments: `survey` takes
each one's end from a state of 0 (h) and from the identity (M), `join` gives each the state S M + h of those before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from k3jax.pallas.common import launch
from k3jax.pallas.kda_prepare import CHUNK, RAISED, Chunks, Unit, Work


class Rows(NamedTuple):
    """Where each row's tokens and memory are. int32."""

    starts: Int[Array, "B+1"]  # 0, where each next row begins in the packed tokens, and where the last one ends
    slots: Int[Array, "B"]  # all different, or out of range: such a row starts from zero and leaves no state
    num_computed: Int[Array, "B"]  # 0 starts from zero, whatever the slot holds


class Snapshots(NamedTuple):
    """States to keep on the way. int32."""

    after: Int[
        Array, "B M"
    ]  # tokens of the row in this call: must rise; 0 and what is no multiple of CHUNK is never met
    slots: Int[Array, "B M"]  # of the same pool; out of range: not kept


class Tuning(NamedTuple):
    """Launch parameters."""

    prepare_warps: int = 2
    scan_warps: int = 4
    scan_stages: int = 3
    rows: int = 64  # of S a program of `scan`
    segments: int = 1  # of a row


class _Form(NamedTuple):
    """What is static of a scan."""

    rows: int  # of S a program
    anchored: bool  # decays are counted from the chunks' middles
    segments: int
    snapshots: int  # of a row
    unit: Unit


class _Streams(NamedTuple):
    """What is read chunk by chunk."""

    kq: jax.Ref
    ku: jax.Ref
    XY: jax.Ref
    halves: jax.Ref
    v: jax.Ref


class _Part(NamedTuple):
    """What one program goes through: some rows of a head's S over the chunks of a run."""

    h: Array
    rows: Array  # of S, which are columns of v
    inside: Array  # whether S has them
    begin: Array  # tokens of the run
    end: Array
    first: Array  # its first chunk

    @property
    def chunks(self) -> Array:
        return (self.end - self.begin + CHUNK - 1) // CHUNK

    def of(self, ref: Any, index: Array) -> Any:
        """These rows of state `index` of a pool."""
        return ref.at[index, self.h, self.rows[:, None], jnp.arange(ref.shape[-1])[None, :]]

    def of_all(self, ref: Any) -> Array:
        return self.inside[:, None] & jnp.ones((1, ref.shape[-1]), bool)


def _halves(a: Array) -> tuple[Array, Array]:
    """The two halves of [rows, 2 CHUNK], which no slice of registers can give. To add -0 is free, to add 0 is not."""
    a = a.reshape(a.shape[0], 2, CHUNK)
    second = lax.broadcasted_iota(jnp.int32, a.shape, 1) == 1
    return jnp.sum(jnp.where(second, -0.0, a), axis=1), jnp.sum(jnp.where(second, a, -0.0), axis=1)


def _through(
    x: _Streams, part: _Part, form: _Form, S: Array, start: Array | int, stop: Array, o_ref: jax.Ref | None
) -> Array:
    """S after chunks [start, stop) of the run, their outputs written if there is where."""
    unit, chunks = form.unit, part.chunks

    def decays(i: Array) -> tuple[Array, Array]:
        """Log2-decays of the chunk's halves."""
        exists = jnp.broadcast_to(i < chunks, x.halves.shape[-1:])
        into, out = (
            plt.load(x.halves.at[part.h, part.first + i, jnp.int32(j), :], mask=exists, other=0) for j in (0, 1)
        )
        return into, out

    def one(i: Array, carry: tuple[Array, tuple[Array, Array]]) -> tuple[Array, tuple[Array, Array]]:
        S, (into, out) = carry
        at, tokens = (part.h, part.first + i), part.begin + i * CHUNK + jnp.arange(CHUNK)
        real = tokens < part.end
        upcoming = decays(i + 1)  # a chunk ahead: plain loads are slow, and these are not pipelined
        v = plt.load(x.v.at[tokens[:, None], part.h, part.rows[None, :]], mask=real[:, None] & part.inside, other=0)
        v = v.T.astype(jnp.float32)
        if form.anchored:
            S = S * jnp.exp2(into)[None, :]
        if o_ref is None:  # k and X alone
            E = v - unit.dot(S.astype(unit.dtype), x.kq[*at, pl.ds(0, CHUNK), :], True)
            delta = unit.dot(E.astype(unit.dtype), x.XY[*at, pl.ds(0, CHUNK), :], True)
        else:
            predicted, o = _halves(unit.dot(S.astype(unit.dtype), x.kq[at], True))
            delta, inner = _halves(unit.dot((v - predicted).astype(unit.dtype), x.XY[at], True))
            to = o_ref.at[tokens[None, :], part.h, part.rows[:, None]]
            plt.store(to, ((o + inner) * (1 / RAISED)).astype(o_ref.dtype), mask=real[None, :] & part.inside[:, None])
        new = unit.dot(delta.astype(unit.dtype), x.ku[at])
        # Two factors where it moves twice: their product may underflow where ku is large.
        S = (S + new) * jnp.exp2(out)[None, :] if form.anchored else S * jnp.exp2(into + out)[None, :] + new
        return S, upcoming

    return lax.fori_loop(start, stop, one, (S, decays(jnp.int32(start))))[0]


def _scan_kernel(begin_ref, end_ref, chunk_ref, slots_ref, computed_ref, after_ref, keep_ref, *refs, form: _Form):
    x, S_ref, o_ref, S_out_ref = _Streams(*refs[:5]), refs[5], *refs[-2:]  # between them the pool, if S_ref is another
    run = pl.program_id(2)
    b, V = run // form.segments, S_ref.shape[2]
    rows = pl.program_id(0) * form.rows + jnp.arange(form.rows)
    part = _Part(pl.program_id(1), rows, rows < V, begin_ref[run], end_ref[run], chunk_ref[run])
    walk = functools.partial(_through, x, part, form, o_ref=o_ref)

    def owned(slot: Array, wanted: Array) -> Array:
        return wanted & (slot >= 0) & (slot < S_out_ref.shape[0])

    def keep(slot: Array, S: Array, wanted: Array) -> None:
        wanted = owned(slot, wanted)
        plt.store(part.of(S_out_ref, jnp.where(wanted, slot, 0)), S, mask=part.of_all(S_ref) & wanted)

    slot = slots_ref[b]
    begun = owned(slot, computed_ref[b] > 0) if form.segments == 1 else True
    held = jnp.where(begun, slot, 0) if form.segments == 1 else run
    S = plt.load(part.of(S_ref, held), mask=part.of_all(S_ref) & begun, other=0)

    def until(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """On to the next snapshot, if it lies in this run."""
        S, at = carry
        after = after_ref[b, j] - (part.begin - begin_ref[b * form.segments])
        here = (after % CHUNK == 0) & (after > at * CHUNK) & (after <= part.end - part.begin)
        stop = jnp.where(here, after // CHUNK, at)
        S = walk(S, at, stop)
        keep(keep_ref[b, j], S, here)
        return S, stop

    at = jnp.int32(0)
    if form.snapshots:
        S, at = lax.fori_loop(0, form.snapshots, until, (S, at))
    S = walk(S, at, part.chunks)
    # The segment that ends with the row; of an empty row none.
    keep(slot, S, (part.chunks > 0) & (part.end == end_ref[(b + 1) * form.segments - 1]))

    @pl.when(run == end_ref.shape[0] - 1)
    def _padding() -> None:
        def zero(i: Array, none: Array) -> Array:
            tokens = part.end + i * CHUNK + jnp.arange(CHUNK)
            to = o_ref.at[tokens[None, :], part.h, part.rows[:, None]]
            mask = (tokens < o_ref.shape[0])[None, :] & part.inside[:, None]
            plt.store(to, jnp.zeros((form.rows, CHUNK), o_ref.dtype), mask=mask)
            return none

        lax.fori_loop(0, (o_ref.shape[0] - part.end + CHUNK - 1) // CHUNK, zero, jnp.int32(0))


# -- segments ------------------------------------------------------------------------------------------------------


def _survey_kernel(begin_ref, end_ref, chunk_ref, *refs, form: _Form):
    """Each segment's end, of S from 0 above (h) and from the identity, without v, below (M)."""
    x, parts_ref, run = _Streams(*refs[:5]), refs[5], pl.program_id(2)
    V, K = x.v.shape[-1], parts_ref.shape[-1]
    blocks = pl.cdiv(V, form.rows)
    of_M = pl.program_id(0) >= blocks
    rows = jnp.where(of_M, pl.program_id(0) - blocks, pl.program_id(0)) * form.rows + jnp.arange(form.rows)
    last = run % form.segments == form.segments - 1  # nothing comes after it
    end = jnp.where(last, begin_ref[run], end_ref[run])
    part = _Part(pl.program_id(1), rows, (rows < V) & ~of_M, begin_ref[run], end, chunk_ref[run])
    eye = jnp.where((rows[:, None] == jnp.arange(K)[None, :]) & of_M, 1.0, 0.0)
    S = _through(x, part, form, eye, 0, part.chunks, None)
    of_M = of_M.astype(jnp.int32)
    there = part._replace(rows=rows + of_M * V, inside=rows < V + of_M * (K - V))
    plt.store(there.of(parts_ref, run), S, mask=there.of_all(parts_ref))


def _join_kernel(slots_ref, computed_ref, S_ref, parts_ref, starts_ref, *, form: _Form):
    """Every segment's first state, from those of its row and what the segments before make of it."""
    b, (V, K) = pl.program_id(2), S_ref.shape[2:]
    rows = pl.program_id(0) * form.rows + jnp.arange(form.rows)
    part = _Part(pl.program_id(1), rows, rows < V, *[jnp.int32(0)] * 3)
    everything, slot = part.of_all(S_ref), slots_ref[b]
    begun = (slot >= 0) & (slot < S_ref.shape[0]) & (computed_ref[b] > 0)
    S = plt.load(part.of(S_ref, jnp.where(begun, slot, 0)), mask=everything & begun, other=0)

    def one(i: Array, S: Array) -> Array:
        run = b * form.segments + i
        plt.store(part.of(starts_ref, run), S, mask=everything)
        h, M = plt.load(part.of(parts_ref, run), mask=everything, other=0), parts_ref[run, part.h, pl.ds(V, K), :]
        return form.unit.dot(S.astype(form.unit.dtype), M.astype(form.unit.dtype)) + h

    lax.fori_loop(0, form.segments, one, S)


def _runs(rows: Rows, chunks: Chunks, segments: int) -> tuple[Array, Array, Array]:
    """Each row in `segments` runs of whole chunks: first token, one past the last, first chunk."""
    start, stop = rows.starts[:-1, None], rows.starts[1:, None]
    size = -(-(stop - start) // (segments * CHUNK)) * CHUNK
    begin = jnp.minimum(start + size * jnp.arange(segments), stop)
    chunk = chunks.first[:, None] + (begin - start) // CHUNK
    begin, end, chunk = (a.reshape(-1).astype(jnp.int32) for a in (begin, jnp.minimum(begin + size, stop), chunk))
    return begin, end, chunk


def scan(
    S_pool: Array, work: Work, v: Array, chunks: Chunks, rows: Rows, snapshots: Snapshots | None, tuning: Tuning,
    anchored: bool, unit: Unit,
) -> tuple[Array, Array]:  # fmt: skip
    """The pool, in place if donated, and outputs [T, H, V] in the dtype of v."""
    B, (_, H, V), K, segments = rows.slots.shape[0], v.shape, work.ku.shape[-1], tuning.segments
    form = _Form(tuning.rows, anchored, segments, snapshots.after.shape[1] if snapshots else 0, unit)
    if snapshots is None:  # an array must have a size
        snapshots = Snapshots(*(jnp.zeros((B, 1), jnp.int32) for _ in Snapshots._fields))
    runs, blocks, streams = _runs(rows, chunks, segments), pl.cdiv(V, form.rows), (*work, v)

    def call(kernel: Callable[..., None], grid: tuple[int, int], out: list[Any], form: _Form = form, **how: Any):
        how = {"warps": tuning.scan_warps, "stages": tuning.scan_stages, "interpret": unit.interpret} | how
        return launch(functools.partial(kernel, form=form), out_shape=out, grid=(grid[0], H, grid[1]), **how)

    def states(rows: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((B * segments, H, rows, K), jnp.float32)]

    common = (*runs, rows.slots, rows.num_computed, *snapshots, *streams)
    outs = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(S_pool.shape, jnp.float32)]
    given = (S_pool,)
    if segments > 1:  # the segments of a row must not read its slot, which the last one writes
        survey = call(_survey_kernel, (blocks + pl.cdiv(K, form.rows), B * segments), states(V + K), name="kda_survey")
        narrow = form._replace(rows=16)
        # With products of float32, four warps would spill.
        warps = tuning.scan_warps * (2 if unit.precision == "highest" else 1)
        join = call(_join_kernel, (pl.cdiv(V, 16), B), states(V), narrow, warps=warps, stages=2, name="kda_join")
        given = (*join(rows.slots, rows.num_computed, S_pool, *survey(*runs, *streams)), S_pool)
    last = len(common) + len(given) - 1
    o, S_pool = call(_scan_kernel, (blocks, B * segments), outs, aliases={last: 1}, name="kda_scan")(*common, *given)
    return S_pool, o
