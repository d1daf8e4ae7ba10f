"""Sums of small arrays over the GPUs of one host, by plain stores to the memory of peers; no multicast.

    y = sum over ranks of x        in float32, in the order of the ranks, rounded once: the same bits on all

A rank stores its x in every rank's mailbox, each word of 4 bytes with a flag of its own, and adds up what lies in its own
mailbox once every flag is there. An aligned store of 8 bytes arrives whole, so a word whose flag is new is new: data goes
one way, with no fence and no second message. NCCL's LL protocol relies on the same property. It doubles the bytes. On two
H200s (NVLink, runs queued) a sum of 1, 8, 64, 256 rows of 7168 takes 6, 6, 9, 25 us and NCCL's 9, 10, 16, 32; bare data and
then one flag a block took 7, 7, 9, 18 in a trial, which is better from some hundred rows on.

A flag is the number of the call, its epoch, which the mailbox carries from call to call; no flag is ever reset. Even and
odd epochs have slots of their own. A rank that begins epoch e + 1 has seen all of epoch e of every peer, and a peer began
that after it had read epoch e - 1: what is written at e + 1 meets no reader, and no call ends with a barrier. Epochs wrap
after 2^32 calls; a word would have to lie untouched for exactly so many to be taken for new.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as _utils
from jax.experimental.pallas import mosaic_gpu as _plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf
from jaxtyping import Array, BFloat16, Int32

plgpu: Any = _plgpu  # what the two declare differs between versions of jax
utils: Any = _utils

HEADER = 32  # words of a mailbox before its slots: the epoch, and how many blocks have read it
TURNS = 2  # slots of a source: an epoch's and the next one's
RANKS = 8  # at most: the GPUs of a host
MOST = 2**21  # elements of x: a thread's part is unrolled
_UNIT = 4  # elements that travel together: two words, each with its flag, are 16 bytes
_THREADS = 128  # of a block
_BLOCKS = 128  # at most: all must run at once, for each waits for its like on the peers
_LOADS = 8  # of 16 bytes that a thread has under way


def words(ranks: int, size: int) -> int:
    """How many int32 a mailbox takes for sums of up to `size` bfloat16: a slot a source and a turn, twice as large as x."""
    return HEADER + TURNS * ranks * math.ceil(size / _UNIT) * _UNIT


def mailbox(ranks: int, size: int) -> Int32[Array, "words"]:
    """An empty one. All ranks must have theirs (block_until_ready) before any of them begins a program with sums."""
    return jnp.zeros(words(ranks, size), jnp.int32)


@functools.partial(jax.jit, static_argnames="axes")
def connect(
    mailbox: Int32[Array, "words"], axes: str | tuple[str, ...]
) -> tuple[Int32[Array, "ranks 2"], Int32[Array, "words"]]:
    """The addresses of the mailboxes of the ranks along `axes`, for all sums of this program; and the mailbox.

    Inside jax.shard_map, once a program. The program must donate the mailbox and hand it on through every sum, so that it
    stays where it is: a sum that finds it elsewhere traps.
    """
    axes = (axes,) if isinstance(axes, str) else axes
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    ranks = math.prod(sizes)

    def kernel(mine: jax.Ref, peers: jax.Ref) -> None:
        remote = [plgpu.remote_ref(mine, dict(zip(axes, at, strict=True))) for at in np.ndindex(*sizes)]

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + ranks))
        def write(_: Any, peers: ir.Value, *remote: ir.Value) -> None:
            for i, ref in enumerate(remote):
                _ptx("st.global.b64 [$0], $1;", _at(_address(peers), _c(i), 8), _address(ref))

        write(peers, *remote)

    return _launch(kernel, jax.ShapeDtypeStruct((ranks, 2), jnp.int32), 1, mailbox, name="connect")


def refuse(x: Array, mailbox: Array, peers: Array) -> str | None:
    """Why `all_reduce` cannot take arrays of these shapes and dtypes, or cannot run at all, or None."""
    if x.dtype != jnp.bfloat16 or x.size % _UNIT or not 1 <= x.size <= MOST:
        return f"x={x.dtype}{list(x.shape)}: allowed is bfloat16, a multiple of {_UNIT} elements, at most {MOST}"
    if peers.dtype != jnp.int32 or peers.ndim != 2 or peers.shape[1] != 2 or not 1 <= peers.shape[0] <= RANKS:
        return f"peers={peers.dtype}{list(peers.shape)}: allowed is int32[n, 2] with n from 1 to {RANKS}"
    least = words(peers.shape[0], x.size)
    if mailbox.dtype != jnp.int32 or mailbox.ndim != 1 or mailbox.size < least:
        return f"mailbox={mailbox.dtype}{list(mailbox.shape)}: allowed is int32[{least}] or more"
    if jax.process_count() != 1:
        return f"processes={jax.process_count()}: allowed is 1; an address holds in its own process alone"
    if not hasattr(utils, "inline_ptx"):
        return f"jax={jax.__version__}: the all-reduce kernel needs jax 0.11"
    return None


@jax.jit
def all_reduce(
    x: BFloat16[Array, "*shape"], mailbox: Int32[Array, "words"], peers: Int32[Array, "ranks 2"]
) -> tuple[BFloat16[Array, "*shape"], Int32[Array, "words"]]:
    """The sum of x over the ranks whose mailboxes `connect` found, and the mailbox.

    All ranks must make the same calls in the same order; sizes may differ from call to call. It waits for the peers on the
    GPU, so a rank that stays away holds up the others for ever. Raises ValueError for what `refuse` names.
    """
    if reason := refuse(x, mailbox, peers):
        raise ValueError(reason)
    plan = _plan(x.size, mailbox.size, len(peers))

    def kernel(*refs: jax.Ref) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        def body(_: Any, *refs: ir.Value) -> None:
            x, peers, mine, y = map(_address, refs)
            _sum(x, peers, mine, y, plan)

        body(*refs)

    return _launch(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), plan.grid, mailbox, x, peers, name="all_reduce")


class _Plan(NamedTuple):
    ranks: int
    units: int  # of x
    grid: int  # blocks
    slot: int  # words of one


def _plan(size: int, words: int, ranks: int) -> _Plan:
    """Of sums of `size` elements with a mailbox of so many words. Slots depend on the mailbox alone: any sum finds them there."""
    units = size // _UNIT
    grid = min(_BLOCKS, math.ceil(units / _THREADS))
    return _Plan(ranks, units, grid, (words - HEADER) // (TURNS * ranks) // _UNIT * _UNIT)


def _launch(kernel: Callable[..., None], out: Any, grid: int, mailbox: Array, *operands: Array, name: str) -> Any:
    """Runs a kernel of (*operands, mailbox, out) that changes the mailbox where it is. XLA's own barrier is left out."""
    state = jax.new_ref(mailbox)
    # Python code below is that of one thread.
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True)
    options = {"out_type": out, "grid": (grid,), "grid_names": ("block",), "kernel_name": name}
    result = plgpu.kernel(kernel, compiler_params=params, **options)(*operands, state)
    return result, jax.freeze(state)


