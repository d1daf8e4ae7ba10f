"""Tokenizer laws: the round trip, the segment rule, the release's pre-tokenisation and cuts, and wrong files."""

import base64
import importlib.util
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.io.tokenizer import MAX_PIECE, MAX_RUN, PATTERN, Tokenizer, TokenizerError, pieces


def script(name):
    path = Path(__file__).parents[1] / "scripts" / "k3_tiny" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bpe = script("bpe")

TEXT = (
    """The end of the message: they're theirs, aren't they? In 1234567 days it'll end, 漢字かな交じり文 and the Ende.
	We've seen the sea,  the seas and the seashore... and the sons of the seasons said: "I'd rather sing."
"""
    * 4
)
RANKS = bpe.train(TEXT, 330)
R = len(RANKS)
# The release's named ids, counted from its number of ranks, 163584.
PUBLISHED = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
             18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"}  # fmt: skip
NAMED = {R + i: name for i, name in PUBLISHED.items()}


def rank_lines(ranks):
    return [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]


def config(named):
    return json.dumps({"added_tokens_decoder": {i: {"content": name, "special": True} for i, name in named.items()}})


def write(path, lines=None, config_text=None):
    (path / "tiktoken.model").write_text("\n".join(rank_lines(RANKS) if lines is None else lines))
    (path / "tokenizer_config.json").write_text(config(NAMED) if config_text is None else config_text)
    return path


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return Tokenizer.from_directory(write(tmp_path_factory.mktemp("tokenizer")), vocab_size=R + 256)


def joined(encode, parts):
    return [i for part in parts for i in encode(part)]


# Letters of each kind, digits, marks, spaces, astral and control characters, and text that looks like a marker.
MIXED = st.lists(
    st.sampled_from([*"aetsTHÉßжǅʰ漢字㐀かー한เ\u0301", *"01٣½", *".,'’!-<|>[]", *" \t\n\r\v\u00a0\u2028", "🙂",
                     "👩\u200d👧",
                     "\x00", "\x7f", "'re", "'LL", "the", " sea", *PUBLISHED.values(), "<|reserved_token_1|>"])
).map("".join)  # fmt: skip


@settings(deadline=None)
@given(text=st.one_of(st.text(), MIXED))
def test_round_trip(tok, text):
    for specials in (False, True):
        ids = tok.encode(text, specials=specials)
        assert tok.decode(ids) == text
        assert tok.decode_bytes(ids) == b"".join(tok.decode_bytes([i]) for i in ids) == text.encode()


@settings(deadline=None)
@given(data=st.binary())
def test_any_bytes_have_ids(tok, data):
    ids = [RANKS[bytes([byte])] for byte in data]
    assert tok.decode_bytes(ids) == data
    assert tok.decode(ids) == data.decode(errors="replace")


def test_lone_surrogate_becomes_the_replacement_character(tok):
    assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb"


@settings(deadline=None)
@given(text=MIXED)
def test_plain_text_never_yields_a_control_id(tok, text):
    assert all(i < R for i in tok.encode(text))


@pytest.mark.parametrize("name", PUBLISHED.values())
def test_marker_is_control_only_when_asked(tok, name):
    plain = tok.encode(f"the{name}end")
    assert all(i < R for i in plain) and tok.decode(plain) == f"the{name}end"
    asked = tok.encode(f"the{name}end", specials=True)
    assert asked == [*tok.encode("the"), tok.special_ids[name], *tok.encode("end")]


def test_marker_is_whole_across_a_cut(tok):
    text = ("a " * MAX_PIECE)[: MAX_PIECE - 5] + "<|end_of_msg|>"
    assert tok.encode(text, specials=True)[-1] == R + 2


def test_longer_special_wins_over_its_prefix():
    tokenizer = Tokenizer(RANKS, {"<a": R, "<a>": R + 1})
    assert tokenizer.encode("<a><a", specials=True) == [R + 1, R]


def test_without_specials_there_is_nothing_to_ask_for():
    tokenizer = Tokenizer(RANKS, {})
    assert tokenizer.encode("the end", specials=True) == tokenizer.encode("the end")
    assert tokenizer.bos_id is None and tokenizer.eos_id is None


