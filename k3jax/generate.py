"""The main path, file 2: prefill -> sample -> commit -> decode.

A step runs `forward` over new tokens, samples one token a row and commits what the carry now stands for. The token just
sampled is in no cache: it is the next step's input. Prompts go through `prefill` in pieces of at most PREFILL tokens, rows
packed one after another; then `decode` takes up to DECODE steps on the device before the host looks.

Samples of one prompt share its prefill: the first of them computes it, `fork` gives the others copies of its memory.
The host's side is run.py.

Compiled programs: one a bucket. Tokens of a prefill: powers of two from 16 to PREFILL. Rows and pages a row: powers of two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from k3jax import carry as carries
from k3jax.batch import NOWHERE, Batch
from k3jax.carry import PAGE, Carry, Conversation
from k3jax.model import K3, Context, Output, forward
from k3jax.sampling import RowSampling, Sampled, SamplingParams, by_row, logprobs, power_of_two, sample

PREFILL = 2048  # tokens a prefill step at most
DECODE = 32  # decode steps between two looks of the host at most; it notices an interrupt when it looks


class State(NamedTuple):
    """What a group of requests carries from step to step, all on the device. Row b has slot b and a fixed run of pages."""

    carry: Carry
    last: Int[Array, "B"]  # the token sampled last: in the token list, in no cache
    made: Int[Array, "B"]  # tokens sampled so far
    counts: Int[Array, "B N"]  # the same by token
    done: Bool[Array, "B"]
    bad_layer: Int[Array, "B"]  # first that was not finite; L: the head; L + 1: every token is forbidden; -1: none
    sampling: RowSampling


def step(
    model: K3,
    state: State,
    batch: Batch,
    sampled: Bool[Array, "B"],
    ctx: Context,
    top: int | None = None,
) -> tuple[State, Sampled]:
    """One step of any batch: forward, sample the rows in `sampled`, commit. `top`: as in sampling.sample."""
    out = forward(model, batch, state.carry, ctx)
    return commit(state, batch.seq_lens, sampled, out, model.config.num_hidden_layers, top)


def commit(
    state: State,
    positions: Int[Array, "B"],
    sampled: Bool[Array, "B"],
    out: Output,
    layers: int,
    top: int | None = None,
) -> tuple[State, Sampled]:
    """Take a token from each sampled row's logits; the caches are not touched by it.

    positions: index in its request of the token to come. layers: the model's.
    """
    new = sample(out.logits, positions, state.counts, state.sampling, top)
    head_bad = jnp.where(jnp.isfinite(out.logits).all(-1) | ~sampled, -1, layers)
    head_bad = jnp.where(sampled & (head_bad < 0) & (new.token < 0), layers + 1, head_bad)
    bad = jnp.where(out.first_bad >= 0, out.first_bad, head_bad)
    bad = jnp.where((state.bad_layer >= 0) | state.done, state.bad_layer, bad)
    take = sampled & ~state.done & (bad < 0)
    made = state.made + take
    rows = jnp.arange(made.shape[0])
    stop = take & state.sampling.ends[rows, new.token]
    assert out.carry is not None  # it went in with the state
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


@functools.partial(jax.jit, static_argnames=("ctx", "top", "prompt_top"), donate_argnames="state")
def prefill(
    model: K3,
    state: State,
    batch: Batch,
    sampled: Bool[Array, "B"],
    ctx: Context,
    source: Int[Array, "B"] | None = None,
    top: int | None = None,
    targets: Int[Array, "T"] | None = None,
    prompt_top: int | None = None,
) -> tuple[State, Sampled, Sampled | None]:
    """One piece of the prompts; rows in `sampled` end theirs here and get their first token, -1 elsewhere.

    source: the row whose prompt is each row's (its own where None). prompt_top, targets: log-probabilities of the token
    that follows each one of the piece, with this many alternatives.
    """
    rows = batch.num_computed.shape[0]
    assert (prompt_top is None) == (targets is None)
    if prompt_top is not None:
        every = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        batch = batch._replace(logits_indices=jnp.concatenate([batch.logits_indices, every]))
    out = forward(model, batch, state.carry, ctx)
    positions, following = batch.seq_lens, None
    if prompt_top is not None and targets is not None:
        following = Sampled(targets, *logprobs(out.logits[rows:], targets, prompt_top))
        out = out._replace(logits=out.logits[:rows])
    if source is not None:
        out = out._replace(first_bad=out.first_bad[source])
        positions = positions[source]
    return *commit(state, positions, sampled, out, model.config.num_hidden_layers, top), following


@functools.partial(jax.jit, donate_argnames="state")
def fork(state: State, source: Int[Array, "B"], block_table: Int[Array, "B P"]) -> State:
    """Every row gets a copy of the memory of row `source`, which is itself for all but further samples of a prompt."""
    kda, mla, lengths = state.carry
    moved = Carry(
        kda=jax.tree.map(lambda a: a[source], kda),
        mla=tuple(a.at[block_table].set(a[block_table[source]]) for a in mla),
        lengths=lengths[source],
    )
    return state._replace(carry=moved)


@functools.partial(jax.jit, static_argnames=("ctx", "top"), donate_argnames="state")
def decode(
    model: K3,
    state: State,
    block_table: Int[Array, "B P"],
    steps: Int[Array, ""],
    ctx: Context,
    top: int | None = None,
) -> tuple[State, Sampled]:
    """Up to `steps` <= DECODE tokens for every row, without the host; fewer if all rows are done.

    What was sampled comes stacked, [DECODE, B]; unused entries hold token -1.
    """
    rows = state.last.shape[0]
    slots = jnp.arange(rows, dtype=jnp.int32)
    ctx = dataclasses.replace(ctx, decode_rows=rows)

    def more(loop: tuple[Array, State, Sampled]) -> Array:
        i, state, _ = loop
        return (i < steps) & ~state.done.all()

    def one(loop: tuple[Array, State, Sampled]) -> tuple[Array, State, Sampled]:
        i, state, all_new = loop
        batch = Batch(
            tokens=state.last,
            query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32),
            num_computed=state.carry.lengths,
            state_indices=jnp.where(state.done, NOWHERE, slots),  # a finished row computes, and leaves no trace
            block_table=jnp.where(state.done[:, None], NOWHERE, block_table),
            logits_indices=slots,
        )
        state, new = step(model, state, batch, ~state.done, ctx, top)
        return i + 1, state, jax.tree.map(lambda a, b: a.at[i].set(b), all_new, new)

    none = Sampled(jnp.full((DECODE, rows), -1, jnp.int32))
    if top is not None:
        floats, ids = (jnp.zeros((DECODE, rows, top), dtype) for dtype in (jnp.float32, jnp.int32))
        none = Sampled(none.token, jnp.zeros((DECODE, rows)), ids, floats)
    _, state, all_new = jax.lax.while_loop(more, one, (jnp.int32(0), state, none))
    return state, all_new


# -- what the programs are given ---------------------------------------------------------------------------------------


def begin(
    model: K3,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    end_ids: Sequence[int],
    starts: Sequence[Conversation | None] = (),
) -> tuple[State, Int[np.ndarray, "B P"]]:
    """A group before its first step, and which pages each row has. `starts`: conversations that begin the prompts."""
    rows, vocabulary = power_of_two(len(prompts)), model.config.vocab_size
    longest = max(len(prompt) + p.max_tokens for prompt, p in zip(prompts, params, strict=True))
    pages = power_of_two(max([-(-longest // PAGE), *(_pages(start) for start in starts if start)]))
    table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    carry = carries.empty(model.config, slots=rows, pages=rows * pages, dtype=str(model.dtype))
    for row, start in enumerate(starts):
        if start is not None and (row == 0 or start is not starts[row - 1]):  # further samples get copies: fork
            carry = carries.put(carry, row, jnp.asarray(table[row, : _pages(start)]), start.carry)
    state = State(
        carry=carry,
        last=jnp.zeros(rows, jnp.int32),
        made=jnp.zeros(rows, jnp.int32),
        counts=jnp.zeros((rows, vocabulary), jnp.int32),
        done=jnp.arange(rows) >= len(prompts),
        bad_layer=jnp.full(rows, -1, jnp.int32),
        sampling=by_row(params, prompts, end_ids, rows, vocabulary),
    )
    return state, table


def _pages(start: Conversation) -> int:
    return start.carry.mla[0].shape[0] if start.carry.mla else 0


class Piece(NamedTuple):
    """One step of prefill: the batch, the rows that end their prompts in it, and the token that follows each of its tokens."""

    batch: Batch
    sampled: Bool[np.ndarray, "B"]
    targets: Int[np.ndarray, "T"]


def prefill_batches(
    prompts: Sequence[Sequence[int]],
    table: Int[np.ndarray, "B P"],
    computed: Sequence[int] = (),
    source: Sequence[int] = (),
) -> Iterator[Piece]:
    """The prompts packed into steps of at most PREFILL tokens, cut where a step is full.

    computed: tokens of each prompt that are in its carry already. source: the row that computes each row's prompt (its own
    where empty); its other rows wait, and are sampled with it.
    """
    rows, slots = table.shape[0], np.arange(table.shape[0], dtype=np.int32)
    done, lengths, origin = np.zeros(rows, np.int32), np.zeros(rows, np.int32), slots.copy()
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    done[: len(computed)] = computed
    origin[: len(source)] = source
    own = origin == slots
    lengths[~own] = done[~own] = 0
    while (done < lengths).any():
        left = PREFILL
        taken = np.zeros(rows, np.int32)
        for row in range(rows):
            taken[row] = min(left, lengths[row] - done[row])
            left -= taken[row]
        ends = np.concatenate([[0], np.cumsum(taken)]).astype(np.int32)
        tokens, targets = np.zeros((2, max(16, power_of_two(int(ends[-1])))), np.int32)
        for row, prompt in enumerate(prompts):
            piece = slice(ends[row], ends[row + 1])
            tokens[piece] = prompt[done[row] : done[row] + taken[row]]
            following = prompt[done[row] + 1 : done[row] + taken[row] + 1] if taken[row] else []
            targets[ends[row] : ends[row] + len(following)] = following
        batch = Batch(*map(jnp.asarray, (tokens, ends, done, slots, table, np.maximum(ends[1:] - 1, 0)[origin])))
        yield Piece(batch, ((taken > 0) & (done + taken == lengths))[origin], targets)
        done = done + taken
