"""The main path, file 2: prefill -> sample -> commit -> decode.

A step runs `forward` over new tokens, samples one token a row and commits what the carry now stands for. The token just
sampled is in no cache: it is the next step's input. Prompts go through `prefill` in pieces of at most PREFILL tokens, rows
packed one after another; then `decode` takes up to DECODE steps on the device before the host looks.

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
from k3jax.carry import PAGE, Carry
from k3jax.model import K3, Context, Output, forward
from k3jax.sampling import RowSampling, SamplingParams, by_row, power_of_two, sample

PREFILL = 2048  # tokens a prefill step at most
DECODE = 32  # decode steps between two looks of the host, which is when it notices an interrupt
ROWS = 64  # requests that decode together


class State(NamedTuple):
    """What a group of requests carries from step to step, all on the device. Row b has slot b and a fixed run of pages."""

    carry: Carry
    last: Int[Array, "B"]  # the token sampled last: in the token list, in no cache
    made: Int[Array, "B"]  # tokens sampled so far
    done: Bool[Array, "B"]
    bad_layer: Int[Array, "B"]  # where a value was not finite (the layer count: the head); -1: nowhere
    sampling: RowSampling


class Finished(NamedTuple):
    """A request's new tokens, whether a stop token ended them, and the layer that failed, if any."""

    token_ids: list[int]
    stopped: bool
    bad_layer: int | None


def step(model: K3, state: State, batch: Batch, sampled: Bool[Array, "B"], ctx: Context) -> State:
    """One step of any batch: forward, sample the rows in `sampled`, commit."""
    out = forward(model, batch, state.carry, ctx)
    return commit(state, batch, sampled, out, model.config.num_hidden_layers)


def commit(state: State, batch: Batch, sampled: Bool[Array, "B"], out: Output, layers: int) -> State:
    """Take a token from each sampled row's logits; the caches are not touched by it."""
    token = sample(out.logits, batch.seq_lens, state.sampling)
    head_bad = jnp.where(jnp.isfinite(out.logits).all(-1) | ~sampled, -1, layers)
    bad = jnp.where(out.first_bad >= 0, out.first_bad, head_bad)
    bad = jnp.where((state.bad_layer >= 0) | state.done, state.bad_layer, bad)
    take = sampled & ~state.done & (bad < 0)
    made = state.made + take
    stop = take & (token[:, None] == state.sampling.stop_ids).any(-1)
    assert out.carry is not None  # it went in with the state
    return State(
        carry=out.carry,
        last=jnp.where(take, token, state.last),
        made=made,
        done=state.done | stop | (take & (made >= state.sampling.max_tokens)) | (bad >= 0),
        bad_layer=bad,
        sampling=state.sampling,
    )


@functools.partial(jax.jit, static_argnames="ctx", donate_argnames="state")
def prefill(model: K3, state: State, batch: Batch, sampled: Bool[Array, "B"], ctx: Context) -> State:
    """One piece of the prompts; rows in `sampled` end theirs here and get their first token."""
    return step(model, state, batch, sampled, ctx)


@functools.partial(jax.jit, static_argnames="ctx", donate_argnames="state")
def decode(
    model: K3, state: State, block_table: Int[Array, "B P"], steps: Int[Array, ""], ctx: Context
) -> tuple[State, Int[Array, "DECODE B"]]:
    """Up to `steps` <= DECODE tokens for every row, without the host; fewer if all rows are done. Unused entries are -1."""
    rows = state.last.shape[0]
    slots = jnp.arange(rows, dtype=jnp.int32)
    ctx = dataclasses.replace(ctx, decode_rows=rows)

    def more(loop: tuple[Array, State, Array]) -> Array:
        i, state, _ = loop
        return (i < steps) & ~state.done.all()

    def one(loop: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
        i, state, tokens = loop
        batch = Batch(
            tokens=state.last,
            query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32),
            num_computed=state.carry.lengths,
            state_indices=jnp.where(state.done, NOWHERE, slots),  # a finished row computes, and leaves no trace
            block_table=jnp.where(state.done[:, None], NOWHERE, block_table),
            logits_indices=slots,
        )
        new = step(model, state, batch, ~state.done, ctx)
        return i + 1, new, tokens.at[i].set(jnp.where(new.made > state.made, new.last, -1))

    _, state, tokens = jax.lax.while_loop(more, one, (jnp.int32(0), state, jnp.full((DECODE, rows), -1, jnp.int32)))
    return state, tokens


