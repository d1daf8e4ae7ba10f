"""Make checkpoints/k3-tiny of what train.py wrote: the released layout, bfloat16, shards of at most 12 MB of tensors.

python scripts/k3_tiny/export.py TEXT_DIR TOKENIZER_DIR TRAINED_DIR OUT_DIR
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import corpus
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.config import K3Config
from k3jax.io import hf, release
from k3jax.io.tokenizer import Tokenizer
from k3jax.model import K3

SHARD = 12_000_000  # bytes of tensors


def module(config: K3Config, trained: Path) -> K3:
    """The model of the trained parameters, whose bfloat16 lies in the files as its bits."""
    model = K3.abstract(config)
    parameters = hf.parameters_of(model)
    for file in sorted(trained.glob("params_*.npz")):
        for name, value in np.load(file).items():
            value = value.view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value
            assert value.shape == parameters[name].shape, name
            parameters.pop(name).set_value(jnp.asarray(value))
    assert not parameters, f"not trained: {sorted(parameters)}"
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "tokenizer", "trained", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_directory(args.tokenizer)
    assert tokenizer is not None
    ids = tokenizer.special_ids
    config = K3Config.tiny(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=ids["[BOS]"],
        eos_token_id=ids["<|end_of_msg|>"],
        pad_token_id=ids["[PAD]"],
    )
    model = module(config, args.trained)
    release.save(args.out, model, config, source=args.tokenizer, shard_bytes=SHARD)
    (args.out / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}, indent=1) + "\n")
    shutil.copy(args.text / "heldout.txt", args.out)

    trained = json.loads((args.trained / "log.json").read_text())
    train, heldout = ((args.text / file).read_bytes() for file in ("train.txt", "heldout.txt"))
    record = {
        "source": "King James text of Debian's bible-kjv-text (bible -f gen1:1-rev22:21), verse references removed",
        "licence": "public domain",
        "split": f"held out: the last {len(heldout)} bytes, heldout.txt; trained on the {len(train)} before them",
        "seed": trained["settings"]["seed"],
        "steps": trained["settings"]["steps"],
        "hardware": trained["device"],
        "jax": trained["jax"],
        "settings": trained["settings"],
        "parameters": sum(math.prod(p.shape) for p in hf.parameters_of(model).values()),
        "loss_curve": trained["curve"],
        "bits_per_byte": trained["curve"][-1]["bits_per_byte"],
        "xz_bits_per_byte": round(corpus.xz_bits_per_byte(train, heldout), 4),
    }
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
