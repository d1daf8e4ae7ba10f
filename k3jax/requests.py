"""What goes into generation and what comes out of it, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from k3jax.carry import Carry, Conversation
from k3jax.io.chat import ChatStream
from k3jax.io.messages import Parser
from k3jax.sampling import SamplingParams


class Request(NamedTuple):
    """One sequence to continue: n samples of a prompt are n requests of one `group`."""

    token_ids: Sequence[int]  # not empty; what a conversation holds comes first
    params: SamplingParams
    group: object = None  # requests of the same group (not None) have the same tokens, and share a prefill
    start: Conversation | None = None  # its carry stands for the first of the tokens
    thinking: bool | None = None  # whether a chat's model thinks before it answers; None: no chat
    reader: ChatStream | None = None  # reads the new tokens, where they are a chat's
    channels: Parser | None = None  # the same for a grammar, which has to know where the content begins
    calls: bool = False  # whether a chat may call tools in place of its content


class Token(NamedTuple):
    """A new token of a request."""

    token: int
    logprob: float | None
    top: dict[int, float]  # of the most likely tokens, best first


Prompt = list[tuple[float, dict[int, float]]]  # log-probabilities of a prompt's tokens from its second on


class End(NamedTuple):
    """The end of a request: "stop" (its last token), "length" or "error"."""

    reason: str
    error: str | None
    prompt: Prompt
    carry: Carry | None  # where it is asked for, unless it failed: of this request alone, without its last token


class Sample(NamedTuple):
    """One sample of a request that was taken out of an engine before its end."""

    number: int  # 0 to n-1
    request: Request
    made: tuple[Token, ...]  # its tokens so far
    prompt: Prompt  # as far as it is known
    carry: Carry | None  # None: nothing is computed yet
    keep: bool  # whether its end carries its memory


class Suspended(NamedTuple):
    """A request that was taken out of an engine; any engine of the same model goes on with it."""

    samples: tuple[Sample, ...]  # those that have not ended
    priority: int
    salt: str
