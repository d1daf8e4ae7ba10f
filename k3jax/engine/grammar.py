"""Structured output: which tokens may come next, so that a text fits a JSON schema or matches a regex.

llguidance knows which bytes a grammar lets follow, and so which tokens of the vocabulary. What is of the model's format lies
here: where a text begins, what may end it, and that no grammar makes a control token.

Blanks between the parts of a JSON text are the model's choice, but no more than 32 in one place: nothing else would end a
run of them. A schema that has `x-guidance` (llguidance's options) says for itself what blanks there may be. A key of a schema
that llguidance cannot follow is an error; one that JSON Schema does not define is a comment.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt32

from k3jax.io.messages import Parser
from k3jax.io.tokenizer import Tokenizer
from k3jax.sampling import SamplingParams, stop_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BLANKS = r"[ \t\r\n]{1,32}"

# What an assistant may write in place of its content before that has begun, and what may come once it is complete. A format
# has those whose control tokens the tokenizer has. A tag is its whole text, for what is not a tag would be content.
_OPEN, _CLOSE = ("<|open|>", "response", "<|sep|>"), ("<|close|>", "response", "<|sep|>")
_TOOLS = ("<|open|>", "tools", "<|sep|>")
_FIRST = (_OPEN, ("<think>",))
_CALLS = (_TOOLS, (*_CLOSE, *_TOOLS), ("<|tool_calls_section_begin|>",))
_LAST = (_CLOSE, ("<|end_of_msg|>",), ("<|im_end|>",))


class Constraint:
    """Keeps one sample within params.json_schema or params.regex: mask() before each of its tokens, push() after it.

    A completion is constrained from its first token on. Where its text is complete, what ends the request is allowed too, and
    nowhere else. With `reader`, a parser of a chat's answer that nobody else pushes to, the text is the answer's content, all
    of it, and thoughts and calls are free. tools: whether the model may call tools in place of content.

    Raises ValueError, before anything else is done, on what llguidance cannot follow, and where it is not installed. mask and
    push raise ValueError where the grammar turns out to be too complex. A token that ends the request is never text: a
    grammar that needs it comes to a place where nothing is allowed, and so does a text that is complete below min_tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        end_ids: Iterable[int],
        reader: Parser | None = None,
        *,
        tools: bool = True,
    ) -> None:
        self._field = field = "regex" if params.json_schema is None else "json_schema"
        self._value = getattr(params, field)
        if self._value is None:
            raise ValueError("sampling has neither json_schema nor regex: allowed is one of them")
        if tokenizer is None:
            raise self._error("with a tokenizer, which this model directory lacks")
        try:
            self._table = _table(tokenizer)
        except ImportError:
            raise self._error("with llguidance: pip install k3jax[grammar]") from None
        self._matcher = self._table.matcher(field, self._value)
        self._check(not self._matcher.is_error(), "what llguidance can follow")
        self._ends = frozenset(stop_ids(params, [*end_ids]))
        self._no_ends = ~self._table.words(self._ends)
        self._reader = reader
        first = [] if reader is None else _paths(tokenizer, _FIRST + _CALLS * tools)
        self._before = [path for path in first if self._ends.isdisjoint(path)]
        self._after: list[list[int]] = [] if reader is None else _paths(tokenizer, _LAST + _CALLS * tools)
        self._begun = self._called = self._ended = False
        self._tag: list[int] = []  # what has come of a path
        self._ways: list[list[int]] = []  # the paths that it may be
        self._mask: UInt32[np.ndarray, "W"] | None = None  # what is known until the next token

    @property
    def finished(self) -> bool:
        """Whether nothing can follow: an end token has come, or the text is complete and there is none to end it."""
        if self._ended or self._ends or self._tag or not self._here:
            return self._ended
        return self._matcher.is_accepting() and not self._text().any()

    def mask(self) -> UInt32[np.ndarray, "W"] | None:
        """A bit for each token that may come next, as sampling.sample takes it; None: any may."""
        if not self._tag and not self._here:
            return None
        if self._tag:
            return self._table.words({way[len(self._tag)] for way in self._ways})
        ends = self._ends if self._complete else ()
        return self._text() | self._table.words({*ends, *(path[0] for path in self._open())})

    def push(self, token: int) -> None:
        """The token that came. Raises ValueError on one that the mask did not allow."""
        here, complete = self._here, self._complete
        if self._reader is not None:
            self._called |= any(piece.tool_calls for piece in self._reader.push([token]))
        if token in self._ends and (complete or not here):
            self._ended = True
        elif self._tag or (here and token in self._table.control):
            self._follow(token)
        elif here:
            self._mask, self._begun = None, True
            self._check(token not in self._ends and self._matcher.consume_token(token), f"not token {token} here")

    @property
    def _here(self) -> bool:
        """Whether the next token is of the text, or leaves it."""
        return self._reader is None or self._reader.channel == "response"

    @property
    def _complete(self) -> bool:
        """Whether the text may end here; calls are an answer without it."""
        return self._matcher.is_accepting() or (self._called and not self._begun)

    def _open(self) -> list[list[int]]:
        """The paths that may begin here."""
        return [path for path in self._before if not self._begun] + [path for path in self._after if self._complete]

    def _follow(self, token: int) -> None:
        """One more token of a path; the shortest that is whole was it."""
        if not self._tag:
            self._ways = self._open()
        self._tag.append(token)
        size = len(self._tag)
        self._ways = [way for way in self._ways if way[:size] == self._tag]
        self._check(bool(self._ways), f"not token {token} here")
        if any(len(way) == size for way in self._ways):
            self._tag, self._ways = [], []

    def _text(self) -> UInt32[np.ndarray, "W"]:
        """What the grammar lets come next; what would end the request is no text."""
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            self._check(not self._matcher.is_error(), "a simpler one")
            self._mask = bits[: len(self._no_ends)] & self._table.text & self._no_ends
        return self._mask

    def _check(self, ok: bool, allowed: str) -> None:
        if not ok:
            reason = re.split(r"\n +\d+ \|", self._matcher.get_error())[0]  # what follows shows our grammar's lines
            reason = " ".join(re.sub(r"^at \d+\(\d+\): ", "", reason).split())[:300]
            raise self._error(f"{allowed} ({reason})" if reason else allowed)

    def _error(self, allowed: str) -> ValueError:
        return ValueError(f"{self._field}={' '.join(repr(self._value).split())[:200]}: allowed is {allowed}")


