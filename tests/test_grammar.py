"""Structured output: a mask allows what keeps a full match possible, all of it and nothing else; texts that fit; chats."""

import gc
import itertools
import json
import random
import re
import sys
import weakref

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.engine.grammar import Constraint
from k3jax.io.chat import K3Parser
from k3jax.io.jinja import JinjaParser
from k3jax.io.tokenizer import Tokenizer
from k3jax.sampling import SamplingParams, by_row, sample

EOS = 2033  # of k3-tiny
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # no blanks
SCHEMAS = {
    "enum": {"enum": ["red", "gr\u00fcn", 7, None, {"a": [1]}]},
    "number": {"type": "integer", "minimum": -40, "maximum": 125},
    "decimal": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
    "string": {"type": "string", "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[\u4e00-\u4eff\U0001f600-\U0001f64f]{2,4}$"},
    "nested": {"type": "array", "minItems": 1, "maxItems": 3, "items": {
        "type": "array", "maxItems": 2, "items": {"type": "boolean"}}},
    "object": {"type": "object", "additionalProperties": False, "required": ["name", "size"], "properties": {
        "name": {"type": "string", "maxLength": 5}, "size": {"$ref": "#/$defs/size"}, "more": {"const": None}},
        "$defs": {"size": {"type": "integer", "minimum": 0, "maximum": 99}}},
}  # fmt: skip


def fits(name, text):
    """Whether a text is JSON that fits a schema of SCHEMAS, written out by hand."""
    value = json.loads(text)
    whole = type(value) is int
    match name:
        case "enum":
            return value in ("red", "gr\u00fcn", None, {"a": [1]}) or (whole and value == 7)
        case "number":
            return whole and -40 <= value <= 125
        case "decimal":
            return type(value) in (int, float) and 0.5 <= value < 2
        case "string":
            return isinstance(value, str) and len(value) <= 6
        case "pattern":
            ok = ("\u4e00" <= c <= "\u4eff" or "\U0001f600" <= c <= "\U0001f64f" for c in value)
            return isinstance(value, str) and 2 <= len(value) <= 4 and all(ok)
        case "nested":
            rows = [isinstance(row, list) and len(row) <= 2 and {*map(type, row)} <= {bool} for row in value]
            return isinstance(value, list) and 1 <= len(value) <= 3 and all(rows)
        case "object":
            size = value["size"]
            keys = {*value} - {"more"} == {"name", "size"} and value.get("more") is None
            return keys and len(value["name"]) <= 5 and type(size) is int and 0 <= size <= 99
    raise AssertionError(name)


@pytest.fixture(scope="module")
def tok():
    """k3-tiny's."""
    return Tokenizer.from_directory("checkpoints/k3-tiny", 2048)


