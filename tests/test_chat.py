"""Chat laws: exact ids of K3's format, answers read back in any chunks and with tags left out, text that stays text,
and templates in their sandbox."""

import functools
import importlib.util
import itertools
import json
import math
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.io.chat import ChatDelta, ChatError, ChatStream, JinjaChat, K3Chat, ToolCall, find
from k3jax.io.tokenizer import Tokenizer

TINY = Path(__file__).parents[1] / "checkpoints" / "k3-tiny"


def script(name):
    path = Path(__file__).parents[1] / "scripts" / "k3_tiny" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


R = 163_584  # ranks of the release
END, OPEN, CLOSE, SEP = R + 2, R + 3, R + 4, R + 5
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
         18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}  # fmt: skip
# Released ids of some texts, besides '"', which is 1.
WORDS = {
    b"hi": 9663,
    b"message": 2778,
    b" role": 6244,
    b'="': 878,
    b"system": 14062,
    b"think": 39964,
    b"response": 12092,
}
# Kimi-Linear's control tokens, as a template of its kind writes them, and a pair of tags for thoughts.
IM = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
      "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
      "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>", "<|media_content|>"]  # fmt: skip


def ranks(size, words):
    """A vocabulary of that size: single bytes, pairs of a short text, the words at their ids, and what no text has."""
    small = script("bpe").train("The weather in Paris, in the end: 漢字 and the user's thinking. 🙂🙂 " * 3, 300)
    table = {rank: token for token, rank in small.items()} | {rank: token for token, rank in words.items()}
    return {table.get(rank, b"\xff" + rank.to_bytes(3)): rank for rank in range(size)}


@pytest.fixture(scope="module")
def tok():
    """The release's sizes and known ids."""
    names = {f"<|reserved_token_{R + i}|>" if i not in NAMES else NAMES[i]: R + i for i in range(256)}
    return Tokenizer(ranks(R, WORDS), names)


@pytest.fixture(scope="module", params=["release", "k3-tiny"])
def any_tok(request, tok):
    return tok if request.param == "release" else Tokenizer.from_directory(TINY)


@pytest.fixture(scope="module")
def im_tok():
    return Tokenizer(ranks(300, {}), {name: 300 + i for i, name in enumerate(IM)})


def ids(tok, *segments):
    """Each text encoded for itself; numbers are ids."""
    return [i for s in segments for i in (tok.encode(s) if isinstance(s, str) else [s])]


def read(parser, ids, chunks=None):
    """The pieces of an answer, pushed at once or in chunks of these sizes; they must add up to the parser's message."""
    rest, deltas = list(ids), []
    for size in chunks or [len(rest)]:
        deltas += parser.push(rest[:size])
        rest = rest[size:]
    deltas += parser.push(rest)
    parser.finish()
    assert ChatDelta.joined(deltas) == parser.message
    assert ChatDelta() not in deltas
    return parser.message


def user(content="hi", **more):
    return {"role": "user", "content": content, **more}


def call(name="f", arguments="{}", id="1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


# -- K3: prompts -------------------------------------------------------------------------------------------------------
def tag(name, /, **attributes):
    """<|open|>name key="value"<|sep|>, segment by segment."""
    return [OPEN, name, *(s for k, v in attributes.items() for s in (f" {k}", '="', v, '"')), SEP]


EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort=%s`."
)


def test_shortest_prompt_has_the_released_ids(tok):
    prompt = K3Chat(tok).encode([user()], thinking=False)
    user_, assistant = tok.encode("user"), tok.encode("assistant")
    assert prompt == [
        163587, 2778, 6244, 878, *user_, 1, 163589, 9663, 163588, 2778, 163589, 163586,
        163587, 2778, 6244, 878, *assistant, 1, 163589, 163587, 12092, 163589,
    ]  # fmt: skip
    thinking = K3Chat(tok).encode([user()])
    assert thinking[:8] == [163587, 2778, 6244, 878, 14062, 1, *tok.encode(" type"), 878][:8]
    assert thinking[-3:] == [163587, 39964, 163589]


def test_whole_conversation_by_segments(tok):
    """Every part of the format once, in its order, with attributes escaped and results in the order of the calls."""
    tools = [
        tool("get", parameters={"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}, description="é")
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        user([{"type": "text", "text": "the "}, {"type": "text", "text": "end"}], name='A&"B"'),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Two calls.",
            "tool_calls": [
                call(
                    "get", '{"s": "x <|sep|>", "n": 1.50, "t": true, "z": null, "o": {"k": ["é"]}, "l": [1, 2]}', "one"
                ),
                call("get", "no json", "two"),
            ],
        },
        {"role": "tool", "tool_call_id": "two", "content": "second"},
        {"role": "tool", "tool_call_id": "one", "content": "first", "name": "get"},
        {"role": "system", "tools": [tool("more")]},
        {"role": "assistant", "content": "Done.", "name": "K"},
        user(""),
    ]
    schema = {"type": "object", "properties": {"y": {}, "x": {}}}
    prompt = K3Chat(tok).encode(
        messages,
        tools=tools,
        effort="low",
        tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    end = [CLOSE, "message", SEP, END]

    def argument(key, kind, text):
        return [*tag("argument", key=key, type=kind), text, CLOSE, "argument", SEP]

    expected = [
        *tag("message", role="system", type="tool-declare"),
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"description":"é","name":"get","parameters":{"properties":{"a":{},"b":{"type":"string"}},'
        '"type":"object"}},"type":"function"}]\n```',
        *end,
        *tag("message", role="system", type="thinking-effort"), EFFORT % "low", *end,
        *tag("message", role="system"), "Be brief.", *end,
        *tag("message", role="user", name="A&amp;&quot;B&quot;"), "the ", "end", *end,
        *tag("message", role="assistant"),
        *tag("think"), "Two calls.", CLOSE, "think", SEP,
        *tag("response"), CLOSE, "response", SEP,
        *tag("tools"),
        *tag("call", tool="get", index="1"),
        *argument("s", "string", "x <|sep|>"),
        *argument("n", "number", "1.5"),
        *argument("t", "boolean", "true"),
        *argument("z", "null", "null"),
        *argument("o", "object", '{"k": ["é"]}'),
        *argument("l", "array", "[1, 2]"),
        CLOSE, "call", SEP,
        *tag("call", tool="get", index="2"),
        *tag("json", type="object"), "no json", CLOSE, "json", SEP,
        CLOSE, "call", SEP,
        CLOSE, "tools", SEP, *end,
        *tag("message", role="tool", tool="get", index="1"), "first", *end,
        *tag("message", role="tool", tool="get", index="2"), "second", *end,
        *tag("message", role="system", type="tool-declare"),
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all "
        "existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n"
        '[{"function":{"name":"more"},"type":"function"}]\n```',
        *end,
        *tag("message", role="assistant", name="K"),
        *tag("think"), CLOSE, "think", SEP, *tag("response"), "Done.", CLOSE, "response", SEP, *end,
        *tag("message", role="user"), *end,
        *tag("message", role="system", type="tool-choice"),
        "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
        *end,
        *tag("message", role="system", type="response-format"),
        "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without markdown "
        "code blocks (```json) or any additional formatting.\nThe JSON data must match the following schema:\n"
        '```json\n{"properties":{"x":{},"y":{}},"type":"object"}\n```',
        *end,
        *tag("message", role="assistant"), *tag("think"),
    ]  # fmt: skip
    assert prompt == ids(tok, *expected)


