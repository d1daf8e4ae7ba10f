"""What a mask costs: the table of a vocabulary, a grammar's start, and mask() and push() for each token.

On k3-tiny's vocabulary and on one of the release's size, made of k3-tiny's and of texts at random, for the release's is not
at hand. Texts are walks: a token at random among those that are allowed, until the text ends. The time of the choice does
not count.

python benchmarks/grammar_mask.py [--out benchmarks/results] [--walks 20]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import time
from pathlib import Path

import numpy as np

from k3jax import SamplingParams
from k3jax.engine.grammar import Constraint
from k3jax.io.tokenizer import RESERVED, Tokenizer

ROOT = Path(__file__).parents[1]
SIZE = 163_840  # of the release's vocabulary
PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age"], "properties": {
    "name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}}  # fmt: skip
GRAMMARS = {
    "small schema": SamplingParams(json_schema=PERSON),
    "nested schema": SamplingParams(
        json_schema={
            "$defs": {"person": PERSON},
            "type": "object",
            "additionalProperties": False,
            "required": ["kind", "people", "tags"],
            "properties": {
                "kind": {"enum": ["team", "family", "crowd"]},
                "people": {"type": "array", "minItems": 1, "maxItems": 6, "items": {"$ref": "#/$defs/person"}},
                "tags": {"type": "array", "maxItems": 8, "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}},
                "map": {
                    "type": "array",
                    "maxItems": 4,
                    "items": {"type": "array", "maxItems": 4, "items": {"type": "number"}},
                },
            },
        }
    ),
    "regex": SamplingParams(regex=r"(\d{4}-\d{2}-\d{2} [a-z]{3,10}@[a-z]{3,10}\.(com|org); ){1,8}"),
}


def large(tiny: Tokenizer) -> Tokenizer:
    """A vocabulary of the release's size: k3-tiny's texts, and words made of two to four of them at random."""
    rng = random.Random(0)
    texts = [tiny.decode_bytes([i]) for i in range(tiny.vocab_size) if i not in tiny.control_ids]
    ranks = {text: i for i, text in enumerate(texts)}
    while len(ranks) < SIZE - RESERVED:
        ranks.setdefault(b"".join(rng.choices(texts, k=rng.randint(2, 4))), len(ranks))
    return Tokenizer(ranks, {"[EOS]": len(ranks)} | {f"<|{i}|>": i for i in range(len(ranks) + 1, SIZE)})


def measure(tokenizer: Tokenizer, params: SamplingParams, walks: int) -> dict[str, float]:
    """Milliseconds: the start of a request, and of each token mask() and push() together."""
    assert tokenizer.eos_id is not None
    starts, tokens = [], []
    for seed in range(walks):
        rng, began = random.Random(seed), time.perf_counter()
        constraint = Constraint(tokenizer, params, [tokenizer.eos_id])
        starts.append(time.perf_counter() - began)
        for _ in range(200):
            began = time.perf_counter()
            mask = constraint.mask()
            seconds = time.perf_counter() - began
            assert mask is not None
            token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            began = time.perf_counter()
            constraint.push(token)
            tokens.append(seconds + time.perf_counter() - began)
            if constraint.finished:
                break
    figures = {"start_first": starts[0], "start_median": np.median(starts), "token_mean": np.mean(tokens)}
    figures |= {f"token_p{p}": np.percentile(tokens, p) for p in (50, 99, 100)}
    return {name: round(1e3 * float(seconds), 4) for name, seconds in figures.items()} | {"tokens": len(tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--walks", type=int, default=20)
    args = parser.parse_args()
    tiny = Tokenizer.from_directory(ROOT / "checkpoints" / "k3-tiny", 2048)
    assert tiny is not None
    warm = Tokenizer({bytes([i]): i for i in range(256)}, {"[EOS]": 256})
    Constraint(warm, GRAMMARS["regex"], [256])  # the package's own start is no part of a table's
    found: dict[str, object] = {}
    for tokenizer in (tiny, large(tiny)):
        began = time.perf_counter()
        Constraint(tokenizer, SamplingParams(regex="a"), ())
        seconds = time.perf_counter() - began
        found[str(tokenizer.vocab_size)] = {"table_ms": round(1e3 * seconds, 1)} | {
            name: measure(tokenizer, params, args.walks) for name, params in GRAMMARS.items()
        }
    today = datetime.date.today().isoformat()
    versions = {name: importlib.metadata.version(name) for name in ("llguidance", "jax", "flax", "numpy")}
    result = {
        "date": today,
        "question": "what does a grammar's mask cost a token, and its table a vocabulary?",
        "unit": "milliseconds; token_*: mask() and push() of one token; start_*: Constraint(), the table there already",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "walks": args.walks,
        "by_vocabulary": found,
    }
    text = json.dumps(result, indent=2)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{today}-grammar_mask.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