IM = ["<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
      "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]  # fmt: skip


@pytest.fixture(scope="module")
def im_tok():
    """One of single bytes and Kimi-Linear's control tokens."""
    return Tokenizer({bytes([i]): i for i in range(256)}, {name: 256 + i for i, name in enumerate(IM)})


def allowed(constraint, vocabulary):
    """The ids that the mask lets through."""
    mask = constraint.mask()
    assert mask.dtype == np.uint32 and mask.shape == (-(-vocabulary // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocabulary:].any()
    return set(np.flatnonzero(bits).tolist())


def walk(constraint, tokenizer, rng, most=800, prefer=None):
    """Ids that the masks allow, drawn at random until the request ends; `prefer` chooses among what is allowed."""
    ids = []
    while not constraint.finished and len(ids) < most:
        may = sorted(allowed(constraint, tokenizer.vocab_size))
        ids.append(rng.choice(prefer(may) if prefer else may))
        constraint.push(ids[-1])
    assert constraint.finished
    return ids


ALPHABET = 'ab\u00e9\U0001f642\u4e2d .*/\\\n"#'


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 2**31))
def test_a_mask_is_exact(tok, words, seed):
    """For any finite language: a token is allowed where some word goes on with it, an end token where a word is whole."""
    params = SamplingParams(regex="|".join("".join(f"[{re.escape(c)}]" for c in word) for word in words))
    assert all(re.fullmatch(params.regex, word) for word in words)
    language = [word.encode() for word in words]
    tokens = {i: tok.decode_bytes([i]) for i in range(tok.vocab_size) if i not in tok.control_ids}
    constraint, text, rng = Constraint(tok, params, [2, EOS]), b"", random.Random(seed)
    while True:
        found = allowed(constraint, tok.vocab_size)
        tails = [word[len(text) :] for word in language if word.startswith(text)]
        expected = {i for i, token in tokens.items() if any(tail.startswith(token) for tail in tails)} - {2}
        assert found == expected | ({2, EOS} if text in language else set())
        token = rng.choice(sorted(found or {2}))
        if token in (2, EOS):  # 2 is "#", which is no text where it ends the request
            return
        constraint.push(token)
        text += tokens[token]


@pytest.mark.parametrize(
    ("regex", "rest"),
    [(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", ["0", "00"]), (r"(ab|c)*d", ["d", "bd"]), (r"[^a]{2,3}", ["x", "xx"])],
)
def test_a_mask_is_exact_for_languages_without_end(tok, regex, rest):
    """Every viable text of these is whole, or becomes so with one of `rest`: brute force over the vocabulary."""

    def viable(data, rest=rest):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data" or not rest:
                return False
            text = data[: error.start].decode() + "\u0416"  # stands for any character that begins so
        return any(re.fullmatch(regex, text + more) for more in ["", *rest])

    ids = [i for i in range(tok.vocab_size) if i not in tok.control_ids]
    for seed in range(3):
        constraint, text, rng = Constraint(tok, SamplingParams(regex=regex), [EOS]), b"", random.Random(seed)
        for _ in range(6):
            expected = {i for i in ids if viable(text + tok.decode_bytes([i]))}
            whole = {EOS} if viable(text, []) else set()
            assert allowed(constraint, tok.vocab_size) == expected | whole
            if not expected:
                break
            token = rng.choice(sorted(expected))
            constraint.push(token)
            text += tok.decode_bytes([token])


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_masks_allow_fits_the_schema(tok, name):
    """Tokens at random among what is allowed; no control token but the end, and that one last."""
    for seed in range(25):
        constraint = Constraint(tok, SamplingParams(json_schema=SCHEMAS[name]), [EOS])
        *ids, end = walk(constraint, tok, random.Random(seed))
        assert end == EOS and not tok.control_ids.intersection(ids)
        assert fits(name, tok.decode_bytes(ids).decode())


def test_a_schema_may_say_anything_and_refer_to_itself(tok):
    """What is a comment in a schema, or would be one in the grammar that it becomes, changes nothing."""
    tree = {
        "$schema": "http://json-schema.org/draft-07/schema#", "description": 'a // b\n# "c" /d/ %json {', "x": 1,
        "type": "array", "items": {"$ref": "#"}, "maxItems": 1,
    }  # fmt: skip
    for seed in range(20):
        *ids, _ = walk(Constraint(tok, SamplingParams(json_schema=tree | COMPACT), [EOS]), tok, random.Random(seed))
        value = json.loads(tok.decode(ids))
        while value:
            [value] = value
        assert value == []


def test_blanks_come_to_an_end(tok):
    """A model that writes a blank wherever it may does not go on for ever, unless the schema says so for itself."""

    def blanks(may):
        return [i for i in may if tok.decode([i]).isspace()] or may

    for seed in range(4):
        ids = walk(
            Constraint(tok, SamplingParams(json_schema=SCHEMAS["object"]), [EOS]),
            tok,
            random.Random(seed),
            prefer=blanks,
        )
        text = tok.decode(ids[:-1])
        assert fits("object", text) and max(map(len, re.findall(r"\s+", text))) == 32
    params = SamplingParams(json_schema=SCHEMAS["object"] | COMPACT)
    ids = walk(Constraint(tok, params, [EOS]), tok, random.Random(0), prefer=blanks)
    assert tok.decode(ids[:-1]).startswith('{"name":"')


def test_end_tokens_end_a_whole_text_and_nothing_else(tok):
    """Also where the end token is a text of the grammar: within it, it would cut the text."""
    b, c = tok.encode("b")[0], tok.encode("c")[0]
    constraint = Constraint(tok, SamplingParams(regex="ab*c", stop_token_ids=[b, 7]), [EOS])
    constraint.push(tok.encode("a")[0])
    assert b not in allowed(constraint, 2048) and c in allowed(constraint, 2048)
    constraint.push(c)
    assert allowed(constraint, 2048) == {EOS, 7, b} and not constraint.finished
    constraint.push(b)
    assert constraint.finished


def test_a_grammar_makes_no_control_token(tok):
    """Text that has the name of one is written as text."""
    for seed in range(5):
        *ids, _ = walk(Constraint(tok, SamplingParams(regex=r"<\|(open|sep)\|>"), [EOS]), tok, random.Random(seed))
        assert not tok.control_ids.intersection(ids) and tok.decode(ids) in ("<|open|>", "<|sep|>")


def test_a_regex_has_the_classes_of_unicode(tok):
    """As `re` has: digits and letters of every script, and a dot that is no line's end."""
    for regex, text in ((r"\d", "\u0663"), (r"\w", "\u0416"), (r"\s", "\u2003"), (".", "\U0001f642"), (".", "\n")):
        constraint, ok = Constraint(tok, SamplingParams(regex=regex), [EOS]), re.fullmatch(regex, text)
        for i in tok.encode(text):
            if ok or i in allowed(constraint, 2048):
                constraint.push(i)
        assert (EOS in allowed(constraint, 2048)) == bool(ok)


def test_a_text_without_an_end_token_ends_by_itself(tok):
    for seed, params in itertools.product(range(5), [dict(regex="a?b{0,3}c"), dict(json_schema=SCHEMAS["object"])]):
        ids = walk(Constraint(tok, SamplingParams(ignore_eos=True, **params), [EOS]), tok, random.Random(seed))
        text = tok.decode(ids)
        assert re.fullmatch("a?b{0,3}c", text) if "regex" in params else fits("object", text)
    longer = Constraint(tok, SamplingParams(regex="a+", ignore_eos=True), [EOS])  # it can go on, and so it does
    longer.push(tok.encode("a")[0])
    assert not longer.finished and EOS not in allowed(longer, 2048)
    assert Constraint(tok, SamplingParams(regex="a{0}"), ()).finished


PROMPT = "And it came to pass in those days, that there went out a decree from the king, that all should be taxed. " * 3
draw = jax.jit(sample, static_argnames="top")


def generate(lm, params, prompt, reader=None, tools=True, most=60):
    """Ids, and their raw log-probabilities as found and as the model has them: one pass of 65 to 128 tokens for each id."""
    assert 64 < len(prompt) <= 128 - most
    constraint, ids, found = Constraint(lm.tokenizer, params, lm.end_ids, reader, tools=tools), [], []
    rows, size = by_row([params], [prompt], lm.end_ids, 1, lm.config.vocab_size), lm.config.vocab_size
    while not constraint.finished and len(ids) < most:
        logits, mask = lm.logits([*prompt, *ids])[-1:], constraint.mask()
        counts = np.bincount(ids, minlength=size)[None].astype(np.int32) if ids else np.zeros((1, size), np.int32)
        words = np.full((1, -(-size // 32)), 0xFFFFFFFF, np.uint32) if mask is None else mask[None]
        new = draw(logits, np.array([len(prompt) + len(ids)], np.int32), counts, rows, top=1, allowed=words)
        ids.append(int(new.token[0]))
        z = logits[0].astype(np.float64)
        found.append((float(new.logprob[0]), z[ids[-1]] - np.log(np.exp(z - z.max()).sum()) - z.max()))
        constraint.push(ids[-1])
    assert constraint.finished
    return ids, found


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("name", ["enum", "pattern", "object"])
def test_a_model_writes_what_fits(pair, name, temperature):
    """At every temperature; raw log-probabilities are those of the model without a mask."""
    params = SamplingParams(json_schema=SCHEMAS[name] | COMPACT, temperature=temperature, seed=1, logprobs=1)
    ids, found = generate(pair, params, pair.encode(PROMPT)[:66])
    assert ids[-1] in pair.end_ids and fits(name, pair.decode(ids[:-1]))
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


# -- chats ---------------------------------------------------------------------------------------------------------------
REGEX = "(yes|no|\u4e2d\U0001f642)!{1,2}"


def ids_of(tokenizer, *parts):
    return [
        i for p in parts for i in ([tokenizer.special_ids[p]] if p in tokenizer.special_ids else tokenizer.encode(p))
    ]


def push(constraint, *ids):
    """Each of them where the masks allow it."""
    for i in ids:
        assert constraint.mask() is None or constraint.mask()[i // 32] >> i % 32 & 1, i
        constraint.push(i)


TAGS = {tag: ("<|open|>", tag, "<|sep|>") for tag in ("response", "tools", "think")}
CLOSED = {tag: ("<|close|>", tag, "<|sep|>") for tag in ("response", "tools", "think", "message")}


@pytest.mark.parametrize("thinking", [True, False])
def test_a_chat_is_constrained_in_its_content(tok, thinking):
    """Thoughts are free, the whole content is not: K3's tags are written out, and close a content that is complete."""
    end = tok.special_ids["<|end_of_msg|>"]
    c = Constraint(tok, SamplingParams(regex=REGEX), [end], K3Parser(tok, thinking), tools=False)
    if thinking:
        thoughts = ids_of(tok, "a {", *TAGS["think"], "<|close|>", "<|reserved_token_2040|>", *CLOSED["think"])
        for i in thoughts:
            assert c.mask() is None
            c.push(i)
    push(c, *ids_of(tok, *TAGS["response"]))
    before = {i for i in allowed(c, 2048) if i in tok.control_ids}
    assert before == {tok.special_ids["<|open|>"]}
    push(c, *tok.encode("\u4e2d\U0001f642!"))
    marks = ids_of(tok, "<|close|>", "<|end_of_msg|>")
    assert allowed(c, 2048) == {*marks, *tok.encode("!")}
    for i in ids_of(tok, *CLOSED["response"])[1:]:
        c.push(marks[0]) if i == ids_of(tok, "response")[0] else None
        assert allowed(c, 2048) == {i}  # no other tag: what is none would be content
        c.push(i)
    assert c.mask() is None and not c.finished
    push(c, *ids_of(tok, *CLOSED["message"]), end)
    assert c.finished


def test_a_chat_may_call_a_tool_in_place_of_its_content(tok):
    """Out of its thoughts, before its content, or with the empty content that the format has beside calls."""
    end = tok.special_ids["<|end_of_msg|>"]
    call = ("<|open|>", 'call tool="f" index="1"', "<|sep|>", *CLOSED["tools"])
    empty = (*TAGS["response"], *CLOSED["response"])
    ways = [(*TAGS["tools"],), (*CLOSED["think"], *TAGS["tools"]), (*CLOSED["think"], *empty, *TAGS["tools"])]
    for number, way in enumerate(ways):
        c = Constraint(tok, SamplingParams(regex=REGEX), [end], K3Parser(tok, True))
        push(c, *ids_of(tok, "hm", *way))
        for i in [*ids_of(tok, *call), end]:
            assert c.mask() is None
            c.push(i)
        assert c.finished
        refused = Constraint(tok, SamplingParams(regex=REGEX), [end], K3Parser(tok, True), tools=False)
        if number:  # what is written in thoughts is free
            with pytest.raises(ValueError, match="regex=.*: allowed is not token"):
                for i in ids_of(tok, "hm", *way):
                    refused.push(i)


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
def test_whatever_a_chat_does_its_content_fits(tok, thinking, tools):
    """Random answers with all kinds of tags among the thoughts: content, where there is no call, matches as a whole."""
    end, called = tok.special_ids["<|end_of_msg|>"], 0
    pieces = ["x", " {", "think", *TAGS["think"], "<|close|>", *CLOSED["think"], "tools", "response"]
    for seed in range(60):
        rng, ids = random.Random(seed), []
        c = Constraint(tok, SamplingParams(regex=REGEX), [end], K3Parser(tok, thinking), tools=tools)
        while not c.finished and len(ids) < 200:
            free = ids_of(tok, *([rng.choice(pieces)] if rng.random() < 0.8 else CLOSED["think"]))
            for i in free if c.mask() is None and len(ids) < 60 else [None]:
                if c.mask() is not None:
                    i = rng.choice(sorted(allowed(c, 2048)))
                elif i is None:
                    i = end
                c.push(i)
                ids.append(i)
        parser = K3Parser(tok, thinking)
        message = parser.push(ids) and parser.message
        content = message.content if message else ""
        into_tools = tuple(ids_of(tok, *TAGS["tools"]))
        opened = any(tuple(ids[i : i + len(into_tools)]) == into_tools for i in range(len(ids)))
        called += opened
        assert c.finished and (re.fullmatch(REGEX, content) or (not content and (opened or thinking)))
        if not thinking and not tools:
            assert re.fullmatch(REGEX, content)
    assert called if tools else not called or thinking


def test_a_chat_by_template_is_constrained_in_its_content(im_tok):
    """Kimi's tags: thoughts that the prompt or the model opens; calls in place of content, and behind it."""
    n, end = im_tok.special_ids, im_tok.special_ids["<|im_end|>"]
    begin = n["<|tool_calls_section_begin|>"]
    call = ids_of(
        im_tok, "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>"
    )
    call = [*call, n["<|tool_calls_section_end|>"]]
    first = {ord("y"), ord("n"), "\u4e2d".encode()[0], n["<think>"], begin}

    def fresh(thinking=False, **options):
        return Constraint(
            im_tok, SamplingParams(regex=REGEX), [end], JinjaParser(im_tok, thinking, "<|im_end|>"), **options
        )

    for thinking in (True, False):
        c = fresh(thinking)
        if not thinking:
            assert allowed(c, im_tok.vocab_size) == first
            c.push(n["<think>"])
        for i in ids_of(im_tok, "a{\u4e2d", "</think>"):
            assert c.mask() is None
            c.push(i)
        assert allowed(c, im_tok.vocab_size) == first
        push(c, *im_tok.encode("yes!"))
        assert allowed(c, im_tok.vocab_size) == {ord("!"), end, begin}
        push(c, begin, *call)
        assert allowed(c, im_tok.vocab_size) == {ord("!"), end, begin}  # what follows is the content's rest
        push(c, end)
        assert c.finished
    c = fresh()
    push(c, begin, *call)
    assert allowed(c, im_tok.vocab_size) == first | {end}
    assert allowed(fresh(tools=False), im_tok.vocab_size) == first - {begin}


def test_a_model_thinks_and_then_answers_what_fits(pair):
    """A small model's thoughts have no end, so they are in the prompt: its answer begins where they close."""
    thoughts = ids_of(pair.tokenizer, PROMPT[:260], *CLOSED["think"])
    params = SamplingParams(json_schema=SCHEMAS["object"] | COMPACT, seed=3, logprobs=1)
    reader, answer = (K3Parser(pair.tokenizer, True) for _ in range(2))
    reader.push(thoughts)
    ids, _ = generate(pair, params, thoughts[-66:], reader, tools=False)
    answer.push([*thoughts, *ids])
    assert fits("object", answer.message.content) and answer.message.thinking == PROMPT[:260]


# -- errors --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(regex="(a"), r"regex='\(a': allowed is what llguidance can follow \(.*unclosed group\)"),
        (dict(regex="a(?=b)"), r"regex=.*look-ahead"),
        (dict(regex=r"(a)\1"), r"regex=.*backreferences"),
        (dict(json_schema={"type": "strin"}), r"json_schema=.*Invalid type: strin\)"),
        (dict(json_schema={"not": {}}), r"json_schema=.*Unimplemented keys: \[\"not\"\]"),
        (dict(json_schema={"type": "string", "format": "x"}), r"json_schema=.*Unknown format: x"),
        (dict(json_schema={"$ref": "#/x"}), r"json_schema=.*'/x' does not exist"),
        (dict(json_schema={"minimum": 5, "maximum": 3, "type": "integer"}), r"json_schema=.*Unsatisfiable"),
        ({}, "neither json_schema nor regex"),
    ],
)
def test_what_cannot_be_followed_is_refused(tok, params, message):
    with pytest.raises(ValueError, match=message) as error:
        Constraint(tok, SamplingParams(**params), [EOS])
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_vocabulary_is_needed_and_the_package(tok, monkeypatch):
    with pytest.raises(ValueError, match="regex='a': allowed is with a tokenizer"):
        Constraint(None, SamplingParams(regex="a"), [EOS])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    other = Tokenizer({bytes([i]): i for i in range(256)}, {})
    with pytest.raises(ValueError, match=r"regex='a': allowed is with llguidance: pip install k3jax\[grammar\]"):
        Constraint(other, SamplingParams(regex="a"), [EOS])


def test_a_token_that_was_not_allowed_is_an_error(tok):
    for token in (tok.encode("b")[0], EOS, tok.special_ids["<|open|>"]):
        with pytest.raises(ValueError, match=f"regex='a': allowed is not token {token} here"):
            Constraint(tok, SamplingParams(regex="a"), [EOS]).push(token)


def test_a_table_goes_with_its_tokenizer():
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)}, {"[EOS]": 256})
    Constraint(tokenizer, SamplingParams(regex="a"), [256])
    known = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert known() is None