def test_ids_are_as_published(tok):
    assert {tok.special_ids[name] - R: name for name in PUBLISHED.values()} == PUBLISHED
    assert (tok.bos_id, tok.eos_id, tok.vocab_size) == (R, R + 1, R + 256)
    assert sorted(tok.special_ids.values()) == list(range(R, R + 256))
    assert tok.encode('"') == [1]  # the one byte whose released id is known


def test_unnamed_ids_are_reserved(tok):
    assert tok.special_ids[f"<|reserved_token_{R + 6}|>"] == R + 6
    assert tok.decode([R + 255]) == f"<|reserved_token_{R + 255}|>"


def test_vocabulary_ends_at_the_last_name_unless_told(tmp_path):
    assert Tokenizer.from_directory(write(tmp_path)).vocab_size == R + 22
    assert Tokenizer.from_directory(tmp_path, vocab_size=R + 1000).vocab_size == R + 1000


def test_ids_may_be_an_array_but_not_fractions(tok):
    assert tok.decode(np.array(tok.encode("the end"), np.int32)) == "the end"
    with pytest.raises(TypeError):
        tok.decode([1.5])


@pytest.mark.parametrize("unknown", [-1, R + 256, 10**12])
def test_unknown_id_is_named(tok, unknown):
    with pytest.raises(TokenizerError, match=f"id {unknown} is outside the vocabulary of {R + 256} ids"):
        tok.decode([0, unknown])


SPLITS = {
    "the sea": ["the", " sea"],
    "they're I'LL we'd": ["they're", " I'LL", " we'd"],
    "rock'n'roll": ["rock", "'n", "'roll"],
    "HTTPServer iPhone": ["HTTPServer", " i", "Phone"],
    "1234567": ["123", "456", "7"],
    "a1 2b": ["a", "1", " ", "2", "b"],
    "漢字かな": ["漢字", "かな"],
    "go漢字go": ["go", "漢字", "go"],
    " 漢": [" ", "漢"],
    "e\u0301te\u0301": ["e\u0301te\u0301"],
    "(word) {x}": ["(word", ")", " {", "x", "}"],
    "wait...\n\nso": ["wait", "...\n\n", "so"],
    " !?": [" !?"],
    "a   b": ["a", "  ", " b"],
    "a  \n \nb": ["a", "  \n \n", "b"],
    "a\tb\r\nc": ["a", "\tb", "\r\n", "c"],
    "a  ": ["a", "  "],
    "<|end_of_msg|>": ["<|", "end", "_of", "_msg", "|>"],
}


@pytest.mark.parametrize("text", SPLITS)
def test_pretokens_are_as_documented(tok, text):
    assert regex.findall(PATTERN, text, regex.V1) == SPLITS[text]
    assert tok.encode(text) == joined(tok.encode, SPLITS[text])


@settings(deadline=None)
@given(text=MIXED)
def test_encode_is_merging_by_rank_within_pretokens(tok, text):
    assert tok.encode(text) == bpe.encode_with_dropout(text, RANKS, 0.0, random.Random(0))


@settings(deadline=None)
@given(text=MIXED, p=st.sampled_from([0.1, 0.5, 1.0]), seed=st.integers(0, 9))
def test_dropout_keeps_the_text(tok, text, p, seed):
    ids = bpe.encode_with_dropout(text, RANKS, p, random.Random(seed))
    assert tok.decode(ids) == text
    assert p < 1.0 or len(ids) == len(text.encode())


