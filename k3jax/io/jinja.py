"""Chat by a template that a model directory ships, as Hugging Face renders it, in a sandbox.

A template makes one text, in which control tokens stand by name. So that what a user typed does not become one, names
in the user's texts are broken by a sentinel, a character that occurs nowhere else, until the text is cut at the names.
A template may still take characters out of a text, or turn it round; so it is rendered once more with the marks in the
users' texts replaced, and must write the same control tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from k3jax.io.messages import END, ChatError, Parser, Turn, checked, read_arguments, wrong
from k3jax.io.tokenizer import Tokenizer

# Variables of templates. The other options go by their own names.
_EFFORTS = ("reasoning_effort", "thinking_effort")
_SWITCHES = ("thinking", "enable_thinking")


class JinjaChat:
    """A model directory's own chat template. Raises ChatError if it is none.

    bos_token, eos_token: texts that the template may write. parser: makes the reader of an answer, given whether that
    thinks; without it, a JinjaParser reads. Nothing runs but Jinja on plain values: the sandbox refuses Python's
    internals. A template can still take long.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        parser: Callable[[bool], Parser] | None = None,
    ) -> None:
        for name, value in (("template", template), ("bos_token", bos_token), ("eos_token", eos_token)):
            if not isinstance(value, str):
                raise wrong(name, value, "a string")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(template)
            self._wanted = jinja2.meta.find_undeclared_variables(environment.parse(template))
        except Exception as error:  # of Jinja, or of Python, which Jinja compiles to
            raise _failed(error) from None
        self._tokenizer, self._parser = tokenizer, parser
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._names = _Names(tokenizer.special_ids)
        self._used = set(template).union(bos_token, eos_token, *tokenizer.special_ids)

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
        """The ids of a prompt, up to the assistant's first token. Options as of K3Chat.encode, of effort any word.

        Raises ChatError naming what is wrong: an option that the template does not look at, say, or its complaint.
        """
        turns, declared = checked(messages, tools, thinking, effort, tool_choice, response_format)
        if any(turn.tools for turn in turns):
            raise ChatError("messages have tools: allowed is the option tools, with a chat template")
        if not thinking and "<think>" in self._tokenizer.special_ids and self._wanted.isdisjoint(_SWITCHES):
            raise wrong("thinking", thinking, "True (the chat template has no switch)")
        sentinel = self._sentinel([*map(dataclasses.asdict, turns), declared, effort, response_format])

        def rendered(users: Callable[[Any], Any]) -> list[int]:
            values = self._values(turns, declared, users, thinking, effort, tool_choice, response_format)
            try:
                text = self._template.render(values)
            except Exception as error:  # a template can fail in any way
                raise _failed(error) from None
            return self._ids(text, sentinel)

        broken = functools.partial(self._names.broken, sentinel=sentinel)
        ids = rendered(broken)
        control = self._tokenizer.control_ids
        masked = [i for i in rendered(lambda value: self._names.masked(broken(value))) if i in control]
        if masked != [i for i in ids if i in control]:
            raise ChatError(
                "messages: with this chat template what they say would make a control token, or take one away: "
                "allowed are texts that do not"
            )
        return ids

    def _values(
        self,
        turns: Sequence[Turn],
        declared: Sequence[Mapping[str, Any]],
        users: Callable[[Any], Any],
        thinking: bool,
        effort: str | None,
        tool_choice: Any,
        response_format: Any,
    ) -> dict[str, Any]:
        """The template's variables; `users` is applied to what users say. ChatError for one that it does not look at."""
        values: dict[str, Any] = {
            "messages": [_message(turn, users) for turn in turns],
            "add_generation_prompt": True,
            **dict.fromkeys(_SWITCHES, thinking),
            **self._tokens,
        }
        given = {
            "tools": [{k: v if k == "type" else users(v) for k, v in tool.items()} for tool in declared] or None,
            "effort": users(effort),
            "tool_choice": None if tool_choice == "auto" else tool_choice,
            "response_format": None if response_format == {"type": "text"} else users(response_format),
        }
        for option, value in given.items():
            names = self._wanted.intersection(_EFFORTS if option == "effort" else [option])
            if value is not None and not names:
                raise ChatError(f"{option} is given: allowed is None, because the chat template does not look at it")
            values |= dict.fromkeys(names, value)
        return values

    def _ids(self, text: str, sentinel: str) -> list[int]:
        ids: list[int] = []
        for part in self._names.cut(text):
            special = self._tokenizer.special_ids.get(part)
            ids += self._tokenizer.encode(part.replace(sentinel, "")) if special is None else [special]
        return ids

    def parser(self, thinking: bool = True, prompt: Sequence[int] | None = None) -> Parser:
        """Reads what is generated after `prompt`, which `encode` made: within a thought if that opens one.

        Without a prompt, after one of an empty message.
        """
        if self._parser is not None:
            return self._parser(thinking)
        tags = [self._tokenizer.special_ids.get(name) for name in ("<think>", "</think>")]
        opened = False
        if tags[0] is not None:
            if prompt is None:
                prompt = self.encode([{"role": "user", "content": ""}], thinking=thinking)
            opened = [i for i in prompt if i in tags][-1:] == tags[:1]
        return JinjaParser(self._tokenizer, opened, self._tokens["eos_token"])

    def _sentinel(self, values: Any) -> str:
        """A character of a private plane that neither the values nor the template has."""
        used = self._used.union(json.dumps(values, ensure_ascii=False))
        for code in range(0xF0000, 0x10FFFE):
            if chr(code) not in used:
                return chr(code)
        raise ChatError("messages use every private character: allowed is to leave one out")


