"""The depth mixture of attention residuals in one pass with the addition before it and the RMSNorm after it.

    running' = running + pending        sources s_r: the blocks, then running'
    score_r = (s_r · w) / rms(s_r), w = norm * query        pi = softmax_r(score)
    m = sum_r pi_r s_r        x = gain * m / rms(m)

`mix_norm` is the door to two forms. Pallas-Triton's is here: one program a token. Sources are taken in groups: a group is
loaded whole and stays in registers from its scores to its share of the mixture, which fades when a later group scores higher.
So each source is read once. Mosaic's, `attnres_mosaic`, is for many tokens.

How many blocks there are is known to the program, a kernel for each number, or only to the step, with a `Bank`: Triton's form
alone, in which running' comes first and the groups of blocks in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from k3jax.pallas import attnres_mosaic
from k3jax.pallas.attnres_mosaic import PERMUTE, SHIFT
from k3jax.pallas.common import launch

_LINE = 256  # channels that a warp loads at once, 16 bytes of bfloat16 a thread
_WIDEST = 65536  # channels: eight lines for each of 32 warps, or 16 for each of 16
_LANES = 32
# From so many tokens, so wide, Mosaic's form is taken: a block then has several to look ahead to, and rows that fill its ring.
# Timed with 7168 channels: of 256 tokens both take the same, of 512 Triton from 13 % more.
_MANY, _WIDE = 512, 4096

Form = Literal["auto", "triton", "mosaic"]


class Bank(NamedTuple):
    """Blocks of which only a step knows how many there are: one compiled kernel serves every count.

    Those from `count` on are not read. A count below 0 is taken as 0, one above N as N.
    """

    blocks: Float[Array, "N T D"]
    count: Int[Array, ""]  # int32


class Tuning(NamedTuple):
    """Launch parameters of a program."""

    warps: int
    group: int  # sources in registers at a time


def choose(tokens: int, width: int, sources: int, bank: bool = False, item: int = 2) -> Tuning:
    """By what was timed on an H200 with 7168 channels of bfloat16, items of 2 bytes; rows of more than 16384 take more warps.

    Few tokens wait for memory, and the fewer groups the fewer times; twice as wide a dtype has room for half of them. Many share
    it: more programs side by side. A bank's last group is taken whole however few of its blocks there are, so many tokens take
    small ones.
    """
    if tokens <= 128:
        tuning = Tuning(8, 4 if item > 2 else 8 if bank else 9)
    elif bank:
        tuning = Tuning(4, 2)
    elif tokens <= 1024 or 3 <= sources <= 6:
        tuning = Tuning(8, 2)
    else:
        tuning = Tuning(4, 3)
    return Tuning(tuning.warps * pl.next_power_of_2(pl.cdiv(width, 64 * _LINE)), min(sources, tuning.group))


def _most(blocks: Sequence[Any] | Bank) -> int:
    """Sources at most: the blocks and running."""
    return 1 + (blocks.blocks.shape[0] if isinstance(blocks, Bank) else len(blocks))


Tiles = list[Array]  # a row of D channels: [warps, _LINE] each
_Number = int | Array  # of a source


def _each(f: Callable[..., Array], *tiles: Tiles) -> Tiles:
    return [f(*parts) for parts in zip(*tiles, strict=True)]


def _wide(tiles: Tiles) -> Tiles:
    return [tile.astype(jnp.float32) for tile in tiles]


class _Row:
    """Where the tiles of a row are in memory."""

    def __init__(self, width: int, warps: int) -> None:
        warp, column = (lax.broadcasted_iota(jnp.int32, (warps, _LINE), axis) for axis in (0, 1))
        self.places = [start + warp * _LINE + column for start in range(0, width, warps * _LINE)]
        self.masks: list[Array | None] = [None] * len(self.places)
        if width % (warps * _LINE):
            self.masks[-1] = self.places[-1] < width

    def load(self, ref: Any, *at: Array, where: Array | None = None) -> Tiles:
        """Zero past the width, and zero without looking where a scalar `where` is false."""
        masks = self.masks
        if where is not None:
            masks = [jnp.broadcast_to(where, self.places[0].shape) if mask is None else mask & where for mask in masks]
        return [
            plt.load(ref.at[*at, place], mask=mask, other=None if mask is None else 0)
            for place, mask in zip(self.places, masks, strict=True)
        ]

    def store(self, ref: jax.Ref, at: Array, tiles: Tiles) -> None:
        for place, mask, tile in zip(self.places, self.masks, tiles, strict=True):
            plt.store(ref.at[at, place], tile, mask=mask)


def _fma(x: Array, y: Array, z: Array, interpret: bool, widen: str = SHIFT) -> Array:
    """x y + z in float32 by one instruction, which the compiler does not choose by itself, and its widening of bfloat16."""
    if interpret:
        return x.astype(jnp.float32) * y.astype(jnp.float32) + z
    lines, names, constraints = [], [], ["=f", "=f"]  # two results come first
    for name, a in (("x", x), ("y", y), ("z", z)):
        n = len(constraints)
        if a.dtype == jnp.bfloat16:
            lines.append(f".reg .b32 {name}<2>; {widen.format(name, f'${n}')}")
            names.append((f"{name}0", f"{name}1"))
            constraints.append("r")
        else:
            names.append((f"${n}", f"${n + 1}"))
            constraints += ["f", "f"]
    lines += [f"fma.rn.f32 ${i}, {', '.join(operands)};" for i, operands in enumerate(zip(*names, strict=True))]
    result = jax.ShapeDtypeStruct(z.shape, jnp.float32)
    asm, listed = f"{{ {' '.join(lines)} }}", ",".join(constraints)
    return plt.elementwise_inline_asm(asm, args=[x, y, z], constraints=listed, pack=2, result_shape_dtypes=[result])[0]


def _dot(a: Tiles, b: Tiles, interpret: bool) -> Array:
    """A sum for each warp, [warps]: none waits for another."""
    total = jnp.zeros(a[0].shape, jnp.float32)
    for x, y in zip(a, b, strict=True):
        total = _fma(x, y, total, interpret)
    return jnp.sum(total, axis=1)


class _Mixture(NamedTuple):
    """Of the sources so far, by an online softmax."""

    best: Array | float  # the highest score
    total: Array | float  # sum of exp(score - best)
    every: Array  # [lanes]: the scores, -inf of other sources
    mix: Tiles  # sum of exp(score - best) s; no tiles before the first group


def _kernel(
    blocks, running_ref, pending_ref, norm_ref, query_ref, gain_ref, x_ref, sum_ref, weights_ref,
    *, eps: float, tuning: Tuning, interpret: bool,
):  # fmt: skip
    t, D, dtype = pl.program_id(0), x_ref.shape[-1], x_ref.dtype
    R = _most(blocks)
    row = _Row(D, tuning.warps)
    lanes = max(_LANES, pl.next_power_of_2(R))
    lane, source = lax.broadcasted_iota(jnp.int32, (tuning.warps, lanes), 1), jnp.arange(lanes)

    def running() -> Tiles:
        tiles = row.load(running_ref, t)
        if pending_ref is not None:
            pending = row.load(pending_ref, t)
            tiles = _each(lambda a, b: (a + b).astype(dtype), _wide(tiles), _wide(pending))
            row.store(sum_ref, t, tiles)
        return tiles

    def across(sums: list[tuple[_Number, Array]]) -> Array:
        """[lanes]: each source's sum over all warps in its lane, by one exchange between warps for all of them."""
        by_warp = jnp.zeros(lane.shape, jnp.float32)
        for r, each in sums:
            by_warp = jnp.where(lane == r, each[:, None], by_warp)
        return jnp.sum(by_warp, axis=0)

    w = _each(jnp.multiply, _wide(row.load(norm_ref)), _wide(row.load(query_ref)))

    def joined(past: _Mixture, group: Sequence[tuple[_Number, Tiles]], first: _Number, stop: _Number) -> _Mixture:
        """With a group of sources by their numbers, of which those from `first` to before `stop` count."""
        square = across([(r, _dot(s, s, interpret)) for r, s in group])
        product = across([(r, _dot(s, w, interpret)) for r, s in group])
        member = (source >= first) & (source < stop)
        score = jnp.where(member, product * lax.rsqrt(square / D + eps), -jnp.inf)
        highest = jnp.maximum(past.best, jnp.max(score))
        fade, p = jnp.exp(past.best - highest), jnp.exp(score - highest)
        total, every = past.total * fade + jnp.sum(p), jnp.maximum(past.every, score)
        mix = [tile * fade for tile in past.mix] or [jnp.zeros(place.shape, jnp.float32) for place in row.places]
        for r, s in group:
            share = jnp.broadcast_to(jnp.sum(jnp.where(source == r, p, 0)), mix[0].shape)
            mix = _each(lambda x, m, share=share: _fma(x, share, m, interpret, PERMUTE), s, mix)
        return _Mixture(highest, total, every, mix)

    mixture = _Mixture(-jnp.inf, 0.0, jnp.full(lanes, -jnp.inf), [])
    if isinstance(blocks, Bank):
        count, size = jnp.clip(blocks.count[0], 0, R - 1), min(tuning.group, R - 1)

        def with_blocks(i: Array, past: _Mixture) -> _Mixture:
            numbers = [i * size + j for j in range(size)]
            group = [(r, row.load(blocks.blocks, r, t, where=r < count)) for r in numbers]
            return joined(past, group, numbers[0], jnp.minimum(numbers[0] + size, count))

        mixture = joined(mixture, [(R - 1, running())], R - 1, R)
        mixture = lax.fori_loop(0, (count + size - 1) // size, with_blocks, mixture)
    else:
        for first in range(0, R, tuning.group):
            stop = min(first + tuning.group, R)
            group = [(r, row.load(blocks[r], t) if r < R - 1 else running()) for r in range(first, stop)]
            mixture = joined(mixture, group, first, stop)

    best, total, every, mix = mixture
    gain, whole = row.load(gain_ref), 1 / total
    m = _wide([(tile * whole).astype(dtype) for tile in mix])
    scale = lax.rsqrt(jnp.sum(_dot(m, m, interpret)) / D + eps)
    y = _wide([(tile * scale).astype(dtype) for tile in m])
    row.store(x_ref, t, _each(lambda g, y: (g.astype(dtype).astype(jnp.float32) * y).astype(dtype), gain, y))
    if weights_ref is not None:
        plt.store(weights_ref.at[t, source], jnp.exp(every - best) * whole, mask=source < R)


def refuse(
    running: Array, pending: Array | None, blocks: Sequence[Array] | Bank, norm: Array, query: Array, gain: Array
) -> str | None:
    """Why `mix_norm` cannot take arrays of these shapes and dtypes, or None."""
    if running.ndim != 2 or running.shape[0] < 1 or not 1 <= running.shape[1] <= _WIDEST:
        return f"running={list(running.shape)}: allowed is [T, D] with T from 1 and D from 1 to {_WIDEST}"
    if running.dtype not in (jnp.float32, jnp.bfloat16):
        return f"running={running.dtype}: allowed are float32 and bfloat16"
    each = () if isinstance(blocks, Bank) else ((f"blocks[{i}]", block) for i, block in enumerate(blocks))
    for name, a in (("pending", pending), *each):
        if a is not None and (a.shape, a.dtype) != (running.shape, running.dtype):
            return f"{name}={a.dtype}{list(a.shape)}: allowed is {running.dtype}{list(running.shape)}, as running"
    T, D = running.shape
    if isinstance(blocks, Bank):
        a, count = blocks
        if not hasattr(count, "dtype"):
            return f"blocks.count={count!r}: allowed is an array, int32[]"
        if a.ndim != 3 or a.shape[0] < 1 or (a.shape[1:], a.dtype) != (running.shape, running.dtype):
            return f"blocks.blocks={a.dtype}{list(a.shape)}: allowed is {running.dtype}[N, {T}, {D}] with N from 1, as running"
        if (count.shape, count.dtype) != ((), jnp.int32):
            return f"blocks.count={count.dtype}{list(count.shape)}: allowed is int32[]"
    for name, a, allowed in (("norm", norm, [(D,)]), ("query", query, [(D,), (1, D)]), ("gain", gain, [(D,)])):
        if a.shape not in allowed:
            return f"{name}={list(a.shape)}: allowed is {' or '.join(str(list(shape)) for shape in allowed)}"
        if a.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name}={a.dtype}: allowed are float32 and bfloat16"
    return None


