"""Chat messages: what may be asked, checked before anything is encoded, and what a model answers, read id by id.

Requests are those of OpenAI's chat interface: messages, tools and options as plain dictionaries.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
import operator
import reprlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from k3jax.io.tokenizer import StopText, Tokenizer

END = "end"  # the channel of what follows a message


class ChatError(ValueError):
    """A message, tool or option that cannot be encoded, or a chat template that fails."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call by the model. arguments: a JSON object, or the text if it is none. id: distinct within a message."""

    name: str
    arguments: dict[str, Any] | str
    id: str


@dataclasses.dataclass(frozen=True)
class ChatDelta:
    """A piece of an assistant's message, or all of it."""

    thinking: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def joined(cls, pieces: Iterable[ChatDelta]) -> ChatDelta:
        """The pieces as one."""
        pieces = list(pieces)
        calls = tuple(call for piece in pieces for call in piece.tool_calls)
        return cls("".join(p.thinking for p in pieces), "".join(p.content for p in pieces), calls)


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for what `_is_json` refuses."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_json(value):
        raise ValueError("a number out of range, or nested too deeply")
    return value


def read_arguments(text: str) -> dict[str, Any] | str:
    """The arguments of a call: an object, empty for blank text, or the text itself where it is no JSON object."""
    try:
        value = read_json(text) if text.strip() else {}
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


class Parser:
    """Reads an assistant's message from generated ids, given in chunks of any size.

    Control tokens are told by their ids, so text that looks like one stays text. Ids that the format does not know, and
    ids outside the vocabulary, are left out. Bytes of a character cut in two wait for the rest; bytes that never become
    one are U+FFFD, as in Tokenizer.decode. No sequence of ids raises.

    Push the token that ended the generation too. A call of a tool is reported when it ends; one that the end of the ids
    cuts off is not reported, because half of its arguments may be missing.
    """

    def __init__(self, tokenizer: Tokenizer, channel: str) -> None:
        self._tokenizer = tokenizer
        self._names = {i: name for name, i in tokenizer.special_ids.items()}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.channel = channel  # what text belongs to: "think", "response", END, or a part that the format names
        self._pieces: list[ChatDelta] = []
        self._calls = 0

    @property
    def message(self) -> ChatDelta:
        """All that was read so far."""
        return ChatDelta.joined(self._pieces)

    def push(self, ids: Iterable[int]) -> list[ChatDelta]:
        """What these ids add to the message."""
        before = len(self._pieces)
        for is_text, run in itertools.groupby(map(operator.index, ids), self._is_text):
            if is_text:
                self._text(self._utf8.decode(self._tokenizer.decode_bytes(run)))
            else:
                for i in run:
                    self._text(self._utf8.decode(b"", final=True))
                    if self.channel != END:
                        self._marker(self._names.get(i, ""))
        return self._pieces[before:]

    def finish(self) -> None:
        """Read nothing more; half a character at the end is left out."""
        self.channel = END

    def _is_text(self, i: int) -> bool:
        return 0 <= i < self._tokenizer.vocab_size and i not in self._names

    def _say(self, text: str) -> None:
        if text and self.channel == "think":
            self._pieces.append(ChatDelta(thinking=text))
        if text and self.channel == "response":
            self._pieces.append(ChatDelta(content=text))

    def _report(self, name: str, arguments: dict[str, Any] | str, call_id: str = "") -> None:
        self._calls += 1
        self._pieces.append(ChatDelta(tool_calls=(ToolCall(name, arguments, call_id or f"call_{self._calls}"),)))

    def _text(self, text: str) -> None:
        """Text between two markers, or a part of it."""
        raise NotImplementedError

    def _marker(self, name: str) -> None:
        """A control token; of a name that the format may not know."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Turn:
    """A checked message. parts: the texts of its content. tool, order: the name and place of the call it answers."""

    role: str
    parts: tuple[str, ...] = ()
    name: str | None = None
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    tool: str = ""
    order: int = 0


_KEYS = {
    "system": ("content", "name", "tools"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "reasoning_content", "thinking", "tool_calls"),
    "tool": ("content", "name", "tool_call_id"),
}
_repr = reprlib.Repr()  # one line of bounded length, however deep the value
_repr.maxstring = _repr.maxother = 80


def wrong(where: str, value: object, allowed: str) -> ChatError:
    """The error for a value that is not allowed."""
    return ChatError(f"{where}={_repr.repr(value)}: allowed is {allowed}")


def checked(
    messages: Any, tools: Any, thinking: Any, effort: Any, tool_choice: Any, response_format: Any
) -> tuple[list[Turn], list[dict[str, Any]]]:
    """A request's turns, results of tools in the order of their calls, and its tools. Raises ChatError."""
    if not isinstance(thinking, bool):
        raise wrong("thinking", thinking, "True or False")
    if effort is not None and (not isinstance(effort, str) or not effort or not thinking):
        raise wrong("effort", effort, "a word" if thinking else "None without thinking")
    declared = _tools("tools", [] if tools is None else tools)
    if not isinstance(messages, list | tuple) or not messages:
        raise wrong("messages", messages, "a list of one message or more")
    turns: list[Turn] = []
    calls: dict[str, tuple[int, str]] = {}  # of the last assistant message, not answered yet: place and name
    for i, message in enumerate(messages):
        turn = _turn(f"messages[{i}]", message)
        if turn.role == "assistant":
            calls = {call.id: (place, call.name) for place, call in enumerate(turn.calls)}
        if turn.role == "tool":
            if turn.call_id not in calls:
                left = f"the id of a call without a result, of {_repr.repr([*calls])}"
                raise wrong(f"messages[{i}].tool_call_id", turn.call_id, left)
            place, name = calls.pop(turn.call_id)
            if turn.name not in (None, name):
                raise wrong(f"messages[{i}].name", turn.name, f"{_repr.repr(name)}, the tool that was called")
            turn = dataclasses.replace(turn, tool=name, order=place)
        turns.append(turn)
    every = [tool["function"]["name"] for tool in itertools.chain(declared, *(turn.tools for turn in turns))]
    if twice := [name for i, name in enumerate(every) if name in every[:i]]:
        raise ChatError(f"tools: the name {_repr.repr(twice[0])} is there twice: allowed are distinct names")
    if tool_choice not in (None, "auto", "none", "required") or (tool_choice == "required" and not every):
        raise wrong(
            "tool_choice", tool_choice, "'auto', 'none' or 'required'" if every else "'auto' or 'none' without tools"
        )
    _response_format(response_format)
    runs = itertools.groupby(turns, key=lambda turn: turn.role == "tool")
    ordered = (sorted(run, key=lambda turn: turn.order) if is_tool else run for is_tool, run in runs)
    return list(itertools.chain.from_iterable(ordered)), declared


