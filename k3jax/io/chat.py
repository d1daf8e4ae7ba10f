"""Chat: messages to the ids of a prompt, and generated ids back to a message, as Kimi K3 writes them.

An element is `<|open|>name key="value"<|sep|>body<|close|>name<|sep|>`, and a message is such an element and
`<|end_of_msg|>`. Only these four markers are control tokens. A prompt is a series of segments, markers and texts; each
text is encoded for itself and as plain text, because the model has learnt these joints, and because what a user types
must not become a control token. A directory that ships a template is the business of `jinja.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3jax.io.jinja import JinjaChat
from k3jax.io.messages import (
    END,
    ChatDelta,
    ChatError,
    ChatStream,
    Parser,
    ToolCall,
    Turn,
    checked,
    read_arguments,
    read_json,
    wrong,
)
from k3jax.io.tokenizer import Tokenizer

__all__ = ["ChatDelta", "ChatError", "ChatStream", "JinjaChat", "K3Chat", "Parser", "ToolCall", "find"]

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
EFFORTS = ("low", "high", "max")  # the last is the default

# What the model was trained to read in system messages, word for word. The list of efforts names "medium", which the
# release's own encoder refuses; so do we.
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:"

Segment = str | int  # a text, or the id of a marker


def find(directory: str | Path, tokenizer: Tokenizer) -> K3Chat | JinjaChat | None:
    """The chat format of a model directory: its template if it ships one, else K3's if the tokenizer has the markers.

    A template is `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json` (of a list, the one named
    "default"). Raises ChatError if there is one that is none.
    """
    file, config_file = Path(directory) / "chat_template.jinja", Path(directory) / "tokenizer_config.json"
    try:
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}["default"]
        tokens = {key: config.get(key) or "" for key in ("bos_token", "eos_token")}
        tokens = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ChatError(f"{directory}: no chat template can be read from it: {error!r}") from None
    is_k3 = tokenizer.special_ids.keys() >= {*MARKERS}
    if template is None:
        return K3Chat(tokenizer) if is_k3 else None
    parser = functools.partial(K3Parser, tokenizer) if is_k3 else None  # answers are in the format of the vocabulary
    return JinjaChat(tokenizer, template, parser=parser, **tokens)


class K3Chat:
    """Kimi K3's chat format. Raises ChatError if the tokenizer lacks a marker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if missing := [name for name in MARKERS if name not in tokenizer.special_ids]:
            raise ChatError(f"tokenizer without {', '.join(missing)}: allowed is one with K3's four markers")
        self._tokenizer = tokenizer
        self._open, self._close, self._sep, self._end = (tokenizer.special_ids[name] for name in MARKERS)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        effort: str | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
    ) -> list[int]:
        """The ids of a prompt, up to the assistant's first token: messages, tools and options as in OpenAI's interface.

        thinking: the answer starts with thoughts, and earlier ones are shown. effort: "low", "high" or "max", which is
        the default. tool_choice: "auto", "none" or "required". A message may have `reasoning_content` or `thinking`; a
        system message may declare `tools` in place of content. Raises ChatError naming what is wrong.
        """
        turns, declared = checked(messages, tools, thinking, effort, tool_choice, response_format)
        if effort not in (None, *EFFORTS):
            raise wrong("effort", effort, ", ".join(EFFORTS))
        segments: list[Segment] = []
        if declared:
            segments += self._system("tool-declare", _fenced(_TOOLS + "\n", declared))
        if thinking:
            segments += self._system("thinking-effort", _EFFORT.format(effort or EFFORTS[-1]))
        answers = 0  # results since the last call
        for turn in turns:
            answers = answers + 1 if turn.role == "tool" else 0 if turn.role == "assistant" else answers
            segments += self._turn(turn, thinking, answers)
        if tool_choice in _CHOICE:
            segments += self._system("tool-choice", _CHOICE[tool_choice])
        if response_format and response_format["type"] != "text":
            text = _FORMAT.format(response_format["type"])
            if response_format["type"] == "json_schema":
                text = _fenced(text + _SCHEMA, response_format["json_schema"]["schema"])
            segments += self._system("response-format", text)
        segments += self._tag("message", role="assistant")
        segments += self._tag("think" if thinking else "response")
        encode = self._tokenizer.encode
        return [i for segment in segments for i in (encode(segment) if isinstance(segment, str) else [segment])]

    def parser(self, thinking: bool = True, prompt: Sequence[int] | None = None) -> Parser:
        """Reads what is generated after `encode(..., thinking=thinking)`; every such prompt opens the same."""
        return K3Parser(self._tokenizer, thinking)

    def _turn(self, turn: Turn, thinking: bool, answers: int) -> Iterator[Segment]:
        named = {"name": turn.name} if turn.name else {}
        if turn.tools:
            return self._system("tool-declare", _fenced(_MORE_TOOLS + "\n", turn.tools))
        if turn.role == "assistant":
            return self._message(self._answer(turn, thinking), role="assistant", **named)
        if turn.role == "tool":
            return self._message(turn.parts, role="tool", tool=turn.tool, index=answers)
        return self._message(turn.parts, role=turn.role, **named)

    def _answer(self, turn: Turn, thinking: bool) -> Iterator[Segment]:
        if thinking:  # the element is there even where there is no thought
            yield from self._element("think", [turn.thinking] if turn.thinking.strip() else [])
        yield from self._element("response", turn.parts)
        if turn.calls:
            calls = (self._call(call, index) for index, call in enumerate(turn.calls, start=1))
            yield from self._element("tools", (segment for call in calls for segment in call))

    def _call(self, call: ToolCall, index: int) -> Iterator[Segment]:
        if isinstance(call.arguments, str):
            arguments = [*self._element("json", [call.arguments], type="object")]
        else:
            children = (
                self._element("argument", [_text_of(v)], key=k, type=_type_of(v)) for k, v in call.arguments.items()
            )
            arguments = [segment for child in children for segment in child]
        return self._element("call", arguments, tool=call.name, index=index)

    def _system(self, kind: str, text: str) -> Iterator[Segment]:
        return self._message([text], role="system", type=kind)

    def _message(self, body: Iterable[Segment], **attributes: Any) -> Iterator[Segment]:
        yield from self._element("message", body, **attributes)
        yield self._end

    def _element(self, tag: str, body: Iterable[Segment], **attributes: Any) -> Iterator[Segment]:
        yield from self._tag(tag, **attributes)
        yield from body
        yield from (self._close, tag, self._sep)

    def _tag(self, tag: str, **attributes: Any) -> Iterator[Segment]:
        yield from (self._open, tag)
        for key, value in attributes.items():
            yield from (f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"')
        yield self._sep


def _fenced(title: str, value: Any) -> str:
    value = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return f"{title}\n```json\n{value}\n```"


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


_TAG = re.compile(r'\w*(?: \w+="[^"]*")*(?: \w*(?:=(?:"[^"]*)?)?)?')  # any beginning of a tag
_ATTRIBUTE = re.compile(r' (\w+)="([^"]*)"')


class K3Parser(Parser):
    """Reads an answer in K3's format, also where the model left out closing tags.

    Opening a channel (think, response, tools) or a call ends what is open, and so does closing the message. What
    follows think is the response, even without its tag; closing response ends think too. Text elsewhere is dropped. An
    unfinished tag is dropped; what follows <|open|> or <|close|> and cannot become a tag is text; tags with unknown
    names, or where they mean nothing, are skipped. Of two arguments with one name the last counts.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        super().__init__(tokenizer, "think" if thinking else "response")
        self._opens: bool | None = None  # whether the tag being read opens or closes; None outside of a tag
        self._tag = ""
        self._name: str | None = None  # of the call being read
        self._arguments: dict[str, Any] | str = {}
        self._argument: dict[str, str] | None = None  # attributes of the argument being read
        self._value: list[str] = []

    def _text(self, text: str) -> None:
        if self._opens is not None:
            self._tag += text
            if _TAG.fullmatch(self._tag):
                return
            self._opens, text = None, self._tag
        if self._argument is not None:
            self._value.append(text)
        else:
            self._say(text)

    def _marker(self, name: str) -> None:
        if name == "<|sep|>" and self._opens is not None:
            opens, self._opens = self._opens, None
            element, attributes = self._tag.partition(" ")[0], _ATTRIBUTE.findall(self._tag)
            if opens:
                self._start(element, {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in attributes})
            else:
                self._stop(element)
        elif name in ("<|open|>", "<|close|>"):
            self._opens, self._tag = name == "<|open|>", ""
        elif name in ("<|end_of_msg|>", "[EOS]"):
            self._opens = None
            self._stop("message")

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        if element in ("think", "response", "tools", "call"):
            self._stop("call")
            self.channel = "tools" if element == "call" else element
        if element == "call":
            self._name, self._arguments = attributes.get("tool", ""), {}
        elif element in ("argument", "json") and self._name is not None:
            self._stop("argument")
            self._argument, self._value = {**attributes, "element": element}, []
        elif element == "message":
            self._stop("message")

    def _stop(self, element: str) -> None:
        if element in ("argument", "json", "call", "tools", "message") and self._argument is not None:
            self._take("".join(self._value), self._argument)
            self._argument = None
        if element in ("call", "tools", "message") and self._name is not None:
            self._report(self._name, self._arguments)
            self._name = None
        if element == "message":
            self.channel = END
        elif element == "think" and self.channel == "think":
            self.channel = "response"
        elif (element == "response" and self.channel == "think") or element == self.channel:
            self.channel = ""

    def _take(self, text: str, attributes: dict[str, str]) -> None:
        """An argument's text; where it is not of its type, it stays text."""
        if attributes["element"] == "json":
            self._arguments = read_arguments(text)
        elif isinstance(self._arguments, dict):
            value: Any = text
            if attributes.get("type") in ("number", "boolean", "null", "object", "array"):
                with contextlib.suppress(ValueError):
                    value = read_json(text)
            self._arguments[attributes.get("key", "")] = value