class _Table:
    """A vocabulary as llguidance knows it, and which of its tokens are text: a control token is none, whatever its name.

    One more entry than the vocabulary has is llguidance's own end token; the request's are not its business.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self._llguidance = llguidance
        self.size, self.control = tokenizer.vocab_size, tokenizer.control_ids
        tokens = [tokenizer.decode_bytes([i]) for i in range(self.size)]
        self._tokenizer = llguidance.LLTokenizer(_Words(tokens))  # type: ignore[arg-type]
        self.text = self.words(i for i in range(self.size) if i not in self.control)

    def words(self, ids: Iterable[int]) -> UInt32[np.ndarray, "W"]:
        """The mask of these tokens."""
        listed, words = np.fromiter(ids, np.uint32), np.zeros(-(-self.size // 32), np.uint32)
        np.bitwise_or.at(words, listed // 32, np.uint32(1) << listed % 32)
        return words

    def matcher(self, field: str, value: str) -> LLMatcher:
        """Follows a grammar from its start. Without forcing: it would allow one way alone to cut bytes that are certain."""
        if field == "regex":
            rule = f"/{self._llguidance.regex_to_lark(value, '')}/"
        else:
            schema = {"x-guidance": {"whitespace_pattern": _BLANKS}} | json.loads(value)
            rule = f"%json {json.dumps(schema)}"
        new = self._llguidance.LLMatcher
        grammar = new.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\nstart: {rule}')
        return new(self._tokenizer, grammar, log_level=0)


class _Words:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens, self.special_token_ids = [*tokens, b"<end>"], [self.eos_token_id]
        self._bytes = {token: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[data[i : i + 1]] for i in range(len(data))]


_tables: weakref.WeakKeyDictionary[Tokenizer, _Table] = weakref.WeakKeyDictionary()


def _table(tokenizer: Tokenizer) -> _Table:
    if tokenizer not in _tables:
        _tables[tokenizer] = _Table(tokenizer)
    return _tables[tokenizer]


def _paths(tokenizer: Tokenizer, names: Iterable[Sequence[str]]) -> list[list[int]]:
    """The ids of those paths whose control tokens the tokenizer has. Texts between markers are encoded for themselves."""
    special: dict[str, Any] = tokenizer.special_ids
    return [
        [i for part in path for i in ([special[part]] if part in special else tokenizer.encode(part))]
        for path in names
        if all(part in special for part in path if part.startswith("<"))
    ]