@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
def test_effort_is_told_and_max_unless_asked(tok, effort):
    prompt = K3Chat(tok).encode([user()], effort=effort)
    head = ids(
        tok, *tag("message", role="system", type="thinking-effort"), EFFORT % (effort or "max"), CLOSE, "message"
    )
    assert prompt[: len(head)] == head


def test_without_thinking_there_is_neither_effort_nor_thought(tok):
    messages = [user(), {"role": "assistant", "content": "a", "thinking": "b"}, user()]
    prompt = K3Chat(tok).encode(messages, thinking=False, tool_choice="none", response_format={"type": "json_object"})
    close = [CLOSE, "message", SEP, END]
    assert prompt == ids(
        tok,
        *tag("message", role="user"), "hi", *close,
        *tag("message", role="assistant"), *tag("response"), "a", CLOSE, "response", SEP, *close,
        *tag("message", role="user"), "hi", *close,
        *tag("message", role="system", type="tool-choice"),
        "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.", *close,
        *tag("message", role="system", type="response-format"),
        "The system is invoked with `response_format=json_object`.\nYour response must be raw JSON data without markdown "
        "code blocks (```json) or any additional formatting.", *close,
        *tag("message", role="assistant"), *tag("response"),
    )  # fmt: skip


def test_defaults_said_aloud_change_nothing(tok):
    plain = K3Chat(tok).encode([user()])
    assert plain == K3Chat(tok).encode(
        ({**user(), "name": None},), tools=[], tool_choice="auto", response_format={"type": "text"}, effort="max"
    )


@given(order=st.permutations(range(4)), kept=st.integers(1, 4))
def test_results_stand_in_the_order_of_their_calls(tok, order, kept):
    """Whatever order they came in, also where some are missing; `index` counts the results that are there."""
    calls = {"role": "assistant", "tool_calls": [call(f"f{i}", id=f"id{i}") for i in range(4)]}
    results = [{"role": "tool", "tool_call_id": f"id{i}", "content": f"r{i}"} for i in order[:kept]]
    chat = K3Chat(tok)
    prompt = chat.encode([user(), calls, *results], thinking=False)
    before = chat.encode([user(), calls], thinking=False)
    generation = ids(tok, *tag("message", role="assistant"), *tag("response"))
    expected = [
        segment
        for index, i in enumerate(sorted(order[:kept]), start=1)
        for segment in (
            *tag("message", role="tool", tool=f"f{i}", index=str(index)),
            f"r{i}",
            CLOSE,
            "message",
            SEP,
            END,
        )
    ]
    assert prompt == before[: -len(generation)] + ids(tok, *expected) + generation


