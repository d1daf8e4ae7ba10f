"""A request on its way through the engine, and what its user gets of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from k3jax.answers import ChatCompletion, Completion, Writer
from k3jax.carry import Carry, Conversation
from k3jax.config import K3Config
from k3jax.engine.grammar import Constraint
from k3jax.engine.scheduler import Job
from k3jax.generate import Found
from k3jax.io.tokenizer import Tokenizer
from k3jax.kernels import Kernels
from k3jax.model import K3
from k3jax.requests import End, Prompt, Request, Token
from k3jax.sampling import Sampled, SamplingParams, stop_ids


class Loaded(Protocol):
    """What the engine needs of k3jax.LM."""

    config: K3Config
    tokenizer: Tokenizer | None
    kernels: Kernels
    mesh: Mesh | None
    end_ids: tuple[int, ...]

    @property
    def model(self) -> K3: ...

    def as_chat(self, request: Request) -> Request: ...

    def requests(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], state: Conversation | None = None
    ) -> list[Request]: ...

    @property
    def chat_requests(self) -> Callable[..., list[Request]]: ...  # LM.chat_requests says of what


class Output(NamedTuple):
    """A new token of a request, or its end."""

    request: int  # what add_request returned
    sample: int  # 0 to n-1
    text: str  # that is certain now: a token may complete none
    token_ids: list[int]
    result: Completion | ChatCompletion | None = None  # at the end of this sample


@dataclasses.dataclass(eq=False)
class Live:
    """One sample of a request: its place in the schedule, its text so far, what it may say next."""

    name: tuple[int, int]  # number and sample
    request: Request
    job: Job
    keep: bool  # whether its end carries its memory
    writer: Writer
    constraint: Constraint | None
    prompt: Prompt = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls, lm: Loaded, name: tuple[int, int], request: Request, job: Job, keep: bool) -> Live:
        """Raises ValueError for a grammar that cannot be followed."""
        params, constraint = request.params, None
        if params.json_schema is not None or params.regex is not None:
            constraint = Constraint(lm.tokenizer, params, lm.end_ids, request.channels, tools=request.calls)
        writer = Writer(request, lm.tokenizer, stop_ids(params, lm.end_ids), request.reader)
        return cls(name, request, job, keep, writer, constraint)

    def push(self, token: Token) -> str:
        """One more token; the text that is certain now. Raises ValueError where its grammar turns out to be too complex."""
        self.job.tokens.append(token.token)
        text = self.writer.push(token)
        if self.constraint:
            self.constraint.push(token.token)
        return text

    @property
    def complete(self) -> bool:
        """Whether its text has ended, by a stop text or by its grammar."""
        return self.writer.stopped or (self.constraint is not None and self.constraint.finished)

    @property
    def ending(self) -> str | None:
        """Why it has ended, as far as its tokens say."""
        if not self.writer.tokens:
            return None
        if self.complete or self.writer.tokens[-1].token in self.writer.stop_ids:
            return "stop"
        return "length" if len(self.job.tokens) >= self.job.most else None

    def tokens(self, found: Found, place: int) -> Iterator[Token]:
        """What a step found in this row."""
        new, wanted = found.new, self.request.params.logprobs
        stacked = new.token.ndim == 2
        for i, token in enumerate(new.token[:, place] if stacked else new.token[place : place + 1]):
            if token >= 0:
                at = (i, place) if stacked else (place,)
                yield Token(int(token), *((None, {}) if wanted is None else _entry(new, at, wanted)))

    def take_prompt(self, count: int, following: Sampled, start: int) -> None:
        """Log-probabilities of the prompt's tokens that follow the next `count` ones, which lie at `start` of the batch.

        What is known from before a preemption stays.
        """
        wanted = self.request.params.prompt_logprobs
        if wanted is not None:
            for i in range(count):
                if self.job.computed + i == len(self.prompt) < self.job.prompt - 1:
                    self.prompt.append(_entry(following, (start + i,), wanted))

    def end(self, reason: str, error: str | None, carry: Carry | None) -> Output:
        rest, completion = self.writer.end(End(reason, error, self.prompt, carry))
        result: Completion | ChatCompletion = completion
        if self.request.reader is not None:
            result = ChatCompletion.of(self.request.reader, completion)
        return Output(*self.name, rest, [], result)


def _entry(found: Sampled, place: tuple[int, ...], wanted: int) -> tuple[float, dict[int, float]]:
    """Log-probability of the token at `place`, and of the most likely ones."""
    assert found.logprob is not None and found.top_ids is not None and found.top_logprobs is not None
    pairs = zip(found.top_ids[place][:wanted].tolist(), found.top_logprobs[place][:wanted].tolist(), strict=True)
    return float(found.logprob[place]), {i: v for i, v in pairs if v > -np.inf}  # what was cut off is no alternative