def _sum(x: ir.Value, table: ir.Value, mine: ir.Value, y: ir.Value, plan: _Plan) -> None:
    """What a thread does. x, table, mine and y are addresses."""
    ranks, units, grid, slot = plan
    peers = [_ptx("ld.global.b64 $0, [$1];", _at(table, _c(i), 8), results=1, bits=64)[0] for i in range(ranks)]
    moved = [arith.cmpi(arith.CmpIPredicate.ne, peer, mine) for peer in peers]
    utils.inline_ptx("trap;", predicate=functools.reduce(arith.andi, moved), has_side_effects=True)  # see `connect`
    rank = functools.reduce(arith.addi, (arith.select(m, _c(0), _c(i)) for i, m in enumerate(moved)))

    [before] = _ptx("ld.relaxed.sys.global.b32 $0, [$1];", mine, results=1)
    epoch = arith.addi(before, _c(1, 32))
    turn = arith.remui(arith.extui(_integer(64), epoch), _c(TURNS))
    slots = arith.addi(_c(4 * HEADER), arith.muli(turn, _c(4 * ranks * slot)))  # bytes before those of this epoch

    thread, block = (arith.index_cast(_integer(64), f(gpu.Dimension.x)) for f in (gpu.thread_id, gpu.block_id))
    first = _at(thread, block, _THREADS)
    # Threads beyond the end do the last unit again, to the same effect.
    own = [arith.minui(arith.addi(first, _c(i)), _c(units - 1)) for i in range(0, units, grid * _THREADS)]
    together = max(1, _LOADS // ranks)
    groups = [own[i : i + together] for i in range(0, len(own), together)]

    targets = [_at(arith.addi(peer, slots), rank, 4 * slot) for peer in peers]
    for group in groups:
        read = [_ptx("ld.global.v2.b32 {$0, $1}, [$2];", _at(x, unit, 8), results=2) for unit in group]
        for unit, (low, high) in zip(group, read, strict=True):
            for target in targets:
                store = "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};"
                _ptx(store, _at(target, unit, 16), low, epoch, high, epoch)

    gpu.barrier()  # every thread of the block has used the epoch
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _c(0))):
        done = arith.addi(mine, _c(4))
        [order] = _ptx("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", done, results=1)
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, order, _c(grid - 1, 32))):  # and of all other blocks
            _ptx("st.relaxed.sys.global.b32 [$0], $1;", mine, epoch)
            _ptx("st.relaxed.sys.global.b32 [$0], $1;", done, _c(0, 32))

    sources = [arith.addi(arith.addi(mine, slots), _c(4 * slot * i)) for i in range(ranks)]
    for group in groups:
        values = _arrived([_at(source, unit, 16) for unit in group for source in sources], epoch)
        for i, unit in enumerate(group):
            parts = values[i * ranks : (i + 1) * ranks]
            _ptx("st.global.v2.b32 [$0], {$1, $2};", _at(y, unit, 8), *map(_total, zip(*parts, strict=True)))