# -- the host's side -------------------------------------------------------------------------------------------------


def generate(
    model: K3, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], end_ids: Sequence[int], ctx: Context
) -> list[Finished]:
    """Continue every prompt; ROWS at a time, in order. Prompts are not empty and every id is in the vocabulary."""
    finished: list[Finished] = []
    for start in range(0, len(prompts), ROWS):
        finished += _group(model, prompts[start : start + ROWS], params[start : start + ROWS], end_ids, ctx)
    return finished


def begin(
    model: K3, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], end_ids: Sequence[int]
) -> tuple[State, Int[np.ndarray, "B P"]]:
    """A group before its first step, and which pages each row has."""
    rows = power_of_two(len(prompts))
    longest = max(len(prompt) + p.max_tokens for prompt, p in zip(prompts, params, strict=True))
    pages = power_of_two(-(-longest // PAGE))
    state = State(
        carry=carries.empty(model.config, slots=rows, pages=rows * pages, dtype=str(model.dtype)),
        last=jnp.zeros(rows, jnp.int32),
        made=jnp.zeros(rows, jnp.int32),
        done=jnp.arange(rows) >= len(prompts),
        bad_layer=jnp.full(rows, -1, jnp.int32),
        sampling=by_row(params, end_ids, rows),
    )
    return state, np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)


def _group(
    model: K3, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], end_ids: Sequence[int], ctx: Context
) -> list[Finished]:
    state, table = begin(model, prompts, params, end_ids)
    for batch, sampled in prefill_batches(prompts, table):
        state = prefill(model, state, batch, sampled, ctx)
    first = np.where(np.asarray(state.made) > 0, np.asarray(state.last), -1)
    tokens = [[int(token)] if token >= 0 else [] for token in first[: len(prompts)]]
    left = max(p.max_tokens for p in params) - 1
    while left > 0 and not np.asarray(state.done).all():
        state, new = decode(model, state, table, np.int32(min(left, DECODE)), ctx)
        left -= DECODE
        for made, column in zip(tokens, np.asarray(new).T, strict=False):
            made += [int(token) for token in column if token >= 0]
    bad = np.asarray(state.bad_layer)
    stops = [{*p.stop_token_ids, *(() if p.ignore_eos else end_ids)} for p in params]
    return [
        Finished(made, bool(made) and made[-1] in stop, None if layer < 0 else int(layer))
        for made, stop, layer in zip(tokens, stops, bad[: len(prompts)], strict=True)
    ]


def prefill_batches(
    prompts: Sequence[Sequence[int]], table: Int[np.ndarray, "B P"]
) -> Iterator[tuple[Batch, Bool[np.ndarray, "B"]]]:
    """The prompts packed into steps of at most PREFILL tokens, cut where a step is full; and which rows a step completes."""
    rows, slots = table.shape[0], np.arange(table.shape[0], dtype=np.int32)
    computed = np.zeros(rows, np.int32)
    lengths = np.zeros(rows, np.int32)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    while (computed < lengths).any():
        left = PREFILL
        taken = np.zeros(rows, np.int32)
        for row in range(rows):
            taken[row] = min(left, lengths[row] - computed[row])
            left -= taken[row]
        ends = np.concatenate([[0], np.cumsum(taken)]).astype(np.int32)
        tokens = np.zeros(max(16, power_of_two(int(ends[-1]))), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[ends[row] : ends[row + 1]] = prompt[computed[row] : computed[row] + taken[row]]
        batch = Batch(*map(jnp.asarray, (tokens, ends, computed, slots, table, np.maximum(ends[1:] - 1, 0))))
        yield batch, (taken > 0) & (computed + taken == lengths)
        computed = computed + taken
