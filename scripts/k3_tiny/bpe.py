"""Byte-level BPE for k3-tiny: training, the two released files, and BPE-dropout.

    python scripts/k3_tiny/bpe.py TRAIN_TXT OUTDIR [--vocab-size 2048] [--heldout HELDOUT_TXT]

Merges go by the rank of the joined bytes, as tiktoken's do, so what is trained here is what the tokenizer encodes.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import regex

from k3jax.io.tokenizer import PATTERN, Tokenizer, pieces

PRETOKEN = regex.compile(PATTERN, regex.V1)  # V1: set intersection, as tiktoken's regex engine has it

# The release's order of the single bytes, which is GPT-2's: the printable Latin-1 characters, then the others.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*PRINTABLE, *sorted(set(range(256)) - set(PRINTABLE))]

RESERVED = 16  # control ids after the ranks
SPECIALS = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]  # in the release's order

SAMPLES = 16  # segmentations of a word that dropout keeps to choose from


class Random(Protocol):
    """`random.Random` or `numpy.random.Generator`."""

    def random(self) -> float: ...


def merge(parts: list[bytes], ranks: Mapping[bytes, int], p: float = 0.0, rng: Random | None = None) -> list[bytes]:
    """Joins, in place, the neighbours of lowest joint rank until no joint has a rank.

    At each step every possible merge is left out with probability `p` (BPE-dropout, arXiv:1910.13267).
    """
    while True:
        joints = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if p:
            joints = [joint for joint in joints if rng.random() >= p]
        if not joints:
            return parts
        _, i = min(joints)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def pretokens(text: str) -> Iterator[str]:
    """The words that no merge crosses, cut as the tokenizer cuts them."""
    for piece in pieces(text):
        yield from PRETOKEN.findall(piece)


def split_bytes(word: str) -> list[bytes]:
    return [bytes([byte]) for byte in word.encode()]


def train(text: str, n_ranks: int) -> dict[bytes, int]:
    """Token bytes to rank: the 256 bytes, then the most frequent joint of neighbours, again and again.

    Ties go to the joint met first. Raises ValueError if the text runs out of joints.
    """
    ranks = {bytes([byte]): rank for rank, byte in enumerate(BYTES)}
    words = [(split_bytes(word), count) for word, count in Counter(pretokens(text)).items()]
    counts: Counter[bytes] = Counter()  # of each joint in the text
    where: dict[bytes, set[int]] = defaultdict(set)  # words that have, or had, this joint

    def count_joints(w: int, sign: int) -> None:
        parts, count = words[w]
        for a, b in pairwise(parts):
            counts[a + b] += sign * count
            where[a + b].add(w)

    for w in range(len(words)):
        count_joints(w, +1)
    while len(ranks) < n_ranks:
        token = max(counts, key=counts.__getitem__, default=b"")
        if not counts[token]:
            raise ValueError(f"the text has joints for {len(ranks)} ranks, not {n_ranks}")
        ranks[token] = len(ranks)
        for w in sorted(where.pop(token)):
            count_joints(w, -1)
            merge(words[w][0], ranks)
            count_joints(w, +1)
        counts = +counts  # drops the joints that are gone
    return ranks


def write(outdir: Path, ranks: Mapping[bytes, int], vocab_size: int) -> None:
    """Writes `tiktoken.model` and `tokenizer_config.json`: specials follow the ranks, [PAD] is the last id."""
    outdir.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (outdir / "tiktoken.model").write_text("".join(lines))
    names = dict(enumerate(SPECIALS, start=len(ranks))) | {vocab_size - 1: "[PAD]"}
    config = {
        "added_tokens_decoder": {str(i): {"content": name, "special": True} for i, name in names.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
    }
    (outdir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_with_dropout(text: str, ranks: Mapping[bytes, int], p: float, rng: Random) -> list[int]:
    """Ids of the text under BPE-dropout; with p = 0 what the tokenizer encodes, and always decoding to the text.

    A word draws SAMPLES fresh segmentations, one for each time it is met; after that it chooses among them.
    """
    drawn: dict[str, list[list[int]]] = defaultdict(list)
    ids: list[int] = []
    for word in pretokens(text):
        samples = drawn[word]
        if len(samples) < SAMPLES:
            samples.append([ranks[part] for part in merge(split_bytes(word), ranks, p, rng)])
            ids += samples[-1]
        else:
            ids += samples[int(rng.random() * SAMPLES)]
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train_txt", type=Path)
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2048, help="ids in all, 16 of them reserved")
    parser.add_argument("--heldout", type=Path)
    args = parser.parse_args()
    ranks = train(args.train_txt.read_text(), args.vocab_size - RESERVED)
    write(args.outdir, ranks, args.vocab_size)
    tokenizer = Tokenizer.from_directory(args.outdir, args.vocab_size)
    for path in filter(None, (args.train_txt, args.heldout)):
        text = path.read_text()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, f"{path} does not round-trip"
        print(f"{path.name}: {len(ids)} tokens, {len(text.encode()) / len(ids):.4f} bytes a token")


if __name__ == "__main__":
    main()