def _turn(where: str, message: Any) -> Turn:
    role = message.get("role") if isinstance(message, dict) else None
    if isinstance(message, dict) and (not isinstance(role, str) or role not in _KEYS):
        raise wrong(f"{where}.role", role, ", ".join(_KEYS))
    _fields(where, message, ("role",), _KEYS.get(role or "", ()))
    given = {key: value for key, value in message.items() if value is not None}
    for key in ("name", "tool_call_id"):
        if key in given:
            _text(f"{where}.{key}", given[key])
    thoughts = [key for key in ("reasoning_content", "thinking") if key in given]
    if len(thoughts) > 1:
        raise ChatError(f"{where}: reasoning_content and thinking are both given: allowed is one")
    for key in thoughts:
        _text(f"{where}.{key}", given[key], empty=True)
    listed = given.get("tool_calls", [])
    if not isinstance(listed, list | tuple):
        raise wrong(f"{where}.tool_calls", listed, "a list")
    calls = tuple(_call(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(listed))
    ids = [call.id for call in calls]
    if len({*ids}) < len(ids):
        raise ChatError(f"{where}.tool_calls: two have the same id: allowed are distinct ids in {_repr.repr(ids)}")
    tools = _tools(f"{where}.tools", given.get("tools", []))
    for key in ("content", "name"):
        if tools and given.get(key):
            raise wrong(f"{where}.{key}", given[key], "None beside tools")
    content = given.get("content", "" if calls or thoughts or tools else None)
    name, call_id = given.get("name"), given.get("tool_call_id", "")
    thinking = given[thoughts[0]] if thoughts else ""
    return Turn(role or "", _parts(f"{where}.content", content), name, thinking, calls, call_id, tuple(tools))


def _parts(where: str, content: Any) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list | tuple):
        raise wrong(where, content, "a string or a list of text parts")
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise wrong(f"{where}[{j}].type", kind, "'text' (vision is not supported)")
        _fields(f"{where}[{j}]", part, ("type", "text"))
        _text(f"{where}[{j}].text", part["text"], empty=True)
    return tuple(part["text"] for part in content)


def _call(where: str, call: Any) -> ToolCall:
    _fields(where, call, ("id", "function"), ("type",))
    _text(f"{where}.id", call["id"])
    function = _function(where, call, ("name", "arguments"))
    arguments = function["arguments"]
    if isinstance(arguments, str):  # a text that is no JSON object is what a model wrote, and goes back as it is
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, dict) or not _is_json(arguments):
        raise wrong(f"{where}.function.arguments", arguments, "a JSON object, or a string")
    return ToolCall(function["name"], arguments, call["id"])


