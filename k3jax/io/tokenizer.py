"""Tokenizer: text to ids and back, from a checkpoint's `tiktoken.model` and `tokenizer_config.json`.

Ids 0 .. R-1 are byte-level BPE ranks (R = 163584 in the release). Ids R .. N-1 are control tokens: the config's
`added_tokens_decoder` names some, the others are `<|reserved_token_ID|>`.
"""

from __future__ import annotations

import base64
import codecs
import itertools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

RESERVED = 256  # control ids after the ranks in the release
MAX_PIECE = 400_000  # characters given to the regex engine at once; it overflows its stack on very long input
MAX_RUN = 25_000  # characters of one unbroken run of (non-)whitespace, for the same reason

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # a word takes along one space or mark in front of it
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# The pre-tokenisation of the release: the first alternative that matches wins, and no merge crosses a match.
PATTERN = "|".join(
    [
        r"\p{Han}+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # all but the last space before a word, which goes with the word
        r"\s+",
    ]
)

# Looking behind tries each run once, at its start: linear time.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{MAX_RUN + 1},}}|(?<!\s)\s{{{MAX_RUN + 1},}}")


class TokenizerError(ValueError):
    """A tokenizer file that cannot be right, or an id outside the vocabulary."""


class Tokenizer:
    """Byte-level BPE with control tokens. `ranks`: token bytes to id; `special_ids`: control token name to id."""

    def __init__(self, ranks: Mapping[bytes, int], special_ids: Mapping[str, int]):
        self.special_ids = dict(special_ids)
        self.control_ids = frozenset(special_ids.values())
        self.vocab_size = len(ranks) + len(special_ids)  # N, ids
        self.bos_id = self.special_ids.get("[BOS]")
        self.eos_id = self.special_ids.get("[EOS]")  # the end of a document; a chat turn ends with <|end_of_msg|>
        self._bpe = tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks={**ranks}, special_tokens={**special_ids})
        longest_first = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(longest_first) or '(?!)'})")  # (?!) matches nowhere

    @classmethod
    def from_directory(cls, path: str | Path, vocab_size: int | None = None) -> Tokenizer | None:
        """Reads `tiktoken.model` and `tokenizer_config.json`; None if the directory has neither.

        `vocab_size` is the model's N: ranks and specials must fit, and every id between them and N is reserved.
        Without it the vocabulary ends at the last named id. Raises TokenizerError naming the file and the problem.
        """
        rank_file, config_file = files = Path(path) / "tiktoken.model", Path(path) / "tokenizer_config.json"
        missing = [file for file in files if not file.is_file()]
        if len(missing) == 2:
            return None
        if missing:
            raise TokenizerError(f"{missing[0]}: missing, though the directory has the tokenizer's other file")
        ranks = read_ranks(rank_file)
        if vocab_size is not None and len(ranks) > vocab_size:
            raise TokenizerError(f"{rank_file}: {len(ranks)} ranks do not fit a vocabulary of {vocab_size} ids")
        return cls(ranks, read_specials(config_file, len(ranks), vocab_size))

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Text to ids. Text that looks like a control token stays plain text, unless `specials` is asked for.

        A lone surrogate, which UTF-8 cannot hold, becomes U+FFFD.
        """
        if not specials:
            return [i for piece in pieces(text) for i in self._bpe.encode_ordinary(piece)]
        ids: list[int] = []
        for part in self._special.split(text):
            ids += [self.special_ids[part]] if part in self.special_ids else self.encode(part)
        return ids

    def decode_bytes(self, ids: Iterable[int], *, specials: bool = True) -> bytes:
        """Ids to bytes, control tokens by name or left out. Raises TokenizerError on an id outside the vocabulary."""
        ids = [operator.index(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"id {i} is outside the vocabulary of {self.vocab_size} ids")
        return self._bpe.decode_bytes(ids if specials else [i for i in ids if i not in self.control_ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text; bytes that are not UTF-8 (a character cut in half, say) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class StopText:
    """Lets text through up to the first of some texts that is complete, and leaves that out."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stop: str | None = None  # the one that was found
        self._stops, self._held = tuple(stops), ""  # held: what may begin one

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What is certain once `text` has come. may_stop: whether what it completes counts."""
        if self.stop is not None:
            return ""
        known = len(self._held)  # what was complete in it before did not count then, and does not now
        text, self._held = self._held + text, ""
        places = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops]
        found = [(at, stop) for at, stop in places if may_stop and at >= 0]
        if found:
            at, self.stop = min(found)
            return text[:at]
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        begun = (n for n in range(longest, 0, -1) if any(stop[:-1].startswith(text[-n:]) for stop in self._stops))
        certain = len(text) - next(begun, 0)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The rest, once nothing will follow."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """The text of ids as they come, control tokens left out: never half a character, never a part of a stop text.

    stops: texts of which the first ends the stream, and is left out. before: ids in front of the first; where they end
    within a character, its rest completes it. Half a character at the end is left out, so that what goes on from there can
    complete it; other bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._tokenizer, self._until = tokenizer, StopText(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(tokenizer.decode_bytes(before[-4:], specials=False))  # a character has four bytes at most

    @property
    def stop(self) -> str | None:
        """The stop text that ended the stream."""
        return self._until.stop

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """What is certain after one more id. may_stop: whether a stop text counts that this id completes."""
        data = self._tokenizer.decode_bytes([token], specials=False)
        return self._until.push(self._decoder.decode(data), may_stop=may_stop)

    def finish(self) -> str:
        """The rest, once no id will follow."""
        return self._until.finish()


def pieces(text: str) -> Iterator[str]:
    """Cuts text where the release does: every MAX_PIECE characters, and every MAX_RUN within a longer run."""
    for start in range(0, len(text), MAX_PIECE):
        piece = text[start : start + MAX_PIECE]
        cuts = [cut for run in _LONG_RUN.finditer(piece) for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN)]
        for begin, end in itertools.pairwise([0, *cuts, len(piece)]):
            yield piece[begin:end]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from lines of `base64 rank`. Ranks must be 0 .. R-1, and every single byte must have one."""
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for line in filter(None, path.read_bytes().splitlines()):
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise TokenizerError(f"{path}: not a line of 'base64 rank': {line[:80]!r}") from error
        if token in ranks or rank in seen:
            raise TokenizerError(f"{path}: the token or the rank was there before: {token!r}, {rank}")
        ranks[token] = rank
        seen.add(rank)
    if gaps := set(range(len(ranks))) - seen:
        raise TokenizerError(f"{path}: no rank {min(gaps)}, though the file has {len(ranks)} ranks")
    if unranked := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{path}: no rank for the byte 0x{unranked[0]:02x}, so not every text can be encoded")
    return ranks


def read_specials(path: Path, first: int, vocab_size: int | None = None) -> dict[str, int]:
    """Control token name to id, for every id from `first` on: named by `added_tokens_decoder`, or reserved."""
    try:
        added = json.loads(path.read_text(encoding="utf-8"))["added_tokens_decoder"]
        named = {int(i): token["content"] for i, token in added.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TokenizerError(f"{path}: want JSON with added_tokens_decoder {{id: {{content}}}}: {error!r}") from error
    end = vocab_size if vocab_size is not None else first + RESERVED
    for i, name in named.items():
        if not isinstance(name, str) or not name or not first <= i < end:
            raise TokenizerError(f"{path}: special id {i}, {name!r}: want a name, and an id in {first} .. {end - 1}")
    ids: dict[str, int] = {}
    for i in range(first, end if vocab_size is not None else max(named, default=first - 1) + 1):
        name = named.get(i, f"<|reserved_token_{i}|>")
        if name in ids:
            raise TokenizerError(f"{path}: special ids {ids[name]} and {i} have the same name {name}")
        ids[name] = i
    return ids
