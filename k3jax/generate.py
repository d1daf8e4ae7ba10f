"""The main path, file 2: prefill -> sample -> commit -> decode.

A step runs `forward` over new tokens, samples one token a row and commits what the carry now stands for. The token just
sampled is in no cache: it is the next step's input. There are two steps: `step` takes any packed batch, pieces of prompts and
single tokens side by side; `decode` takes one token a row, up to DECODE times on the device before the host looks.

`place` gives new requests their slots, `copy` moves memory between slots and pages. The host's side is engine/.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, UInt32

from k3jax import carry as carries
from k3jax import sampling as sampling_
from k3jax import sharding
from k3jax.batch import NOWHERE, Batch
from k3jax.carry import PAGE, Carry
from k3jax.model import K3, Context, Output, Weights, forward
from k3jax.ranks import Ranks
from k3jax.sampling import RowSampling, Sampled, SamplingParams, by_row, logprobs, sample

PREFILL = 2048  # prompt tokens of a step at most
DECODE = 32  # decode steps between two looks of the host at most; it notices an interrupt when it looks


class State(NamedTuple):
    """What requests carry from step to step, all on the device, by slot."""

    carry: Carry | None  # None: of some rows alone, taken out for a step
    last: Int[Array, "B"]  # the token sampled last: in the token list, in no cache
    made: Int[Array, "B"]  # tokens sampled so far
    counts: Int[Array, "B N"]  # the same by token
    done: Bool[Array, "B"]
    bad_layer: Int[Array, "B"]  # first that was not finite; L: the head; L + 1: every token is forbidden; -1: none
    sampling: RowSampling


def axes(state: State) -> State:
    """How it is divided over ranks: axes by name, as a parameter's."""
    return State(
        carry=None if state.carry is None else carries.axes(state.carry),
        **dict.fromkeys(("last", "made", "done", "bad_layer"), jax.P()),  # type: ignore[arg-type]
        counts=jax.P(None, "vocab"),  # type: ignore[arg-type]
        sampling=sampling_.AXES,
    )


class Sampling(NamedTuple):
    """What a step samples beside a token a row, the static part: how many alternatives get log-probabilities.

    None: no log-probabilities at all. `prompt`: the same of the tokens that follow each one of the batch.
    """

    top: int | None = None
    prompt: int | None = None


class Found(NamedTuple):
    """What the host learns of a step, by row."""

    new: Sampled  # token -1: none; [DECODE, B] after decode
    done: Bool[Array, "B"]
    bad_layer: Int[Array, "B"]
    prompt: Sampled | None = None  # by token of the batch: what follows it


def commit(
    state: State,
    positions: Int[Array, "B"],
    sampled: Bool[Array, "B"],
    out: Output,
    layers: int,
    top: int | None = None,
    allowed: UInt32[Array, "B W"] | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  # frozen
) -> tuple[State, Sampled]:
    """Take a token from each sampled row's logits; the caches are not touched by it.

    positions: index in its request of the token to come. layers: the model's. allowed: as in sampling.sample.
    """
    new = sample(out.logits, positions, state.counts, state.sampling, top, allowed, ranks)
    bad_logits = ranks.max((~jnp.isfinite(out.logits)).any(-1).astype(jnp.int32)) > 0
    head_bad = jnp.where(bad_logits & sampled, layers, -1)
    head_bad = jnp.where(sampled & (head_bad < 0) & (new.token < 0), layers + 1, head_bad)
    bad = jnp.where(out.first_bad >= 0, out.first_bad, head_bad)
    bad = jnp.where((state.bad_layer >= 0) | state.done, state.bad_layer, bad)
    take = sampled & ~state.done & (bad < 0)
    made = state.made + take
    rows = jnp.arange(made.shape[0])
    own = new.token - ranks.first(
        state.counts.shape[1]
    )  # its place in this rank's part of the vocabulary, if it has one
    own = jnp.where((own >= 0) & (own < state.counts.shape[1]), own, NOWHERE)
    ends = state.sampling.ends.at[rows, own].get(mode="fill", fill_value=False)
    stop = take & (ranks.max(ends.astype(jnp.int32)) > 0)
    state = State(
        carry=out.carry,
        last=jnp.where(take, new.token, state.last),
        made=made,
        counts=state.counts.at[rows, own].add(take, mode="drop"),
        done=state.done | stop | (take & (made >= state.sampling.max_tokens)) | (bad >= 0),
        bad_layer=bad,
        sampling=state.sampling,
    )
    return state, new._replace(token=jnp.where(take, new.token, -1))


@functools.partial(jax.jit, static_argnames=("ctx", "sampling"), donate_argnames="state")
def step(
    model: K3 | Weights,
    state: State,
    batch: Batch,
    sampled: Bool[Array, "B"],
    ctx: Context,
    sampling: Sampling = Sampling(),  # noqa: B008  # a tuple
    targets: Int[Array, "T"] | None = None,
    allowed: UInt32[Array, "B W"] | None = None,
) -> tuple[State, Found]:
    """One step of any batch; rows in `sampled` get a token, -1 elsewhere. The first `ctx.decode_rows` have one token each.

    targets: the token that follows each one of the batch, where `sampling.prompt` asks for their log-probabilities.
    """
    assert (sampling.prompt is None) == (targets is None)
    of_rank = functools.partial(_step, ctx, sampling)
    return _over_ranks(ctx.mesh, of_rank, model, state, batch, sampled, targets, allowed, out=(state, None))