def _arrived(addresses: list[ir.Value], epoch: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """The two words of each unit, read again until all have the flags of this epoch."""
    types = [_integer(32)] * (4 * len(addresses))
    loop = scf.WhileOp(types, [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        load = "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];"
        values = [value for address in addresses for value in _ptx(load, address, results=4)]
        stale = functools.reduce(arith.ori, (arith.xori(flag, epoch) for flag in values[1::2]))
        scf.condition(arith.cmpi(arith.CmpIPredicate.ne, stale, _c(0, 32)), values)
    with ir.InsertionPoint(loop.after.blocks.append(*types)):
        scf.yield_([])
    found = list(loop.results)[::2]
    return list(zip(found[::2], found[1::2], strict=True))


def _total(words: Sequence[ir.Value]) -> ir.Value:
    """The sum of words of two bfloat16 each: float32 in the words' order, rounded to nearest even."""
    f32, sixteen, upper = ir.F32Type.get(), _c(16, 32), _c(-(2**16), 32)
    high = [arith.bitcast(f32, arith.andi(word, upper)) for word in words]
    low = [arith.bitcast(f32, arith.shli(word, sixteen)) for word in words]
    sums = [functools.reduce(arith.addf, half) for half in (high, low)]
    return _ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", *sums, results=1)[0]


def _integer(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def _c(value: int, bits: int = 64) -> ir.Value:
    return utils.c(value, _integer(bits))


def _address(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(_integer(64), utils.memref_ptr(ref))


def _at(base: ir.Value, index: ir.Value, size: int) -> ir.Value:
    return arith.addi(base, arith.muli(index, _c(size)))


def _ptx(code: str, *args: ir.Value, results: int = 0, bits: int = 32) -> Any:
    """One instruction, and the tuple of its results."""
    return utils.inline_ptx(code, *args, result_types=[_integer(bits)] * results or None, has_side_effects=True)
