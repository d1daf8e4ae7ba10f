"""The main path, file 2: prefill -> sample -> commit -> decode.

A step runs `forward` over new tokens, samples one token a row and commits what the carry now stands for. The token just
sampled is in no cache: it is the next step's input. There are two steps: `step` takes any packed batch, pieces of prompts and
single tokens side by side; `decode` takes one token a row, up to DECODE times on the device before the host looks.

`place` gives new requests their slots, `copy` moves memory between slots and pages. The host's side is engine/.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from k3jax import carry as carries
from k3jax.batch import NOWHERE, Batch
from k3jax.carry import PAGE, Carry
from k3jax.model import K3, Context, Output, Weights, forward
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
) -> tuple[State, Sampled]:
    """Take a token from each sampled row's logits; the caches are not touched by it.

    positions: index in its request of the token to come. layers: the model's. allowed: as in sampling.sample.
    """
    new = sample(out.logits, positions, state.counts, state.sampling, top, allowed)
    head_bad = jnp.where(jnp.isfinite(out.logits).all(-1) | ~sampled, -1, layers)
    head_bad = jnp.where(sampled & (head_bad < 0) & (new.token < 0), layers + 1, head_bad)
    bad = jnp.where(out.first_bad >= 0, out.first_bad, head_bad)
    bad = jnp.where((state.bad_layer >= 0) | state.done, state.bad_layer, bad)
    take = sampled & ~state.done & (bad < 0)
    made = state.made + take
    rows = jnp.arange(made.shape[0])
    stop = take & state.sampling.ends[rows, new.token]
    state = State(
        carry=out.carry,
        last=jnp.where(take, new.token, state.last),
        made=made,
        counts=state.counts.at[rows, new.token].add(take),
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
    model = model.model if isinstance(model, Weights) else model
    rows = batch.num_computed.shape[0]
    assert (sampling.prompt is None) == (targets is None)
    if targets is not None:
        every = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        batch = batch._replace(logits_indices=jnp.concatenate([batch.logits_indices, every]))
    out, following = forward(model, batch, state.carry, ctx), None
    if targets is not None and sampling.prompt is not None:
        following = Sampled(targets, *logprobs(out.logits[rows:], targets, sampling.prompt))
        out = out._replace(logits=out.logits[:rows])
    own = _take(state, batch.state_indices)
    own, new = commit(own, batch.seq_lens, sampled, out, model.config.num_hidden_layers, sampling.top, allowed)
    return _put(state, batch.state_indices, own), Found(new, own.done, own.bad_layer, following)


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
    model = model.model if isinstance(model, Weights) else model
    rows = slots.shape[0]
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
        own, new = commit(own, batch.seq_lens, ~own.done, out, layers, sampling.top, allowed)
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


@functools.partial(jax.jit, donate_argnames="state")
def place(state: State, slots: Int[Array, "B"], new: State) -> State:
    """Requests that begin, or that come back: what sampling knows of them goes to their slots."""
    return _put(state, slots, new._replace(carry=state.carry))


class Moves(NamedTuple):
    """Memory to copy: everything is read before anything is written. NOWHERE: nothing."""

    from_slot: Int[Array, "S"]
    to_slot: Int[Array, "S"]
    from_page: Int[Array, "P"]
    to_page: Int[Array, "P"]


@functools.partial(jax.jit, donate_argnames="state")
def copy(state: State, moves: Moves) -> State:
    """Snapshots, samples of one prompt, and going on from a snapshot."""
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


@functools.partial(jax.jit, donate_argnames="state")
def load(state: State, slot: Int[Array, ""], pages: Int[Array, "P"], one: Carry) -> State:
    """A conversation's memory into a slot and into these pages of the pool, which may hold another number of tokens."""
    assert state.carry is not None
    if state.carry.mla:
        one = carries.repaged(one, state.carry.mla[0].shape[1])
    return state._replace(carry=carries.put(state.carry, slot, pages, one))


@jax.jit
def unload(carry: Carry, slot: Int[Array, ""], pages: Int[Array, "P"]) -> Carry:
    """The memory of one request, copied out of the pools, in pages of PAGE tokens."""
    return carries.repaged(carries.take(carry, slot, pages), PAGE)