def _step(
    ctx: Context,
    sampling: Sampling,
    model: K3 | Weights,
    state: State,
    batch: Batch,
    sampled: Array,
    targets: Array | None,
    allowed: Array | None,
) -> tuple[State, Found]:
    model, rows = _module(model), batch.num_computed.shape[0]
    if targets is not None:
        every = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        batch = batch._replace(logits_indices=jnp.concatenate([batch.logits_indices, every]))
    out, following = forward(model, batch, state.carry, ctx), None
    if targets is not None and sampling.prompt is not None:
        following = Sampled(targets, *logprobs(out.logits[rows:], targets, sampling.prompt, ctx.ranks))
        out = out._replace(logits=out.logits[:rows])
    own = _take(state, batch.state_indices)
    layers = model.config.num_hidden_layers
    own, new = commit(own, batch.seq_lens, sampled, out, layers, sampling.top, allowed, ctx.ranks)
    return _put(state, batch.state_indices, own), Found(new, own.done, own.bad_layer, following)


def _module(model: K3 | Weights) -> K3:
    return model.model if isinstance(model, Weights) else model


def _over_ranks(mesh: Mesh | None, of_rank: Callable[..., Any], *args: Any, out: Any) -> Any:
    """What `of_rank`, the code of one rank, makes of whole arrays. Models, states and carries are divided over the ranks, all else is
    the same on each. out: something that is divided as the result is; None where it is the same on every rank.
    """
    if mesh is None:
        return of_rank(*args)
    divided = (K3, Weights, State, Carry)
    out_specs = jax.tree.map(_specs, out, is_leaf=lambda arg: arg is None or isinstance(arg, divided))
    return sharding.per_rank(of_rank, mesh, tuple(map(_specs, args)), out_specs)(*args)


def _specs(arg: Any) -> Any:
    match arg:
        case K3() | Weights():
            return sharding.of_model(arg)
        case State():
            return sharding.specs(axes(arg))
        case Carry():
            return sharding.specs(carries.axes(arg))
    return jax.P()


@functools.partial(jax.jit, static_argnames=("ctx", "sampling"), donate_argnames="state")
def decode(
    model: K3 | Weights,
    state: State,
    slots: Int[Array, "B"],
    block_table: Int[Array, "B P"],
    steps: Int[Array, ""],
    ctx: Context,
    sampling: Sampling = Sampling(),  # noqa: B008  # a tuple
    until_end: Bool[Array, ""] | bool = False,
    allowed: UInt32[Array, "B W"] | None = None,
) -> tuple[State, Found]:
    """Up to `steps` <= DECODE tokens for every row, without the host; fewer if all rows are done, or with `until_end` one is.

    Rows whose slot is NOWHERE are padding. What was sampled comes stacked, [DECODE, B]; unused entries hold token -1.
    """
    of_rank, limits = functools.partial(_decode, ctx, sampling), (steps, jnp.asarray(until_end))
    return _over_ranks(ctx.mesh, of_rank, model, state, slots, block_table, limits, allowed, out=(state, None))


def _decode(
    ctx: Context,
    sampling: Sampling,
    model: K3 | Weights,
    state: State,
    slots: Array,
    block_table: Array,
    limits: tuple[Array, Array],
    allowed: Array | None,
) -> tuple[State, Found]:
    model, (steps, until_end), rows = _module(model), limits, slots.shape[0]
    index = jnp.arange(rows, dtype=jnp.int32)
    ctx = dataclasses.replace(ctx, decode_rows=rows)
    own = _take(state, slots)
    own = own._replace(carry=state.carry, done=own.done | (slots == NOWHERE))
    before = own.done

    def more(loop: tuple[Array, State, Sampled]) -> Array:
        i, own, _ = loop
        return (i < steps) & ~own.done.all() & ~(until_end & (own.done & ~before).any())

    def one(loop: tuple[Array, State, Sampled]) -> tuple[Array, State, Sampled]:
        i, own, all_new = loop
        assert own.carry is not None
        batch = Batch(
            tokens=own.last,
            query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32),
            num_computed=own.carry.lengths.at[slots].get(mode="fill", fill_value=0),
            state_indices=jnp.where(own.done, NOWHERE, slots),  # a finished row computes, and leaves no trace
            block_table=jnp.where(own.done[:, None], NOWHERE, block_table),
            logits_indices=index,
        )
        out = forward(model, batch, own.carry, ctx)
        layers = model.config.num_hidden_layers
        own, new = commit(own, batch.seq_lens, ~own.done, out, layers, sampling.top, allowed, ctx.ranks)
        return i + 1, own, jax.tree.map(lambda a, b: a.at[i].set(b), all_new, new)

    none = Sampled(jnp.full((DECODE, rows), -1, jnp.int32))
    if sampling.top is not None:
        floats, ids = (jnp.zeros((DECODE, rows, sampling.top), dtype) for dtype in (jnp.float32, jnp.int32))
        none = Sampled(none.token, jnp.zeros((DECODE, rows)), ids, floats)
    _, own, all_new = jax.lax.while_loop(more, one, (jnp.int32(0), own, none))
    return _put(state, slots, own), Found(all_new, own.done, own.bad_layer)