def test_every_round_of_results_counts_from_one(tok):
    rounds = [
        message
        for name in ("f", "g")
        for message in (
            {"role": "assistant", "tool_calls": [call(name)]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        )
    ]
    text = tok.decode(K3Chat(tok).encode([user(), *rounds]))
    assert [text.count(f'role="tool" tool="{name}" index="1"') for name in "fg"] == [1, 1]


def test_a_blank_thought_is_an_empty_one(tok):
    """As the release has it; so here, and only here, an answer does not go into the next prompt as it was written."""
    blank, empty = ([user(), {"role": "assistant", "content": "a", "thinking": text}] for text in (" \n", ""))
    assert K3Chat(tok).encode(blank) == K3Chat(tok).encode(empty)


def test_inputs_are_not_changed(tok):
    messages = [user(), {"role": "assistant", "tool_calls": [call(id="b"), call(id="a")]}]
    messages += [{"role": "tool", "tool_call_id": i, "content": [{"type": "text", "text": i}]} for i in "ab"]
    tools = [tool("f", parameters={"type": "object", "properties": {"b": {}, "a": {}}})]
    before = json.dumps([messages, tools])
    K3Chat(tok).encode(messages, tools=tools)
    assert json.dumps([messages, tools]) == before


# -- K3: answers -------------------------------------------------------------------------------------------------------
# Any text, and much that looks like a control token, a tag, an attribute or JSON.
PIECES = [
    *NAMES.values(),
    *IM,
    "think",
    "response",
    ' tool="',
    '"',
    "&quot;",
    "&",
    "{",
    "}",
    "1",
    "\n",
    " ",
    "é",
    "漢",
    "🙂",
    "a",
]
TEXT = st.one_of(st.text(max_size=8), st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def is_object(text):
    try:
        return not text.strip() or isinstance(json.loads(text), dict)
    except ValueError:
        return False


ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3) | TEXT.filter(lambda text: not is_object(text))
CALLS = st.lists(st.tuples(TEXT.filter(bool), ARGUMENTS), max_size=3).map(
    lambda calls: tuple(ToolCall(name, arguments, f"call_{i}") for i, (name, arguments) in enumerate(calls, start=1))
)
ANSWERS = st.builds(ChatDelta, TEXT.filter(lambda text: not text or text.strip()), TEXT, CALLS)


def as_message(answer):
    calls = [call(c.name, c.arguments, c.id) for c in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "thinking": answer.thinking, "tool_calls": calls}


def body(tok, answer, thinking=True):
    """What the model must have written for this answer to stand in the next prompt, which goes on from this one."""
    prompt, after = (K3Chat(tok).encode(m, thinking=thinking) for m in ([user()], [user(), as_message(answer)]))
    generation = prompt[len(prompt) - prompt[::-1].index(tok.special_ids["<|end_of_msg|>"]) :]
    assert after[: len(prompt)] == prompt and after[-len(generation) :] == generation
    return after[len(prompt) : -len(generation)]


@settings(deadline=None)
@given(answer=ANSWERS, thinking=st.booleans(), sizes=st.lists(st.integers(0, 9)))
def test_answers_are_read_back(any_tok, answer, thinking, sizes):
    if not thinking:
        answer = ChatDelta("", answer.content, answer.tool_calls)
    chat = K3Chat(any_tok)
    written = body(any_tok, answer, thinking)
    assert read(chat.parser(thinking), written) == answer
    assert read(chat.parser(thinking), written, sizes) == answer
    assert read(chat.parser(thinking), written[:-1]) == answer  # without the token that stops


LONG = ChatDelta("漢字🙂 <|sep|>", 'é "x" <|open|>tools', (ToolCall("f", {"a": "🙂", "b": [1, None]}, "call_1"),
                                                       ToolCall("g", "{", "call_2")))  # fmt: skip


def test_every_chunking_is_one_push(any_tok):
    chat = K3Chat(any_tok)
    written = body(any_tok, LONG)
    for size in range(1, len(written)):
        assert read(chat.parser(), written, [size] * (len(written) // size)) == LONG
        assert read(chat.parser(), written, [size]) == LONG
    assert read(chat.parser(), np.array(written, np.int32)) == LONG


def test_pieces_come_as_soon_as_they_are_whole(tok):
    parser = K3Chat(tok).parser()
    assert parser.push(tok.encode("hi")) == [ChatDelta(thinking="hi")]
    first, *rest = tok.encode("🙃")  # not in the trained text: four bytes
    assert len(rest) >= 1 and parser.push([first]) == []
    assert parser.push(rest) == [ChatDelta(thinking="🙃")]
    for segment in (CLOSE, "think", SEP, OPEN, "response", SEP):
        assert parser.push(ids(tok, segment)) == []
    assert parser.push(tok.encode("so")) == [ChatDelta(content="so")]
    assert parser.push(ids(tok, CLOSE, "response", SEP, *tag("tools"), *tag("call", tool="f", index="1"))) == []
    assert parser.push(ids(tok, *tag("argument", key="k", type="number"), "12")) == []
    assert parser.push(ids(tok, CLOSE, "argument", SEP, CLOSE, "call")) == []
    assert parser.push([SEP]) == [ChatDelta(tool_calls=(ToolCall("f", {"k": 12}, "call_1"),))]
    parser.finish()
    assert parser.push(tok.encode("more")) == []
    assert parser.message == ChatDelta("hi🙃", "so", (ToolCall("f", {"k": 12}, "call_1"),))


@pytest.mark.parametrize("text", ["🙃", "漢", "é\u0301", "👩\u200d👧 ok"])
def test_split_characters_are_never_replaced(tok, text):
    single = {tok.decode_bytes([i]): i for i in range(256)}
    one_a_byte = [single[bytes([byte])] for byte in text.encode()]
    parser = K3Chat(tok).parser(thinking=False)
    deltas = [delta.content for i in one_a_byte for delta in parser.push([i])]
    assert "".join(deltas) == text and not any("\ufffd" in delta for delta in deltas)
    cut = K3Chat(tok).parser(thinking=False)
    assert read(cut, one_a_byte[:-1]).content == text[:-1]  # half a character is left out


HALF = script("bpe").BYTES.index(0xF0)  # a token of one byte, which begins a character of four
F = [*tag("call", tool="f", index="1"), *tag("argument", key="x", type="number"), "1"]
DONE = [CLOSE, "argument", SEP, CLOSE, "call", SEP, CLOSE, "tools", SEP, CLOSE, "message", SEP, END]
ONE = (ToolCall("f", {"x": 1}, "call_1"),)
LOOSE = {
    "tools opened within think": (["t", *tag("tools"), *F, *DONE], ChatDelta("t", "", ONE)),
    "response opened within think": (["t", *tag("response"), "r", CLOSE, "response", SEP, END], ChatDelta("t", "r")),
    "response closed within think": (["t", CLOSE, "response", SEP, *tag("tools"), *F, *DONE], ChatDelta("t", "", ONE)),
    "nothing opened after response": (["t", CLOSE, "response", SEP, "lost"], ChatDelta("t")),
    "message closed within think": (["t", CLOSE, "message", SEP, END], ChatDelta("t")),
    "message closed within response": (["t", CLOSE, "think", SEP, *tag("response"), "r", CLOSE, "message", SEP, END],
                                       ChatDelta("t", "r")),
    "stop within response": (["t", CLOSE, "think", SEP, *tag("response"), "r", END], ChatDelta("t", "r")),
    "[EOS] within response": (["t", CLOSE, "think", SEP, *tag("response"), "r", R + 1, "x"], ChatDelta("t", "r")),
    "response not opened": (["t", CLOSE, "think", SEP, "r", CLOSE, "response", SEP, END], ChatDelta("t", "r")),
    "tools opened within response": ([*tag("response"), "r", *tag("tools"), *F, *DONE], ChatDelta("", "r", ONE)),
    "tools not opened": ([*tag("response"), "r", *F, *DONE], ChatDelta("", "r", ONE)),
    "call ended by the next": ([*tag("tools"), *F, *F, *DONE], ChatDelta("", "", (*ONE, ToolCall("f", {"x": 1}, "call_2")))),
    "call ended by closing tools": ([*tag("tools"), *F, CLOSE, "tools", SEP], ChatDelta("", "", ONE)),
    "call ended by closing the message": ([*tag("tools"), *F, CLOSE, "message", SEP], ChatDelta("", "", ONE)),
    "call ended by the stop": ([*tag("tools"), *F, END], ChatDelta("", "", ONE)),
    "call ended by response": ([*tag("tools"), *F, *tag("response"), "r"], ChatDelta("", "r", ONE)),
    "argument ended by the next": ([*tag("call", tool="f"), *tag("argument", key="x", type="number"), "1",
                                    *tag("argument", key="y", type="string"), "1", *DONE],
                                   ChatDelta("", "", (ToolCall("f", {"x": 1, "y": "1"}, "call_1"),))),
    "call cut off": (["t", *tag("tools"), *F], ChatDelta("t")),
    "tag cut off": (["t", CLOSE, "thi"], ChatDelta("t")),
    "open tag cut off": (["t", *tag("tools"), OPEN, "call", " tool", '="', "f"], ChatDelta("t")),
    "marker cut off": (["t", OPEN], ChatDelta("t")),
    "stray markers": (["t", SEP, CLOSE, OPEN, CLOSE, "think", SEP, SEP, "r"], ChatDelta("t", "r")),
    "closer that is none": (["t", CLOSE, "- so it is", CLOSE, "think", SEP, "r"], ChatDelta("t- so it is", "r")),
    "unknown tag": (["t", *tag("b", k="v"), "u", CLOSE, "b", SEP, "v"], ChatDelta("tuv")),
    "think closed twice": (["t", CLOSE, "think", SEP, CLOSE, "think", SEP, *tag("response"), "r"], ChatDelta("t", "r")),
    "argument outside of a call": (["t", *tag("argument", key="k", type="string"), "u", END], ChatDelta("tu")),
    "text between elements": ([CLOSE, "think", SEP, *tag("response"), "r", CLOSE, "response", SEP, "lost", *tag("tools"),
                               "lost", *F, CLOSE, "argument", SEP, "lost", *DONE, "lost"], ChatDelta("", "r", ONE)),
    "two messages": ([*tag("response"), "r", *tag("message", role="user"), "lost", *tag("response"), "lost"],
                     ChatDelta("", "r")),
    "no arguments": ([*tag("call", tool="f"), *DONE], ChatDelta("", "", (ToolCall("f", {}, "call_1"),))),
    "nameless call": ([*tag("call", index="1"), *DONE], ChatDelta("", "", (ToolCall("", {}, "call_1"),))),
    "number that is none": ([*tag("call", tool="f"), *tag("argument", key="x", type="number"), "1 2", *DONE],
                            ChatDelta("", "", (ToolCall("f", {"x": "1 2"}, "call_1"),))),
    "number out of range": ([*tag("call", tool="f"), *tag("argument", key="x", type="number"), "1e999", *DONE],
                            ChatDelta("", "", (ToolCall("f", {"x": "1e999"}, "call_1"),))),
    "array too deep": ([*tag("call", tool="f"), *tag("argument", key="x", type="array"), "[" * 9999, *DONE],
                       ChatDelta("", "", (ToolCall("f", {"x": "[" * 9999}, "call_1"),))),
    "raw json": ([*tag("call", tool="f"), *tag("json", type="object"), '{"x": 1}', CLOSE, "json", SEP, *DONE],
                 ChatDelta("", "", ONE)),
    "raw json that is none": ([*tag("call", tool="f"), *tag("json", type="object"), "[1]", *DONE],
                              ChatDelta("", "", (ToolCall("f", "[1]", "call_1"),))),
    "other control tokens": (["t", R, R + 21, R + 200, -1, R + 256, 10**9, "u"], ChatDelta("tu")),
    "half a character before a marker": (["t", HALF, CLOSE, "think", SEP, "r", HALF, R + 21, "s"],
                                         ChatDelta("t\ufffd", "r\ufffds")),
    "nothing": ([], ChatDelta()),
}  # fmt: skip


@pytest.mark.parametrize(("segments", "expected"), LOOSE.values(), ids=LOOSE)
def test_answers_that_leave_things_out(tok, segments, expected):
    written = ids(tok, *segments)
    assert read(K3Chat(tok).parser(), written) == expected
    assert read(K3Chat(tok).parser(), written, [1] * len(written)) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_a_prefix_of_an_answer_is_a_prefix_of_what_is_read(tok, thinking):
    """Cut off anywhere: texts are beginnings, calls are the first ones, and nothing of a tag gets into a text."""
    chat, answer = K3Chat(tok), LONG if thinking else ChatDelta("", LONG.content, LONG.tool_calls)
    written = body(tok, answer, thinking)
    for n in range(len(written)):
        part = read(chat.parser(thinking), written[:n])
        assert answer.thinking.startswith(part.thinking)
        assert answer.content.startswith(part.content)
        assert answer.tool_calls[: len(part.tool_calls)] == part.tool_calls


SCRAPS = st.lists(
    st.sampled_from([OPEN, CLOSE, SEP, END, R + 1, R + 9, "think", "response", "tools", "call", "argument", "json",
                     "message", ' tool="f"', ' key="', ' type="number"', '"', "1", "{", "🙂"])
    | st.integers(0, 255) | st.integers(-3, R + 300),
    max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(scraps=SCRAPS, thinking=st.booleans(), sizes=st.lists(st.integers(0, 5)))
def test_no_ids_raise_and_chunks_do_not_matter(tok, im_tok, scraps, thinking, sizes):
    written = ids(tok, *scraps)
    whole = read(K3Chat(tok).parser(thinking), written)
    assert read(K3Chat(tok).parser(thinking), written, sizes) == whole
    assert read(K3Chat(tok).parser(thinking), written, [1] * len(written)) == whole
    chat = JinjaChat(im_tok, TEMPLATE)
    others = [i % 330 for i in written]
    assert read(chat.parser(thinking), others, sizes) == read(chat.parser(thinking), others)


# -- text stays text ---------------------------------------------------------------------------------------------------
def everywhere(text):
    """A conversation with the text wherever a user's words may stand, and its tools."""
    word = text or "x"
    messages = [
        {"role": "system", "content": text},
        user(text, name=word),
        user([{"type": "text", "text": text}, {"type": "text", "text": text}]),
        {"role": "assistant", "content": text, "thinking": f"a{text}",
         "tool_calls": [call(word, {text: [text, {"k": text}]}, word), call(word, f"[{text}", f"{word}2")]},
        {"role": "tool", "tool_call_id": word, "content": text},
    ]  # fmt: skip
    parameters = {"type": "object", "properties": {text: {"description": text, "enum": [text]}}}
    return messages, [tool(word, description=text, parameters=parameters)]


def control(tok, prompt):
    return [i for i in prompt if i in {*tok.special_ids.values()}]


@settings(deadline=None)
@given(text=TEXT, thinking=st.booleans())
def test_no_text_becomes_a_control_token(tok, text, thinking):
    messages, tools = everywhere(text)
    chat = K3Chat(tok)
    harmless, harmless_tools = everywhere("x")
    prompt = chat.encode(messages, tools=tools, thinking=thinking)
    assert control(tok, prompt) == control(tok, chat.encode(harmless, tools=harmless_tools, thinking=thinking))
    runs = itertools.groupby(prompt, key={*tok.special_ids.values()}.__contains__)
    assert [tok.decode(run) for is_control, run in runs if not is_control].count(text) >= (4 if text else 0)


# -- what is refused ---------------------------------------------------------------------------------------------------
CALLED = [user(), {"role": "assistant", "tool_calls": [call(id="a"), call(id="b")]}]
CIRCLE = {}
CIRCLE["x"] = CIRCLE
DEEP = functools.reduce(lambda inner, _: [inner], range(101), 0)


def parameters(**schema):
    return {"tools": [tool("f", parameters=schema)]}


REFUSED = {
    "messages of another kind": ("hi", {}, "messages='hi': allowed is a list of one message or more"),
    "no messages": ([], {}, "messages=[]: allowed is a list of one message or more"),
    "message of another kind": (["hi"], {}, "messages[0]='hi': allowed is an object with role"),
    "role missing": ([{"content": "hi"}], {}, "messages[0].role=None: allowed is system, user, assistant, tool"),
    "role unknown": ([user(), {"role": "bot", "content": ""}], {},
                     "messages[1].role='bot': allowed is system, user, assistant, tool"),
    "role of another kind": ([{"role": ["user"]}], {}, "messages[0].role=['user']: allowed is system, user, assistant, tool"),
    "key unknown": ([user(extra=1)], {}, "messages[0] has the key 'extra': allowed are role, content, name"),
    "key of another role": ([user(tool_calls=[])], {},
                            "messages[0] has the key 'tool_calls': allowed are role, content, name"),
    "content missing": ([{"role": "user"}], {}, "messages[0].content=None: allowed is a string or a list of text parts"),
    "assistant without anything": ([{"role": "assistant", "content": None}], {},
                                   "messages[0].content=None: allowed is a string or a list of text parts"),
    "content of another kind": ([user(5)], {}, "messages[0].content=5: allowed is a string or a list of text parts"),
    "image": ([user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}])], {},
              "messages[0].content[1].type='image_url': allowed is 'text' (vision is not supported)"),
    "part of another kind": ([user(["a"])], {}, "messages[0].content[0].type='a': allowed is 'text'"),
    "part without text": ([user([{"type": "text"}])], {},
                          "messages[0].content[0].text is missing: allowed is an object with type, text"),
    "part with more": ([user([{"type": "text", "text": "a", "b": 1}])], {},
                       "messages[0].content[0] has the key 'b': allowed are type, text"),
    "part's text of another kind": ([user([{"type": "text", "text": 1}])], {},
                                    "messages[0].content[0].text=1: allowed is a string"),
    "name empty": ([user(name="")], {}, "messages[0].name='': allowed is a string that is not empty"),
    "name of another kind": ([user(name=1)], {}, "messages[0].name=1: allowed is a string that is not empty"),
    "two thoughts": ([{"role": "assistant", "content": "", "thinking": "a", "reasoning_content": "b"}], {},
                     "messages[0]: reasoning_content and thinking are both given: allowed is one"),
    "thought of another kind": ([{"role": "assistant", "content": "", "thinking": ["a"]}], {},
                                "messages[0].thinking=['a']: allowed is a string"),
    "calls of another kind": ([{"role": "assistant", "tool_calls": {}}], {}, "messages[0].tool_calls={}: allowed is a list"),
    "call of another kind": ([{"role": "assistant", "tool_calls": ["f"]}], {},
                             "messages[0].tool_calls[0]='f': allowed is an object with id, function"),
    "call without id": ([{"role": "assistant", "tool_calls": [{"function": {}}]}], {},
                        "messages[0].tool_calls[0].id is missing: allowed is an object with id, function"),
    "call of another type": ([{"role": "assistant", "tool_calls": [{**call(), "type": "custom"}]}], {},
                             "messages[0].tool_calls[0].type='custom': allowed is 'function'"),
    "call without name": ([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]}], {},
                          "messages[0].tool_calls[0].function.name is missing: allowed is an object with name, arguments"),
    "arguments of another kind": ([{"role": "assistant", "tool_calls": [call(arguments=[1])]}], {},
                                  "messages[0].tool_calls[0].function.arguments=[1]: allowed is a JSON object, or a string"),
    "arguments with a number for key": ([{"role": "assistant", "tool_calls": [call(arguments={1: 2})]}], {},
                                        "function.arguments={1: 2}: allowed is a JSON object, or a string"),
    "arguments not finite": ([{"role": "assistant", "tool_calls": [call(arguments={"x": math.nan})]}], {},
                             "function.arguments={'x': nan}: allowed is a JSON object, or a string"),
    "arguments too large": ([{"role": "assistant", "tool_calls": [call(arguments={"x": 10**400})]}], {},
                            "allowed is a JSON object, or a string"),
    "arguments too deep": ([{"role": "assistant", "tool_calls": [call(arguments={"x": DEEP})]}], {},
                           "allowed is a JSON object, or a string"),
    "arguments without end": ([{"role": "assistant", "tool_calls": [call(arguments=CIRCLE)]}], {},
                              "allowed is a JSON object, or a string"),
    "two calls with one id": ([{"role": "assistant", "tool_calls": [call(), call()]}], {},
                              "messages[0].tool_calls: two have the same id: allowed are distinct ids in ['1', '1']"),
    "result without call": ([user(), {"role": "tool", "content": "", "tool_call_id": "a"}], {},
                            "messages[1].tool_call_id='a': allowed is the id of a call without a result, of []"),
    "result without id": ([*CALLED, {"role": "tool", "content": ""}], {},
                          "messages[2].tool_call_id='': allowed is the id of a call without a result, of ['a', 'b']"),
    "result of another call": ([*CALLED, {"role": "tool", "content": "", "tool_call_id": "c"}], {},
                               "messages[2].tool_call_id='c': allowed is the id of a call without a result, of ['a', 'b']"),
    "second result": ([*CALLED, *[{"role": "tool", "content": "", "tool_call_id": "a"}] * 2], {},
                      "messages[3].tool_call_id='a': allowed is the id of a call without a result, of ['b']"),
    "result of another name": ([*CALLED, {"role": "tool", "content": "", "tool_call_id": "a", "name": "g"}], {},
                               "messages[2].name='g': allowed is 'f', the tool that was called"),
    "tools of another kind": ([user()], {"tools": {"f": 1}}, "tools={'f': 1}: allowed is a list"),
    "tool of another kind": ([user()], {"tools": ["f"]}, "tools[0]='f': allowed is an object with type, function"),
    "tool of another type": ([user()], {"tools": [{"type": "web", "function": {}}]},
                             "tools[0].type='web': allowed is 'function'"),
    "tool without name": ([user()], {"tools": [{"type": "function", "function": {}}]},
                          "tools[0].function.name is missing: allowed is an object with name"),
    "tool's name empty": ([user()], {"tools": [tool("")]},
                          "tools[0].function.name='': allowed is a string that is not empty"),
    "tool with more": ([user()], {"tools": [tool(code="x")]},
                       "tools[0].function has the key 'code': allowed are name, description, parameters, strict"),
    "two tools with one name": ([user()], {"tools": [tool(), tool("g"), tool()]},
                                "tools: the name 'f' is there twice: allowed are distinct names"),
    "declared again": ([user(), {"role": "system", "tools": [tool()]}], {"tools": [tool()]},
                       "tools: the name 'f' is there twice"),
    "tools beside content": ([{"role": "system", "content": "a", "tools": [tool()]}], {},
                             "messages[0].content='a': allowed is None beside tools"),
    "description of another kind": ([user()], {"tools": [tool(description=1)]},
                                    "tools[0].function.description=1: allowed is a string"),
    "strict of another kind": ([user()], {"tools": [tool(strict="yes")]},
                               "tools[0].function.strict='yes': allowed is True or False"),
    "parameters of another kind": ([user()], {"tools": [tool(parameters=[])]},
                                   "tools[0].function.parameters=[]: allowed is a JSON schema, an object"),
    "properties of another kind": ([user()], parameters(properties=["a"]),
                                   "function.parameters.properties=['a']: allowed is an object of schemas"),
    "property of another kind": ([user()], parameters(properties={"a": {"properties": {"b": "string"}}}),
                                 "parameters.properties['a'].properties['b']='string': allowed is a JSON schema, an object"),
    "required of another kind": ([user()], parameters(required="a"), "parameters.required='a': allowed is a list"),
    "required is no name": ([user()], parameters(required=[1]), "parameters.required=[1]: allowed is a list of names"),
    "type of another kind": ([user()], parameters(type=1), "parameters.type=1: allowed is a type's name or a list of them"),
    "items of another kind": ([user()], parameters(items={"anyOf": {}}),
                              "parameters.items.anyOf={}: allowed is a list of schemas"),
    "parameters without end": ([user()], {"tools": [tool(parameters=CIRCLE)]}, "allowed is a JSON schema, an object"),
    "thinking of another kind": ([user()], {"thinking": "yes"}, "thinking='yes': allowed is True or False"),
    "effort unknown": ([user()], {"effort": "medium"}, "effort='medium': allowed is low, high, max"),
    "effort of another kind": ([user()], {"effort": 3}, "effort=3: allowed is a word"),
    "effort without thinking": ([user()], {"effort": "low", "thinking": False},
                                "effort='low': allowed is None without thinking"),
    "choice without tools": ([user()], {"tool_choice": "required"},
                             "tool_choice='required': allowed is 'auto' or 'none' without tools"),
    "choice of one tool": ([user()], {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}}},
                           "allowed is 'auto', 'none' or 'required'"),
    "format of another kind": ([user()], {"response_format": "json_object"},
                               "response_format.type='json_object': allowed is 'text', 'json_object' or 'json_schema'"),
    "format unknown": ([user()], {"response_format": {"type": "xml"}}, "response_format.type='xml': allowed is 'text', "),
    "format without schema": ([user()], {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
                              "response_format.json_schema.schema is missing: allowed is an object with schema"),
    "format with more": ([user()], {"response_format": {"type": "text", "json_schema": {}}},
                         "response_format has the key 'json_schema': allowed are type"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "options", "error"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named_in_one_line(tok, messages, options, error):
    with pytest.raises(ChatError) as caught:
        K3Chat(tok).encode(messages, **options)
    assert error in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_long_values_are_cut_in_errors(tok):
    long = "x\n" * 5000
    calls = {"role": "assistant", "tool_calls": [call(long, id=long)]}
    result = {"role": "tool", "content": "", "tool_call_id": long}
    for messages, options in [
        ([{"role": long}], {}),
        ([{"role": "user", long: 1}], {}),
        ([calls, {**result, "tool_call_id": "a"}], {}),
        ([calls, {**result, "name": "f"}], {}),
        ([{"role": "assistant", "tool_calls": [call(id=long), call(id=long)]}], {}),
        ([user()], {"tools": [tool(long), tool(long)]}),
        ([user()], parameters(properties={long: 5})),
    ]:
        with pytest.raises(ChatError) as caught:
            K3Chat(tok).encode(messages, **options)
        assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_tokenizer_must_have_the_markers(im_tok):
    with pytest.raises(
        ChatError, match=r"tokenizer without <\|open\|>, <\|close\|>, <\|sep\|>, <\|end_of_msg\|>: allowed"
    ):
        K3Chat(im_tok)


# -- templates ---------------------------------------------------------------------------------------------------------
TEMPLATE = """{%- if tools -%}
    <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        <|im_system|>{{ message.name or 'tool' }}<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content | trim }}
    {%- else -%}
        <|im_{{ message.role }}|>{{ message.name or message.role }}<|im_middle|>
        {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif -%}
        {{- message.content -}}
    {%- endif -%}
    {%- if message.tool_calls -%}
        <|tool_calls_section_begin|>
        {%- for call in message.tool_calls -%}
            {%- set arguments = call.function.arguments -%}
            <|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
            {{- arguments if arguments is string else arguments | tojson -}}
            <|tool_call_end|>
        {%- endfor -%}
        <|tool_calls_section_end|>
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
{%- if not thinking %}<think></think>{% endif -%}
"""


def plainly(template):
    """The template by Jinja alone, as Hugging Face sets it up: a function of messages and tools."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return functools.partial(environment.from_string(template).render, add_generation_prompt=True, thinking=True)


PLAIN = plainly(TEMPLATE)


def as_templates_see(messages):
    """Contents as one string, thoughts under one name, no empty keys."""
    out = []
    for message in messages:
        content, more = message.get("content"), {k: v for k, v in message.items() if k not in ("content", "thinking")}
        thoughts = {"reasoning_content": message["thinking"]} if message.get("thinking") else {}
        joined = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
        out.append({**more, **thoughts, "content": joined})
    return out


def test_template_by_segments(im_tok):
    names = im_tok.special_ids
    messages = [
        {"role": "system", "content": "Be brief."},
        user("é <|im_end|>"),
        {
            "role": "assistant",
            "content": "a",
            "thinking": "t",
            "tool_calls": [call("get", '{"q": "é"}', "functions.get:0")],
        },
        {"role": "tool", "tool_call_id": "functions.get:0", "content": " r "},
    ]
    prompt = JinjaChat(im_tok, TEMPLATE).encode(messages, tools=[tool("get")])
    assert prompt == ids(
        im_tok,
        names["<|im_system|>"], "tool_declare", names["<|im_middle|>"],
        '[{"type": "function", "function": {"name": "get"}}]', names["<|im_end|>"],
        names["<|im_system|>"], "system", names["<|im_middle|>"], "Be brief.", names["<|im_end|>"],
        names["<|im_user|>"], "user", names["<|im_middle|>"], "é <|im_end|>", names["<|im_end|>"],
        names["<|im_assistant|>"], "assistant", names["<|im_middle|>"], names["<think>"], "t", names["</think>"], "a",
        names["<|tool_calls_section_begin|>"], names["<|tool_call_begin|>"], "functions.get:0",
        names["<|tool_call_argument_begin|>"], '{"q": "é"}', names["<|tool_call_end|>"],
        names["<|tool_calls_section_end|>"], names["<|im_end|>"],
        names["<|im_system|>"], "tool", names["<|im_middle|>"], "## Return of functions.get:0\nr", names["<|im_end|>"],
        names["<|im_assistant|>"], "assistant", names["<|im_middle|>"],
    )  # fmt: skip


@settings(deadline=None)
@given(text=TEXT)
def test_template_writes_its_text_and_no_user_a_control_token(im_tok, text):
    """The prompt's text is what the template writes by itself; its control tokens are those of a harmless conversation."""
    messages, tools = everywhere(text)
    chat = JinjaChat(im_tok, TEMPLATE)
    prompt = chat.encode(messages, tools=tools)
    assert im_tok.decode(prompt) == PLAIN(messages=as_templates_see(messages), tools=tools)
    harmless, harmless_tools = everywhere("x")
    assert control(im_tok, prompt) == control(im_tok, chat.encode(harmless, tools=harmless_tools))


# Texts side by side, trimmed, sliced, in another case, in the middle of a name: what templates do to them.
GLUE = [
    "{{ messages[0].content }}{{ messages[1].content }}",
    "{{ messages[0].content | trim }}{{ messages[1].content | trim }}",
    "{{ messages[0].content | upper }}{{ messages[1].content | lower }}",
    "{{ messages[0].content[1:] }}.{{ messages[1].content[:-1] }}",
    "<|im_{{ messages[0].content }}|><{{ messages[1].content }}>",
    "<|im{{ messages[0].content }}",
    "{{ messages[0].content }}d|>",
    "{% for m in messages %}{{ m.content.strip('a') }}{% endfor %}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages[0].content ~ messages[1].content | tojson }}",
]
HALVES = ["<|im_", "end|>", "<|im_end|>", "<|IM_END|>", "<|", "|>", "_en", "_end|>", "<|im_en", "end", "<think>",
          "/think", "<", ">", "[", "EOS]", " <|im_ ", " end|>", "a", "<|im_end|>>", "<<|im_end|>", "\n", "a <|im_en",
          "_end|> a"]  # fmt: skip


@pytest.mark.parametrize("template", GLUE)
def test_texts_that_a_template_joins_become_no_control_token(im_tok, template):
    chat, plain = JinjaChat(im_tok, template), plainly(template)
    for halves in itertools.product(HALVES, repeat=2):
        messages = [user(text) for text in halves]
        prompt = chat.encode(messages)
        assert control(im_tok, prompt) == []
        if "[1:]" not in template:  # a slice may see the sentinel
            assert im_tok.decode(prompt) == plain(messages=messages)


def test_keys_are_found_though_a_control_token_has_them_within(im_tok):
    template = "{{ tools[0].function.parameters.properties.content.type }}"
    schema = {"type": "object", "properties": {"content": {"type": "string"}, "<|im_end|>": {}}}
    prompt = JinjaChat(im_tok, template + "{{ tools | tojson }}").encode([user()], tools=[tool(parameters=schema)])
    assert control(im_tok, prompt) == []
    assert im_tok.decode(prompt) == "string" + json.dumps([tool(parameters=schema)])


def test_names_that_overlap_are_broken(im_tok):
    tok = Tokenizer(ranks(300, {}), {"abab": 300, "ba": 301})
    chat = JinjaChat(tok, "abab{{ messages[0].content }}")
    assert control(tok, chat.encode([user("ababababa")])) == [300]


def test_every_private_character_may_be_in_a_text(im_tok):
    chat = JinjaChat(im_tok, "{{ messages[0].content }}\U000f0001")
    text = "\U000f0000<|im_end|>\U000f0002"
    assert im_tok.decode(chat.encode([user(text)])) == text + "\U000f0001"
    with pytest.raises(ChatError, match="messages use every private character"):
        chat.encode([user("".join(map(chr, range(0xF0000, 0x10FFFE))))])


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('true') }}",
    "{{ strftime_now['__globals__'] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ self.__init__.__globals__ }}",
    "{% include 'chat_template.jinja' %}",
    "{{ range(1000000) | list }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_refuses(im_tok, template):
    with pytest.raises(ChatError, match="chat template: "):
        JinjaChat(im_tok, template).encode([user()])


