"""Text as it comes: whole characters, no part of a stop text, and in the end what decoding at once gives."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.io.tokenizer import TextStream, Tokenizer

# Single bytes, some pairs that cut characters in two, and two control tokens.
RANKS = {bytes([byte]): byte for byte in range(256)} | {
    token: 256 + i
    for i, token in enumerate([b"ab", b"bab", b"a\n", "光".encode()[1:], "🔥".encode()[:2], "é".encode()])
}
CONTROL = {"<|open|>": 262, "[EOS]": 263}
tok = Tokenizer(RANKS, CONTROL)

IDS = st.lists(
    st.one_of(
        st.sampled_from([ord("a"), ord("b"), 10, 256, 257, 258, 259, 260, 261, 262, 263, 0xE5, 0xF0]),
        st.integers(0, 263),
    ),
    max_size=40,
)
STOPS = st.lists(
    st.one_of(st.text(alphabet="ab\né光🔥", min_size=1, max_size=5), st.text(min_size=1, max_size=3)), max_size=3
).filter(lambda stops: not any(0xD800 <= ord(c) < 0xE000 for stop in stops for c in stop))


def run(ids, stops=(), before=(), least=0):
    """The pieces, the stop text, and how many ids were taken."""
    stream, out = TextStream(tok, stops, before), []
    for i, token in enumerate(ids, 1):
        out.append(stream.push(token, may_stop=i >= least))
        if stream.stop is not None:
            return [*out, stream.finish()], stream.stop, i
    return [*out, stream.finish()], None, len(ids)


def plain(ids):
    """Of ids decoded at once, without half a character at the end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(tok.decode_bytes(ids, specials=False))


@settings(max_examples=400, deadline=None)
@given(IDS)
def test_pieces_make_the_whole(ids):
    pieces, stop, _ = run(ids)
    assert "".join(pieces) == plain(ids) and stop is None


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_pieces_of_a_text_hold_whole_characters(text):
    text = text.encode(errors="replace").decode().replace("\ufffd", "?")
    pieces, _, _ = run(tok.encode(text))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


@settings(max_examples=500, deadline=None)
@given(IDS, STOPS, st.integers(0, 6))
def test_a_stop_text_never_shows(ids, stops, least):
    """Against the definition: the first id, from the `least`th on, with which a stop text is complete ends the stream."""
    pieces, stop, taken = run(ids, stops, least=least)
    emitted = 0  # bytes that are out of reach: what could begin nothing, and what was complete too early
    for i in range(1, len(ids) + 1):
        made = tok.decode_bytes(ids[:i], specials=False)[emitted:]
        known = len(tok.decode_bytes(ids[: i - 1], specials=False)) - emitted
        found = [
            (at, s.encode())
            for s in stops
            for at in range(len(made))
            if i >= least and made[at:].startswith(s.encode()) and at + len(s.encode()) > known
        ]
        if found:
            at, first = min(found)
            assert (taken, stop) == (i, first.decode())
            text = tok.decode_bytes(ids[:i], specials=False)[: emitted + at]
            assert "".join(pieces) == text.decode("utf-8", errors="replace")
            break
        held = max(
            (n for n in range(len(made) + 1) if any(s.encode()[:-1].startswith(made[len(made) - n :]) for s in stops)),
            default=0,
        )
        emitted += len(made) - held
    else:
        assert stop is None and "".join(pieces) == plain(ids)
    if least <= 1:
        assert not any(s in "".join(pieces) for s in stops)


def test_a_stop_text_that_was_complete_too_early_does_not_count_later():
    """Though it is held back, because it begins a longer one."""
    ids = tok.encode("xmyz")
    pieces, stop, taken = run(ids, ["m", "m#"], least=3)
    assert ("".join(pieces), stop, taken) == ("xmyz", None, 4)
    assert run(tok.encode("xmy#"), ["m", "my#"], least=3)[1] == "my#"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aé光🔥\n", max_size=12), st.integers(0, 12))
def test_a_character_cut_by_the_prompt_is_completed(text, cut):
    """B86: wherever the prompt ends, what follows completes its last character, and nothing of it comes twice."""
    ids = [*text.encode()]
    before, after = ids[:cut], ids[cut:]
    pieces, _, _ = run(after, before=before)
    shown = run(before)[0]  # what can be shown of the prompt
    assert "".join([*shown, *pieces]) == text


@pytest.mark.parametrize("name", CONTROL)
def test_control_tokens_have_no_text(name):
    """B84, B87: their names come out only where they were written as text."""
    assert run([CONTROL[name]])[0] == ["", ""]
    assert "".join(run(tok.encode(name))[0]) == name
    assert "".join(run([*tok.encode("a"), CONTROL[name], *tok.encode("b")])[0]) == "ab"