def _take(state: State, slots: Int[Array, "B"]) -> State:
    """What the rows of a step have in these slots, all but the carry."""
    return jax.tree.map(lambda a: a.at[slots].get(mode="clip"), state._replace(carry=None))


def _put(state: State, slots: Int[Array, "B"], own: State) -> State:
    """The carry is that of the step; `own` goes back to these slots."""
    back = jax.tree.map(
        lambda a, b: a.at[slots].set(b, mode="drop"), state._replace(carry=None), own._replace(carry=None)
    )
    return back._replace(carry=own.carry)


# -- slots and pages ---------------------------------------------------------------------------------------------------


def empty(model: K3, *, slots: int, pages: int, page: int = PAGE) -> State:
    """Pools without requests."""
    params = [SamplingParams()] * slots
    return rows(params, [[0]] * slots, [0] * slots, (), slots, model.config.vocab_size)._replace(
        carry=carries.empty(model.config, slots=slots, pages=pages, page=page, dtype=str(model.dtype))
    )


def rows(
    params: Sequence[SamplingParams],
    token_ids: Sequence[Sequence[int]],
    made: Sequence[int],
    end_ids: Sequence[int],
    size: int,
    vocabulary: int,
) -> State:
    """What `place` puts into slots: requests of which the last `made` tokens are generated, padded to `size` rows."""
    pad = [0] * (size - len(params))
    counts = np.zeros((size, vocabulary), np.int32)
    for row, (ids, n) in enumerate(zip(token_ids, made, strict=True)):
        np.add.at(counts[row], np.asarray(ids[len(ids) - n :], np.int64), 1)
    prompts = [ids[: len(ids) - n] for ids, n in zip(token_ids, made, strict=True)]
    arrays: dict[str, Any] = dict(
        last=np.array([*(ids[-1] for ids in token_ids), *pad], np.int32),
        made=np.array([*made, *pad], np.int32),
        counts=counts,
        done=np.zeros(size, bool),
        bad_layer=np.full(size, -1, np.int32),
        sampling=by_row(params, prompts, end_ids, size, vocabulary),
    )
    return State(carry=None, **arrays)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def place(state: State, slots: Int[Array, "B"], new: State, mesh: Mesh | None = None) -> State:
    """Requests that begin, or that come back: what sampling knows of them goes to their slots."""

    def of_rank(state: State, slots: Array, new: State) -> State:
        return _put(state, slots, new._replace(carry=state.carry))

    return _over_ranks(mesh, of_rank, state, slots, new, out=state)


class Moves(NamedTuple):
    """Memory to copy: everything is read before anything is written. NOWHERE: nothing."""

    from_slot: Int[Array, "S"]
    to_slot: Int[Array, "S"]
    from_page: Int[Array, "P"]
    to_page: Int[Array, "P"]


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def copy(state: State, moves: Moves, mesh: Mesh | None = None) -> State:
    """Snapshots, samples of one prompt, and going on from a snapshot."""
    return _over_ranks(mesh, _copy, state, moves, out=state)


def _copy(state: State, moves: Moves) -> State:
    assert state.carry is not None
    kda, mla, lengths = state.carry

    def move(a: Array, source: Array, target: Array) -> Array:
        return a.at[target].set(a.at[source].get(mode="clip"), mode="drop")

    carry = Carry(
        kda=jax.tree.map(lambda a: move(a, moves.from_slot, moves.to_slot), kda),
        mla=tuple(move(a, moves.from_page, moves.to_page) for a in mla),
        lengths=move(lengths, moves.from_slot, moves.to_slot),
    )
    return state._replace(carry=carry)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def load(state: State, slot: Int[Array, ""], pages: Int[Array, "P"], one: Carry, mesh: Mesh | None = None) -> State:
    """A conversation's memory into a slot and into these pages of the pool, which may hold another number of tokens."""

    def of_rank(state: State, slot: Array, pages: Array, one: Carry) -> State:
        assert state.carry is not None
        if state.carry.mla:
            one = carries.repaged(one, state.carry.mla[0].shape[1])
        return state._replace(carry=carries.put(state.carry, slot, pages, one))

    return _over_ranks(mesh, of_rank, state, slot, pages, one, out=state)


@functools.partial(jax.jit, static_argnames="mesh")
def unload(carry: Carry, slot: Int[Array, ""], pages: Int[Array, "P"], mesh: Mesh | None = None) -> Carry:
    """The memory of one request, copied out of the pools, in pages of PAGE tokens."""

    def of_rank(carry: Carry, slot: Array, pages: Array) -> Carry:
        return carries.repaged(carries.take(carry, slot, pages), PAGE)

    return _over_ranks(mesh, of_rank, carry, slot, pages, out=carry)