def _message(turn: Turn, users: Callable[[Any], Any]) -> dict[str, Any]:
    """A turn as templates expect it; `users` is applied to what users say."""
    message = {"role": turn.role, "content": users("".join(turn.parts))}
    if turn.name:
        message["name"] = users(turn.name)
    if turn.thinking:
        message["reasoning_content"] = users(turn.thinking)
    if turn.call_id:
        message["tool_call_id"] = users(turn.call_id)
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": users(call.id),
                "type": "function",
                "function": {"name": users(call.name), "arguments": users(call.arguments)},
            }
            for call in turn.calls
        ]
    return message


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuses at once what the sandbox would leave undefined, which prints as nothing."""
        raise SecurityError(f"access to {attribute} of {type(obj).__name__} is unsafe")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if ensure_ascii:
        raise jinja2.TemplateError("tojson(ensure_ascii=True) is not supported")  # it would hide the sentinel
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _failed(error: Exception) -> ChatError:
    return ChatError(f"chat template: {type(error).__name__}: {' '.join(str(error).split())}")


class JinjaParser(Parser):
    """Reads an answer in the format of Kimi K2 and Kimi-Linear, as far as the tokenizer names its markers.

    `<think>`..`</think>`; calls `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`
    in a section. The beginning of a call or section ends a thought. Text in a section outside of a call is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool, eos_token: str = "") -> None:
        super().__init__(tokenizer, "think" if thinking else "response")
        self._ends = {"<|im_end|>", "[EOS]", eos_token or "[EOS]"}
        self._call = {"id": "", "arguments": ""}

    def _text(self, text: str) -> None:
        if self.channel in self._call:
            self._call[self.channel] += text
        else:
            self._say(text)

    def _marker(self, name: str) -> None:
        match name:
            case "<think>":
                self._turn_to("think")
            case "</think>" if self.channel == "think":
                self._turn_to("response")
            case "<|tool_calls_section_begin|>" | "<|tool_call_end|>":
                self._turn_to("section")
            case "<|tool_call_begin|>":
                self._turn_to("id")
            case "<|tool_call_argument_begin|>" if self.channel == "id":
                self.channel = "arguments"
            case "<|tool_calls_section_end|>":
                self._turn_to("response")
            case _ if name in self._ends:
                self._turn_to(END)

    def _turn_to(self, channel: str) -> None:
        if self.channel in self._call:  # a call ends
            call_id = self._call["id"].strip()
            name = re.sub(r":\d+$", "", call_id.removeprefix("functions."))
            self._report(name, read_arguments(self._call["arguments"]), call_id)
            self._call = {"id": "", "arguments": ""}
        self.channel = channel


class _Names:
    """The names of control tokens: where a text has them, and how it is kept from having them."""

    def __init__(self, names: Iterable[str]) -> None:
        names = [*names]
        if short := [name for name in names if len(name) < 2]:
            raise ChatError(f"control token {short[0]!r}: allowed are names of two characters or more, with a template")
        either = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"  # (?!) matches nowhere
        self._cut = re.compile(f"({either})")
        self._first = re.compile(f"(?=(?:{either}))(.)", re.IGNORECASE | re.DOTALL)  # also of names that overlap
        self._lower = [name.lower() for name in names]
        self._heads = {name[:n] for name in self._lower for n in range(1, len(name))}
        self._tails = {name[n:] for name in self._lower for n in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        plain = "".join(name for name in names if name.isalnum())  # such names have no marks
        marks = {c for name in names for c in name if not c.isalnum()}.union(plain, plain.lower(), plain.upper())
        self._marks = str.maketrans(dict.fromkeys(marks - {*" \t\n\r"}, "\u00b7"))

    def cut(self, text: str) -> list[str]:
        """The text in pieces, each a name or free of names."""
        return self._cut.split(text)

    def masked(self, value: Any) -> Any:
        """The value with a dot for every mark that a name has, so that nothing made of it is a name. Keys stay."""
        if isinstance(value, dict):
            return {k: self.masked(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.masked(each) for each in value]
        return value.translate(self._marks) if isinstance(value, str) else value

    def broken(self, value: Any, sentinel: str, is_key: bool = False) -> Any:
        """The value with a sentinel in every name in its texts, in any case, and where a name could run over an edge.

        So a template may put texts side by side, trim them or change their case. Keys are not taken for the inside of
        a name, because templates look values up by them.
        """
        if isinstance(value, dict):
            return {self.broken(k, sentinel, True): self.broken(v, sentinel) for k, v in value.items()}
        if isinstance(value, list):
            return [self.broken(each, sentinel) for each in value]
        inner = value.strip().lower() if isinstance(value, str) else ""
        if not inner:
            return value
        sizes = range(1, min(self._longest, len(inner) + 1))
        starts = any(inner[:n] in self._tails for n in sizes)
        ends = any(inner[-n:] in self._heads for n in sizes)
        within = not is_key and len(inner) < self._longest and any(inner in name for name in self._lower)
        text = self._first.sub(rf"\1{sentinel}", value)
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        return text[:first] + sentinel * starts + text[first:last] + sentinel * (ends or within) + text[last:]