def test_what_templates_are_given(im_tok):
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ thinking }}{{ enable_thinking }}|{{ strftime_now('%Y') | int > 2000 }}|"
        "{{ reasoning_effort }}|{{ tool_choice }}|{{ response_format.type }}|{{ tools }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}\n"
        "  {% if true %}\n  x\n  {% endif %}\n"
    )
    chat = JinjaChat(im_tok, template, bos_token="[BOS]", eos_token="[EOS]")
    prompt = chat.encode(
        [user("é"), user()], effort="medium", tool_choice="none", response_format={"type": "json_object"}
    )
    assert prompt[0] == im_tok.special_ids["[BOS]"] and im_tok.special_ids["[EOS]"] in prompt
    text = '[BOS]|[EOS]|TrueTrue|True|medium|none|json_object|None{\n "role": "user",\n "content": "é"\n}  x\n'
    assert im_tok.decode(prompt) == text


TEMPLATE_ERRORS = {
    "its complaint": ("{{ raise_exception('roles\n must alternate') }}", {},
                      "chat template: TemplateError: roles must alternate"),
    "no template": ("{% if %}", {}, "chat template: TemplateSyntaxError: "),
    "too deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {}, "chat template: "),
    "too deep for Python": ("{% for m in messages %}" * 25 + "{% endfor %}" * 25, {}, "chat template: SyntaxError: "),
    "failure": ("{{ 1 / 0 }}", {}, "chat template: ZeroDivisionError: "),
    "failure of a value": ("{{ messages[0].content + 1 }}", {}, "chat template: TypeError: "),
    "escaped letters": ("{{ messages | tojson(ensure_ascii=true) }}", {}, "tojson(ensure_ascii=True) is not supported"),
    "tools": ("x", {"tools": [tool()]}, "tools is given: allowed is None, because the chat template does not look at it"),
    "effort": ("x", {"effort": "low"}, "effort is given: allowed is None, because the chat template does not look at it"),
    "tool_choice": ("x", {"tool_choice": "none"}, "tool_choice is given: allowed is None"),
    "response_format": ("x", {"response_format": {"type": "json_object"}}, "response_format is given: allowed is None"),
    "thinking": ("x", {"thinking": False}, "thinking=False: allowed is True (the chat template has no switch)"),
    "template of another kind": (5, {}, "template=5: allowed is a string"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "options", "error"), TEMPLATE_ERRORS.values(), ids=TEMPLATE_ERRORS)
