"""What a user gets: completions, the pieces they come in, scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from k3jax.carry import Conversation
from k3jax.io.chat import ChatStream, ToolCall
from k3jax.io.tokenizer import TextStream, Tokenizer
from k3jax.requests import End, Request, Token


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities, a token each; `top` has the most likely tokens, best first.

    mode: "raw", of the model's own distribution over the whole vocabulary; "processed", of the one the token was drawn
    from, after bias, penalties, temperature and truncation, over the tokens that were kept. A prompt's first token has None.
    """

    mode: str
    tokens: list[float | None]
    top: list[dict[int, float]]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One request's outcome.

    token_ids ends with the stop token when one ended it, or with the token that completed a stop text; text has neither,
    nor any other control token, and is None without a tokenizer.
    finish_reason: "stop" (`stop` says by which token id or text; None: the text of a grammar is complete), "length"
    (max_tokens), or "error" (a value was not finite, or every token was forbidden; `error` says where). state: what continuing
    needs, where it was asked for; None after an error.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None = None
    stop: int | str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    state: Conversation | None = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Delta:
    """A piece of a completion as it is made. The last piece has the whole completion."""

    text: str
    token_ids: list[int]
    completion: Completion | None = None


@dataclasses.dataclass(frozen=True)
class ChatCompletion:
    """An assistant's message. finish_reason: "tool_calls" where it stopped to call some, else the completion's.

    completion: what it was read from, with token ids and, where they were asked for, log-probabilities; its text is that
    of thinking and content. `message()` is what goes into `messages` for the next turn.
    """

    thinking: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    completion: Completion = dataclasses.field(repr=False)

    @classmethod
    def of(cls, reader: ChatStream, completion: Completion) -> ChatCompletion:
        """What `reader` has read of a completion's tokens."""
        message, reason = reader.message, completion.finish_reason
        reason = "tool_calls" if message.tool_calls and reason == "stop" else reason
        return cls(message.thinking, message.content, message.tool_calls, reason, completion)

    def message(self) -> dict[str, Any]:
        """The message as lm.chat takes it."""
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "thinking": self.thinking}
        return message | ({"tool_calls": calls} if calls else {})


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probability (natural, raw) of each token given BOS and the tokens before it.

    bits_per_byte: bits for a byte of the text; None where the ids have no text or there is no tokenizer.
    """

    token_ids: list[int]
    logprobs: list[float]
    bits_per_byte: float | None


def failure(bad_layer: int, layers: int) -> str:
    """What State.bad_layer says of a model of `layers` layers, in words."""
    if bad_layer > layers:
        return "every token is forbidden, by logit_bias or by min_tokens and the stop ids"
    return f"values are not finite after {'the head' if bad_layer == layers else f'layer {bad_layer}'}"


class Writer:
    """Makes the completion of one request out of its events. stream: reads its ids, where they are a chat's."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        stop_ids: Sequence[int],
        stream: ChatStream | None = None,
    ) -> None:
        self.request, self.stop_ids = request, frozenset(stop_ids)
        self.silent = self.stop_ids - (tokenizer.control_ids if tokenizer else frozenset())
        self.tokens: list[Token] = []
        self.text: list[str] = []
        self.stream = stream or (tokenizer and TextStream(tokenizer, request.params.stop, request.token_ids))

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended it."""
        return self.stream is not None and self.stream.stop is not None

    def push(self, token: Token) -> str:
        """One more token: the text that is certain now."""
        self.tokens.append(token)
        if self.stream is None or token.token in self.silent:  # a stop token is the last, and no text
            return ""
        self.text.append(self.stream.push(token.token, may_stop=len(self.tokens) >= self.request.params.min_tokens))
        return self.text[-1]

    def end(self, end: End) -> tuple[str, Completion]:
        """The text that was held back, and the completion."""
        rest = self.stream.finish() if self.stream else ""
        prompt, params = list(self.request.token_ids), self.request.params
        ids = [token.token for token in self.tokens]
        logprobs = prompt_logprobs = state = stop = None
        if params.logprobs is not None:
            logprobs = Logprobs(params.logprobs_mode, [t.logprob for t in self.tokens], [t.top for t in self.tokens])
        if params.prompt_logprobs is not None:
            prompt_logprobs = Logprobs(
                "raw", [None, *(p for p, _ in end.prompt)], [{}, *(top for _, top in end.prompt)]
            )
        if end.carry is not None:
            state = Conversation((*prompt, *ids), end.carry)
        if end.reason == "stop":
            ended = ids[-1] if ids[-1] in self.stop_ids else None  # None: a grammar has nothing more to say
            stop = self.stream.stop if self.stream and self.stream.stop else ended
        text = None if self.stream is None else "".join([*self.text, rest])
        return rest, Completion(prompt, ids, text, end.reason, end.error, stop, logprobs, prompt_logprobs, state)