def _by_mosaic(
    form: Form, running: Array, blocks: Sequence[Array] | Bank, tuning: Tuning | None, interpret: bool
) -> bool:
    if form not in get_args(Form):
        raise ValueError(f"form={form!r}: allowed are {', '.join(map(repr, get_args(Form)))}")
    if isinstance(blocks, Bank):
        if form == "mosaic":
            raise ValueError("form='mosaic': allowed with a Bank are 'auto' and 'triton'")
        return False
    if tuning is not None and (tuning.warps not in (1, 2, 4, 8, 16, 32) or tuning.group < 1):
        raise ValueError(f"tuning={tuning}: allowed are warps that are a power of two up to 32, and groups from 1")
    if form == "mosaic" and tuning is not None:
        raise ValueError(f"tuning={tuning}: allowed with form='mosaic' is None")
    many = running.shape[0] >= _MANY and running.shape[1] >= _WIDE and not interpret and tuning is None
    return form == "mosaic" or (form == "auto" and many and attnres_mosaic.refuse(running, blocks) is None)


def mix_norm(
    running: Float[Array, "T D"],
    pending: Float[Array, "T D"] | None,
    blocks: Sequence[Float[Array, "T D"]] | Bank,
    norm: Float[Array, "D"],
    query: Float[Array, "D"] | Float[Array, "1 D"],
    gain: Float[Array, "D"],
    eps: float,
    *,
    weights: bool = False,
    form: Form = "auto",
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Float[Array, "T R"] | None]:
    """running', the normed mixture, and the depth weights in float32 if asked for; R is one more than there are blocks.

    Weights of a Bank are [T, N + 1]: its blocks' first, 0 from `count` on, and running's in the last column.
    Rounded to the dtype of running where the plain operations are: running', m, m / rms(m) and x. The rest is float32.
    form: "auto" is Mosaic's where there are many tokens, `attnres_mosaic.refuse` says nothing, and neither `interpret` nor a
    tuning, which is of Triton's, is given. Raises ValueError for shapes and dtypes that the form cannot take.
    """
    if reason := refuse(running, pending, blocks, norm, query, gain):
        raise ValueError(reason)
    if _by_mosaic(form, running, blocks, tuning, interpret):
        args = running, pending, blocks, norm, query, gain
        return attnres_mosaic.mix_norm(*args, eps, weights=weights, interpret=interpret)
    (T, D), R = running.shape, _most(blocks)
    tuning = tuning or choose(T, D, R, isinstance(blocks, Bank), running.dtype.itemsize)
    shapes = {"x": jax.ShapeDtypeStruct(running.shape, running.dtype)}
    if pending is not None:
        shapes["sum"] = shapes["x"]
    if weights:
        shapes["weights"] = jax.ShapeDtypeStruct((T, R), jnp.float32)

    def kernel(blocks, running, pending, norm, query, gain, *outs) -> None:
        out = dict(zip(shapes, outs, strict=True))
        _kernel(
            blocks, running, pending, norm, query, gain, out["x"], out.get("sum"), out.get("weights"),
            eps=eps, tuning=tuning, interpret=interpret,
        )  # fmt: skip

    # A kernel reads numbers from arrays that have an axis.
    given = Bank(blocks.blocks, blocks.count.reshape(1)) if isinstance(blocks, Bank) else tuple(blocks)
    call = launch(
        kernel, out_shape=list(shapes.values()), grid=(T,), warps=tuning.warps, interpret=interpret, name="attnres"
    )
    outs = dict(zip(shapes, call(given, running, pending, norm, query.reshape(-1), gain), strict=True))
    return outs.get("sum", running), outs["x"], outs.get("weights")