def test_template_errors_are_one_line(im_tok, template, options, error):
    with pytest.raises(ChatError) as caught:
        JinjaChat(im_tok, template).encode([user()], **options)
    assert error in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "case", ["role unknown", "two tools with one name", "result without call", "arguments without end"]
)
def test_templates_get_nothing_that_is_wrong(im_tok, case):
    messages, options, error = REFUSED[case]
    with pytest.raises(ChatError) as caught:
        JinjaChat(im_tok, TEMPLATE).encode(messages, **options)
    assert error in str(caught.value)


def test_declared_later_is_refused_with_a_template(im_tok):
    with pytest.raises(ChatError, match="messages have tools: allowed is the option tools"):
        JinjaChat(im_tok, TEMPLATE).encode([{"role": "system", "tools": [tool()]}])


def test_short_control_tokens_are_refused():
    with pytest.raises(ChatError, match="control token '<': allowed are names of two characters or more"):
        JinjaChat(Tokenizer(ranks(300, {}), {"<": 300}), TEMPLATE)


@settings(deadline=None)
@given(answer=ANSWERS, sizes=st.lists(st.integers(0, 9)))
def test_answers_of_a_template_are_read_back(im_tok, answer, sizes):
    names = ["".join(c for c in made.name if c.isalnum()) or "f" for made in answer.tool_calls]
    calls = tuple(
        ToolCall(name, made.arguments, f"functions.{name}:{i}")
        for i, (name, made) in enumerate(zip(names, answer.tool_calls, strict=True))
    )
    answer = ChatDelta(answer.thinking, answer.content, calls)
    chat = JinjaChat(im_tok, TEMPLATE)
    prompt, after = (chat.encode(messages) for messages in ([user()], [user(), as_message(answer)]))
    assert after[: len(prompt)] == prompt
    generation = ids(im_tok, im_tok.special_ids["<|im_assistant|>"], "assistant", im_tok.special_ids["<|im_middle|>"])
    written = after[len(prompt) : -len(generation)]
    assert read(chat.parser(), written) == answer
    assert read(chat.parser(), written, sizes) == answer