def _function(where: str, value: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
    if value.get("type", "function") != "function":
        raise wrong(f"{where}.type", value["type"], "'function'")
    _fields(f"{where}.function", value["function"], required, optional)
    _text(f"{where}.function.name", value["function"]["name"])
    return value["function"]


def _tools(where: str, tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list | tuple):
        raise wrong(where, tools, "a list")
    for i, tool in enumerate(tools):
        _fields(f"{where}[{i}]", tool, ("type", "function"))
        function = _function(f"{where}[{i}]", tool, ("name",), ("description", "parameters", "strict"))
        if not isinstance(function.get("strict", False), bool | None):
            raise wrong(f"{where}[{i}].function.strict", function["strict"], "True or False")
        if "description" in function:
            _text(f"{where}[{i}].function.description", function["description"], empty=True)
        if "parameters" in function:
            _schema(f"{where}[{i}].function.parameters", function["parameters"])
    return list(tools)


def _schema(where: str, schema: Any) -> None:
    """A JSON schema's containers: what holds schemas, names or values is of the right kind, all the way down."""
    if not isinstance(schema, dict) or not _is_json(schema):
        raise wrong(where, schema, "a JSON schema, an object")
    for key, value in schema.items():
        inner = f"{where}.{key}"
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            if not isinstance(value, dict):
                raise wrong(inner, value, "an object of schemas")
            below = [(f"{inner}[{_repr.repr(name)}]", each) for name, each in value.items()]
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise wrong(inner, value, "a list of schemas")
            below = [(f"{inner}[{i}]", each) for i, each in enumerate(value)]
        else:
            if key in ("required", "enum") and not isinstance(value, list):
                raise wrong(inner, value, "a list")
            if key == "required" and not all(isinstance(name, str) for name in value):
                raise wrong(inner, value, "a list of names")
            if key == "type" and not isinstance(value, str | list):
                raise wrong(inner, value, "a type's name or a list of them")
            below = [(inner, value)] if key in ("items", "additionalProperties", "not") else []
        for place, each in below:
            if not isinstance(each, bool):  # true and false are schemas too
                _schema(place, each)


def _response_format(value: Any) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise wrong("response_format.type", kind, "'text', 'json_object' or 'json_schema'")
    _fields("response_format", value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_schema":
        _fields("response_format.json_schema", value["json_schema"], ("schema",), ("name", "description", "strict"))
        _schema("response_format.json_schema.schema", value["json_schema"]["schema"])


def _fields(where: str, value: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(value, dict):
        raise wrong(where, value, f"an object with {', '.join(required)}")
    known = (*required, *optional)
    for key in value:
        if key not in known:
            raise ChatError(f"{where} has the key {_repr.repr(key)}: allowed are {', '.join(known)}")
    for key in required:
        if key not in value:
            raise ChatError(f"{where}.{key} is missing: allowed is an object with {', '.join(required)}")


def _text(where: str, value: Any, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise wrong(where, value, "a string" if empty else "a string that is not empty")


def _is_json(value: Any, depth: int = 100) -> bool:
    """Whether JSON can hold the value: keys are strings, numbers those of a double's range, at most `depth` levels."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and _is_json(each, depth - 1) for key, each in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_is_json(each, depth - 1) for each in value)
    in_range = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value is None or isinstance(value, str) or in_range


class ChatStream:
    """An answer as its ids come, read by a parser: what a TextStream is for plain text.

    A stop text ends it within the thoughts or within the content; what lies around them, tags and calls, is not looked at.
    """

    def __init__(self, parser: Parser, stops: Sequence[str] = ()) -> None:
        self.pieces: list[ChatDelta] = []
        self._parser, self._stops = parser, tuple(stops)
        self._part, self._until = "", StopText(stops)

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer."""
        return self._until.stop

    @property
    def message(self) -> ChatDelta:
        """All that has come so far."""
        return ChatDelta.joined(self.pieces)

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that is certain after one more id; the same comes as pieces."""
        return "".join([self._take(piece, may_stop) for piece in self._parser.push([token])])

    def finish(self) -> str:
        """The rest, once no id will follow."""
        return self._turn_to("")

    def _take(self, piece: ChatDelta, may_stop: bool) -> str:
        if self.stop is not None:
            return ""
        part = "thinking" if piece.thinking else "content" if piece.content else ""
        rest = "" if part == self._part else self._turn_to(part)
        if piece.tool_calls:
            self.pieces.append(piece)
        return rest + self._say(self._until.push(piece.thinking + piece.content, may_stop=may_stop))

    def _turn_to(self, part: str) -> str:
        """Another part of the answer: what was held back belongs to the one before."""
        rest = self._say(self._until.finish())
        if self.stop is None:
            self._part, self._until = part, StopText(self._stops)
        return rest

    def _say(self, text: str) -> str:
        if text:
            self.pieces.append(ChatDelta(thinking=text) if self._part == "thinking" else ChatDelta(content=text))
        return text