LONG = {
    "spaces": " " * 30_000 + "the end",
    "letters": "a" * 500_000,
    "words": "the sea, " * 60_000,
    "wide": "漢🙂" * 30_000,
    "one over": "x " + "y" * (MAX_RUN + 1) + "\n",
    "runs either side of a cut": "\n" * (MAX_PIECE - 3) + "a" * 60_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_text_is_encoded_piece_by_piece(tok, text):
    parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(len(part) <= MAX_PIECE for part in parts)
    assert max(len(run) for part in parts for run in re.findall(r"\s+|\S+", part)) <= MAX_RUN
    assert tok.encode(text) == joined(tok.encode, parts)
    assert tok.decode(tok.encode(text)) == text


def test_cuts_are_where_the_release_makes_them():
    assert list(pieces("")) == []
    assert list(pieces("the end")) == ["the end"]
    assert list(map(len, pieces("ab " + "c" * (2 * MAX_RUN + 1) + " d"))) == [3 + MAX_RUN, MAX_RUN, 3]
    assert list(map(len, pieces("a " * MAX_PIECE))) == [MAX_PIECE, MAX_PIECE]
    assert len(list(pieces("a" * MAX_RUN))) == 1


def test_no_files_is_no_tokenizer(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_one_file_alone_is_refused(tmp_path, name):
    (write(tmp_path) / name).unlink()
    with pytest.raises(TokenizerError, match=f"{name}: missing"):
        Tokenizer.from_directory(tmp_path)


LINES = rank_lines(RANKS)
BAD_RANKS = {
    "bad base64": ([*LINES, "@@@ 330"], "not a line of 'base64 rank': b'@@@ 330'"),
    "no rank": ([*LINES, "YWJj"], "not a line of 'base64 rank': b'YWJj'"),
    "not a number": ([*LINES, "YWJj x"], "not a line of 'base64 rank'"),
    "three fields": ([*LINES, "YWJj 330 1"], "not a line of 'base64 rank'"),
    "rank twice": ([*LINES, "cXFx 300"], "was there before: b'qqq', 300"),
    "token twice": ([*LINES, LINES[0].replace(" 0", " 330")], "was there before: b'!', 330"),
    "gap": (LINES[:300] + LINES[301:], "no rank 300, though the file has 329 ranks"),
    "negative": ([*LINES, "cXFx -1"], "no rank 330, though the file has 331 ranks"),
    "a byte without rank": (["cXFx 0", *LINES[1:]], "no rank for the byte 0x21"),
    "empty": ([], "no rank for the byte 0x00"),
    "too many": ([*LINES, *(f"{base64.b64encode(b'qq%d' % i).decode()} {i}" for i in range(R, R + 257))],
                 f"{R + 257} ranks do not fit a vocabulary of {R + 256} ids"),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), BAD_RANKS.values(), ids=BAD_RANKS)
def test_bad_rank_file_is_refused(tmp_path, lines, message):
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: .*" + re.escape(message)):
        Tokenizer.from_directory(write(tmp_path, lines=lines), vocab_size=R + 256)


BAD_CONFIGS = {
    "not JSON": ("{", "want JSON with added_tokens_decoder"),
    "not an object": ("[]", "want JSON with added_tokens_decoder"),
    "no tokens": ("{}", "want JSON with added_tokens_decoder {id: {content}}: KeyError('added_tokens_decoder')"),
    "no content": ('{"added_tokens_decoder": {"400": {}}}', "KeyError('content')"),
    "id no number": (config({"x": "[BOS]"}), "invalid literal for int"),
    "name no text": (config({R: 5}), f"special id {R}, 5: want a name"),
    "empty name": (config({R: ""}), f"special id {R}, '': want a name"),
    "inside the ranks": (config({R - 1: "[BOS]"}), f"special id {R - 1}, '[BOS]': want a name, and an id in {R} .."),
    "past the vocabulary": (config({R + 256: "[PAD]"}), f"special id {R + 256}, '[PAD]'"),
    "name twice": (config({R: "[BOS]", R + 3: "[BOS]"}), f"special ids {R} and {R + 3} have the same name [BOS]"),
    "name of a reserved id": (config({R: f"<|reserved_token_{R + 1}|>"}), f"special ids {R} and {R + 1}"),
}


@pytest.mark.parametrize(("config_text", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_config_is_refused(tmp_path, config_text, message):
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*" + re.escape(message)):
        Tokenizer.from_directory(write(tmp_path, config_text=config_text), vocab_size=R + 256)


def test_written_files_are_read_back(tmp_path):
    bpe.write(tmp_path, RANKS, R + 16)
    tokenizer = Tokenizer.from_directory(tmp_path, R + 16)
    assert tokenizer.vocab_size == Tokenizer.from_directory(tmp_path).vocab_size == R + 16
    assert [tokenizer.special_ids[name] for name in (*bpe.SPECIALS, "[PAD]")] == [*range(R, R + 6), R + 15]
    assert tokenizer.encode(TEXT) == bpe.encode_with_dropout(TEXT, RANKS, 0.0, random.Random(0))


def test_training_refuses_more_ranks_than_the_text_has():
    with pytest.raises(ValueError, match="joints for 258 ranks, not 300"):
        bpe.train("the", 300)