def test_answers_of_a_template_that_leave_things_out(im_tok):
    n = im_tok.special_ids
    begin, argue, done = n["<|tool_call_begin|>"], n["<|tool_call_argument_begin|>"], n["<|tool_call_end|>"]
    section, out = n["<|tool_calls_section_begin|>"], n["<|tool_calls_section_end|>"]
    f = ToolCall("f", {"x": 1}, "functions.f:0")
    cases = {
        "thought ended by a section": ([n["<think>"], "t", section, begin, "functions.f:0", argue, '{"x": 1}', done, out],
                                       ChatDelta("t", "", (f,))),
        "no section": (["a", begin, " functions.f:0 ", argue, '{"x": 1}', n["<|im_end|>"], "lost"], ChatDelta("", "a", (f,))),
        "call ended by the next": ([section, begin, "g", begin, "functions.f:0", argue, '{"x": 1}', out, "b"],
                                   ChatDelta("", "b", (ToolCall("g", {}, "g"), f))),
        "text in a section": ([section, "lost", begin, "functions.f:0", argue, '{"x": 1}', done, "lost", out],
                              ChatDelta("", "", (f,))),
        "no JSON": ([begin, "f", argue, "{x", argue, "}", done], ChatDelta("", "", (ToolCall("f", "{x}", "f"),))),
        "call cut off": (["a", begin, "functions.f:0", argue, '{"x": 1}'], ChatDelta("", "a")),
        "stray tags": (["a", n["</think>"], argue, n["<|im_user|>"], -1, 999, "b"], ChatDelta("", "ab")),
        "no name": ([begin, argue, done], ChatDelta("", "", (ToolCall("", {}, "call_1"),))),
    }  # fmt: skip
    for what, (segments, expected) in cases.items():
        written = ids(im_tok, *segments)
        assert read(JinjaChat(im_tok, TEMPLATE).parser(), written) == expected, what
        assert read(JinjaChat(im_tok, TEMPLATE).parser(), written, [1] * len(written)) == expected, what


