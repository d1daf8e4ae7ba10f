"""The host's side of generation: requests in, tokens out as they are found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import carry as carries
from k3jax.batch import Batch
from k3jax.carry import PAGE, Carry, Conversation
from k3jax.generate import DECODE, begin, decode, fork, prefill, prefill_batches
from k3jax.model import K3, Context
from k3jax.sampling import Sampled, SamplingParams, power_of_two, stop_ids

ROWS = 64  # requests that decode together
LIVE = 0.03  # seconds between two looks that nobody notices


class Request(NamedTuple):
    """One sequence to continue: n samples of a prompt are n requests, one after another."""

    token_ids: Sequence[int]  # not empty; what a conversation holds comes first
    params: SamplingParams
    prompt: int = 0  # number of its prompt; neighbours of the same number share a prefill
    start: Conversation | None = None  # its carry stands for the first of the tokens


class Token(NamedTuple):
    """A new token of a request."""

    request: int
    token: int
    logprob: float | None
    top: dict[int, float]  # of the most likely tokens, best first


class End(NamedTuple):
    """The end of a request: "stop" (its last token), "length" or "error" (`bad_layer` failed)."""

    request: int
    reason: str
    bad_layer: int | None
    prompt: list[tuple[float, dict[int, float]]]  # log-probabilities of the prompt's tokens from its second on
    carry: Carry | None  # where it is asked for, unless it failed: of this request alone, without its last token


def stream(
    model: K3,
    requests: Sequence[Request],
    end_ids: Sequence[int],
    ctx: Context,
    *,
    look: int | None = DECODE,
    ends: Callable[[int], bool] = lambda request: False,
    keep: bool = False,
) -> Iterator[Token | End]:
    """Continue every request, ROWS at a time, in order: its tokens as they are found, then its end.

    look: decode steps between two looks of the host, at most DECODE; None: as many as fit into LIVE seconds.
    ends(request): asked after each of its tokens was handed out; True ends the request with that one ("stop"). Until the
    next look its carry goes on, so that with `keep`, which hands out the carry of each request, such an end needs look=1.
    """
    for first in range(0, len(requests), ROWS):
        for event in _Group(model, requests[first : first + ROWS], end_ids, ctx, keep).run(look, ends, first):
            yield event._replace(request=first + event.request)


class _Group:
    """Requests that are computed together, one a row."""

    def __init__(
        self, model: K3, requests: Sequence[Request], end_ids: Sequence[int], ctx: Context, keep: bool
    ) -> None:
        self.model, self.requests, self.ctx, self.keep = model, requests, ctx, keep
        self.prompts = [request.token_ids for request in requests]
        params = [request.params for request in requests]
        numbers = [request.prompt for request in requests]
        self.source = [numbers.index(number) for number in numbers]
        self.stops = [stop_ids(p, end_ids) for p in params]
        self.top = _widest([p.logprobs for p in params], model.config.vocab_size)
        self.prompt_top = _widest([p.prompt_logprobs for p in params], model.config.vocab_size)
        self.prompt_logprobs: list[list[tuple[float, dict[int, float]]]] = [[] for _ in requests]
        self.state, self.table = begin(model, self.prompts, params, end_ids, [request.start for request in requests])

    def run(self, look: int | None, ends: Callable[[int], bool], first: int) -> Iterator[Token | End]:
        running = [*range(len(self.requests))]  # rows
        left = max(request.params.max_tokens for request in self.requests) - 1
        looks = self._looks(look, left)
        for new in looks:
            done, bad = (np.asarray(a) for a in (self.state.done, self.state.bad_layer))
            columns = jax.tree.map(np.asarray, new)
            stopped: list[int] = []
            for row in [*running]:
                last = None
                for event in self._tokens(row, columns):
                    yield event
                    last = event.token
                    if ends(first + row):
                        stopped.append(row)
                        break
                if row in stopped or done[row]:
                    running.remove(row)
                    layer = None if bad[row] < 0 or row in stopped else int(bad[row])
                    yield self._end(row, "stop" if row in stopped or last in self.stops[row] else "length", layer)
            if stopped:
                rows = np.isin(np.arange(done.shape[0]), stopped)
                self.state = self.state._replace(done=jnp.asarray(done | rows))
            if not running:
                return

    def _looks(self, look: int | None, left: int) -> Iterator[Sampled]:
        """What the prefill and then the decode steps between two looks sample, [steps, B]."""
        yield self._prefill()
        size = look or 1
        while left > 0:
            began = time.perf_counter()
            steps = np.int32(min(left, size))
            self.state, new = decode(self.model, self.state, self.table, steps, self.ctx, self.top)
            left -= size
            jax.block_until_ready(new)
            if look is None:  # twice as many next time, if they are as quick
                seconds = time.perf_counter() - began
                size = min(2 * size, DECODE) if 2 * seconds < LIVE else max(size // 2, 1) if seconds > LIVE else size
            yield new

    def _prefill(self) -> Sampled:
        source = np.arange(self.table.shape[0], dtype=np.int32)
        source[: len(self.source)] = self.source
        shared = (source != np.arange(len(source))).any()
        computed = [int(request.start.carry.lengths[0]) if request.start else 0 for request in self.requests]
        found: list[Sampled] = []
        for piece in prefill_batches(self.prompts, self.table, computed, self.source):
            self.state, new, following = prefill(
                self.model,
                self.state,
                piece.batch,
                piece.sampled,
                self.ctx,
                source,
                self.top,
                piece.targets if self.prompt_top is not None else None,
                self.prompt_top,
            )
            found.append(new)
            if following is not None:
                self._take_prompt(piece.batch, jax.tree.map(np.asarray, following))
        if shared:
            self.state = fork(self.state, source, self.table)
        return jax.tree.map(lambda *pieces: jnp.stack(pieces), *found)

    def _take_prompt(self, batch: Batch, following: Sampled) -> None:
        """Log-probabilities of the prompts' tokens that this piece predicts."""
        starts = np.asarray(batch.query_start_loc)
        for row, request in enumerate(self.requests):
            wanted = request.params.prompt_logprobs
            if wanted is not None and self.source[row] == row:
                entries = [_entry(following, place, wanted) for place in range(starts[row], starts[row + 1])]
                self.prompt_logprobs[row] += entries[: len(self.prompts[row]) - 1 - len(self.prompt_logprobs[row])]

    def _tokens(self, row: int, columns: Sampled) -> Iterator[Token]:
        wanted = self.requests[row].params.logprobs
        for i, token in enumerate(columns.token[:, row]):
            if token >= 0:
                entry = (None, {}) if wanted is None else _entry(columns, (i, row), wanted)
                yield Token(row, int(token), *entry)

    def _end(self, row: int, reason: str, bad_layer: int | None) -> End:
        carry = None
        if self.keep and bad_layer is None:
            pages = -(-int(self.state.carry.lengths[row]) // PAGE)
            carry = carries.take(self.state.carry, row, jnp.asarray(self.table[row, :pages]))
        wanted = self.requests[row].params.prompt_logprobs is not None
        prompt = self.prompt_logprobs[self.source[row]] if wanted else []
        return End(row, reason if bad_layer is None else "error", bad_layer, prompt, carry)


def _widest(wanted: Sequence[int | None], vocabulary: int) -> int | None:
    """Alternatives that the group's program finds: a power of two (or all), so that there are few programs."""
    numbers = [number for number in wanted if number is not None]
    return min(power_of_two(max(1, *numbers)) if max(numbers) else 0, vocabulary) if numbers else None


def _entry(found: Sampled, place: Any, wanted: int) -> tuple[float, dict[int, float]]:
    """Log-probability of the token at `place`, and of the most likely ones."""
    assert found.logprob is not None and found.top_ids is not None and found.top_logprobs is not None
    pairs = zip(found.top_ids[place][:wanted].tolist(), found.top_logprobs[place][:wanted].tolist(), strict=True)
    return float(found.logprob[place]), {i: v for i, v in pairs if v > -np.inf}  # what was cut off is no alternative
