"""A directory in the released layout with K3's shapes, fewer layers and experts, and contents that repeat.

    python scripts/full_shape.py OUT [--layers 4] [--experts 32] [--vocab 8192] [--shard-gb 5] [--seed 0] [--holes]

For trying out loading without 1.5 TB. Every dtype has one block of PERIOD numbers; entry i of a tensor, row by row, is entry
(start + i) mod PERIOD of it, and the start follows from the tensor's name. So `values` tells any part of any tensor, and
writing takes the memory of the blocks. PERIOD is prime: rows of a matrix differ. The directory has no tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from k3jax.config import ConfigError, K3Config, require
from k3jax.io.hf import Shape, released_tensors
from k3jax.io.safetensors import DTYPES, INDEX

PERIOD = 1_000_003  # entries
CODES = {dtype: code for code, dtype in DTYPES.items()}
Table = dict[str, tuple[Shape, np.dtype]]


def smaller(config: K3Config, layers: int, experts: int, vocab: int) -> K3Config:
    """The first layers of an architecture, with as many experts and ids as given; all widths are kept."""
    for name, value, most in (("experts", experts, config.num_experts), ("vocab", vocab, config.vocab_size)):
        require(1 <= value <= most, name, value, f"1 to {most}")
    return dataclasses.replace(
        config.slice(layers), num_experts=experts, num_experts_per_token=min(config.num_experts_per_token, experts),
        vocab_size=vocab, bos_token_id=None, eos_token_id=None, pad_token_id=None, media_placeholder_token_id=None,
    )  # fmt: skip


def values(name: str, shape: Shape, dtype: np.dtype, box: Sequence[slice] = (), seed: int = 0) -> np.ndarray:
    """The part `box` of a tensor: slices of its first axes."""
    index = np.full(shape[:0], _start(name), np.int64)
    for axis, size in enumerate(shape):
        part = np.arange(size)[box[axis] if axis < len(box) else slice(None)]
        index = index[..., None] + part * math.prod(shape[axis + 1 :])
    return _block(dtype, name.endswith("_scale"), seed)[index % PERIOD]


def write(
    directory: Path, config: K3Config, *, seed: int = 0, shard_bytes: int = 5 * 10**9, holes: bool = False
) -> int:
    """Write a new directory; the bytes of its tensors.

    shard_bytes: of the tensors in one file, at least one of which it has. holes: leave the tensors' bytes out, so that they
    read as zeros and take no room on most file systems. Raises FileExistsError, and OSError where the disk is too small.
    """
    table = released_tensors(config)
    total = sum(map(_nbytes, table.values()))
    directory.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory.parent).free
    if not holes and free < total:
        raise OSError(f"{directory}: {total / 1e9:.1f} GB to write, and {free / 1e9:.1f} GB free")
    directory.mkdir()
    shards = list(_shards(table, shard_bytes))
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}
    for file, shard in files.items():
        _write_shard(directory / file, shard, seed, holes)
    where = {name: file for file, shard in files.items() for name in shard}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    packed = any(name.endswith("_packed") for name in table)
    (directory / "config.json").write_text(json.dumps(config.to_hf(packed=packed), indent=1))  # last: it makes a model
    return total


def _nbytes(entry: tuple[Shape, np.dtype]) -> int:
    return math.prod(entry[0]) * entry[1].itemsize


def _start(name: str) -> int:
    return zlib.crc32(name.encode()) % PERIOD


@functools.cache
def _block(dtype: np.dtype, scales: bool, seed: int) -> np.ndarray:
    """The numbers of a dtype: any byte for codes, factors of about 2^-7 for scales, 0.02 times normal ones else."""
    rng = np.random.default_rng([seed, dtype.itemsize, scales])
    if dtype == np.uint8:
        return rng.integers(116, 126, PERIOD, dtype) if scales else rng.integers(0, 256, PERIOD, dtype)
    return (rng.standard_normal(PERIOD, np.float32) * 0.02).astype(dtype)


def _shards(table: Table, shard_bytes: int) -> Iterator[Table]:
    shard, size = {}, 0
    for name, entry in table.items():
        if shard and size + _nbytes(entry) > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += _nbytes(entry)
    yield shard


def _write_shard(path: Path, shard: Table, seed: int, holes: bool) -> None:
    ordered = dict(
        sorted(shard.items(), key=lambda item: -item[1][1].itemsize)
    )  # each at a multiple of its item's size
    ends = np.cumsum([0, *map(_nbytes, ordered.values())]).tolist()
    header = {
        name: {"dtype": CODES[dtype], "shape": shape, "data_offsets": ends[i : i + 2]}
        for i, (name, (shape, dtype)) in enumerate(ordered.items())
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (shape, dtype) in () if holes else ordered.items():
            block, start, left = _block(dtype, name.endswith("_scale"), seed), _start(name), math.prod(shape)
            while left:
                run = block[start : start + left]
                file.write(run.view(np.uint8).data)
                start, left = 0, left - len(run)
        file.truncate(8 + len(text) + ends[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=("k3", "kimi_linear_48b"), default="k3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--shard-gb", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--holes", action="store_true", help="zeros that take no room")
    args = parser.parse_args()
    try:
        config = smaller(getattr(K3Config, args.model)(), args.layers, args.experts, args.vocab)
        total = write(args.out, config, seed=args.seed, shard_bytes=int(args.shard_gb * 1e9), holes=args.holes)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{total / 1e9:.2f} GB in {len([*os.scandir(args.out)]) - 2} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