def test_a_thought_that_the_prompt_opens_is_read_as_one(im_tok):
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
    chat = JinjaChat(im_tok, template)
    written = ids(im_tok, "t", im_tok.special_ids["</think>"], "r")
    assert read(chat.parser(), written) == ChatDelta("t", "r")
    assert read(chat.parser(thinking=False), ids(im_tok, "r")) == ChatDelta("", "r")


# -- directories -------------------------------------------------------------------------------------------------------
def test_k3_tiny_speaks_k3():
    tokenizer = Tokenizer.from_directory(TINY)
    chat = find(TINY, tokenizer)
    assert isinstance(chat, K3Chat)
    text = tokenizer.decode(chat.encode([user()]))
    assert text.endswith('<|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>think<|sep|>')


def test_a_directory_without_format_has_none(tmp_path, im_tok):
    assert find(tmp_path, im_tok) is None


CONFIGS = {
    "text": {"chat_template": "config {{ bos_token }}", "bos_token": "[BOS]"},
    "token as an object": {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "[BOS]", "lstrip": False}},
    "list": {"chat_template": [{"name": "tool_use", "template": "no"},
                               {"name": "default", "template": "config {{ bos_token }}"}], "bos_token": "[BOS]"},
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_template_of_a_directory(tmp_path, tok, config):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = find(tmp_path, tok)
    assert isinstance(chat, JinjaChat)
    assert chat.encode([user()]) == ids(tok, "config ", R)
    (tmp_path / "chat_template.jinja").write_text("file é{{ eos_token }}", encoding="utf-8")
    assert find(tmp_path, tok).encode([user()]) == tok.encode("file é")


def test_a_template_on_k3s_markers_is_answered_in_k3s_format(tmp_path, tok):
    (tmp_path / "chat_template.jinja").write_text("<|open|>think<|sep|>")
    written = body(tok, LONG)
    assert read(find(tmp_path, tok).parser(), written) == LONG


BAD_DIRECTORIES = {
    "not JSON": ("tokenizer_config.json", b"{"),
    "not an object": ("tokenizer_config.json", b"[]"),
    "no default": ("tokenizer_config.json", b'{"chat_template": [{"name": "a", "template": "b"}]}'),
    "not UTF-8": ("chat_template.jinja", b"\xff"),
    "no template": ("chat_template.jinja", b"{{"),
    "template of another kind": ("tokenizer_config.json", b'{"chat_template": 5}'),
    "token of another kind": ("tokenizer_config.json", b'{"chat_template": "a", "bos_token": 5}'),
}


@pytest.mark.parametrize(("name", "data"), BAD_DIRECTORIES.values(), ids=BAD_DIRECTORIES)
def test_bad_directories_are_refused(tmp_path, tok, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ChatError):
        find(tmp_path, tok)


def test_deltas_join():
    deltas = [ChatDelta(thinking=c, content=c.upper(), tool_calls=(ToolCall(c, {}, c),)) for c in "abc"]
    for cut in range(4):
        halves = ChatDelta.joined(deltas[:cut]), ChatDelta.joined(deltas[cut:])
        assert ChatDelta.joined(halves) == ChatDelta.joined(itertools.chain(deltas))


@pytest.mark.parametrize(
    ("change", "typed"),
    [
        (".replace('</b>', '')", "<|im_</b>end|>"),
        (".split('</b>') | join", "<|im_</b>end|>"),
        (" | replace('\n', '')", "<|im_\nend|>"),
        (".splitlines() | join", "<|im_\nend|>"),
        (".split() | join", "<|im_ end|>"),
        (" | replace(' ', '')", "<|im_ end|>"),
        (".expandtabs(0)", "<|im_\tend|>"),
        (" | format('_')", "<|im%send|>"),
        (" | reverse", ">|dne_mi|<"),
        ("[::-1]", ">|dne_mi|<"),
    ],
)
def test_a_template_that_takes_texts_apart_makes_no_control_token(im_tok, change, typed):
    """What the sentinel cannot keep apart is noticed: the control tokens would not be the template's own."""
    chat = JinjaChat(im_tok, "{{ messages[0].content" + change + " }}<|im_end|>")
    with pytest.raises(ChatError, match="what they say would make a control token"):
        chat.encode([user(typed)])
    harmless = chat.encode([user("<b> is | a [tag] | 100 %s" if "format" in change else "<b> is | a [tag] |")])
    assert [i for i in harmless if i in im_tok.control_ids] == [im_tok.special_ids["<|im_end|>"]]


@pytest.mark.parametrize(
    ("stops", "expected", "stop"),
    [
        (("response", "think>"), ChatDelta("thinking it over", "so it is"), None),
        (("over",), ChatDelta("thinking it "), "over"),
        (("it is", "is"), ChatDelta("thinking it over", "so "), "it is"),
        (("overso", "over so"), ChatDelta("thinking it over", "so it is"), None),
        (("zz", "g it"), ChatDelta("thinkin"), "g it"),
    ],
)
def test_a_stop_text_ends_a_channel_and_not_a_tag(tok, stops, expected, stop):
    """It is looked for in thoughts and content; names of tags are not text, and no stop text runs over a tag."""
    answer = ChatDelta("thinking it over", "so it is")
    stream = ChatStream(K3Chat(tok).parser(), stops)
    for token in body(tok, answer, True):
        stream.push(token)
        if stream.stop is not None:
            break
    stream.finish()
    assert (stream.message, stream.stop) == (expected, stop)
    assert "".join(p.thinking + p.content for p in stream.pieces) == expected.thinking + expected.content
