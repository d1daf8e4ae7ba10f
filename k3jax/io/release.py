"""Released checkpoints out: a model to a Hugging Face directory, the inverse of k3jax.io.hf.

Tensors go to disk one at a time, under the released names and in the released shapes, so that writing needs the memory
of the largest of them beside the model. The file format is in k3jax/io/safetensors.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from k3jax.config import ConfigError, K3Config, require
from k3jax.io.hf import PREFIX, SHOW_PROGRESS, Shape, files_beside, matrices_of, parameters_of, released_tensors
from k3jax.io.safetensors import DTYPES, INDEX, SINGLE
from k3jax.model import K3
from k3jax.ops import mxfp4

SHARD = 5_000_000_000  # bytes of tensors in one file
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PAIR = ("weight_packed", "weight_scale")
_BF16 = jnp.dtype(jnp.bfloat16)


class Tensor(NamedTuple):
    """What a file says of a tensor, and how its value is had."""

    name: str
    shape: Shape
    dtype: np.dtype
    value: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    directory: str | os.PathLike[str],
    model: K3,
    config: K3Config,
    *,
    experts: str | None = None,
    source: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD,
) -> None:
    """Write a new directory that k3jax.io.hf.load and other readers of the release read.

    Parameters are written in the dtype that they are held in, and config.json names the trunk's. A directory in the
    released layout, loaded as stored (packed, if it is), comes back byte for byte, tensor by tensor.

    experts: None writes them as held, packed or plain; "bf16" plain, rounded to nearest even; "mxfp4" packed: held so,
    the same bytes; held plain, by the OCP rule in k3jax.ops.mxfp4.encode, which returns every weight that came from MXFP4
    exactly. source: a directory whose tokenizer, chat template and generation defaults are copied unchanged, never code.
    shard_bytes: at most so many bytes of tensors in a file; a larger tensor has a file of its own.

    The directory appears whole or, if anything stops the writing, not at all. Raises FileExistsError for one that exists
    and ConfigError for options that this model cannot have, both before any work; ValueError for weights that are not
    finite, which MXFP4 cannot hold.
    """
    path = Path(os.path.abspath(directory))
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists, and is not written over")
    require(type(shard_bytes) is int and shard_bytes >= 1, "shard_bytes", shard_bytes, "1 byte or more")
    if config != model.config:
        raise ConfigError("config: not the configuration that this model was made with")
    _check_experts(config, experts)
    beside = files_beside(source)
    tensors = list(_Source(model, config, experts).tensors())
    packed = any(tensor.name.endswith("_packed") for tensor in tensors)
    hf_config = dataclasses.replace(config, dtype=model.dtype.name).to_hf(packed=packed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        partial = Path(scratch) / path.name
        partial.mkdir()
        _write_tensors(partial, tensors, shard_bytes)
        _write_json(partial / "config.json", hf_config)
        for file in beside:
            shutil.copyfile(file, partial / file.name)
        partial.rename(path)


def _check_experts(config: K3Config, experts: str | None) -> None:
    require(experts in (None, "bf16", "mxfp4"), "experts", experts, "'bf16', 'mxfp4' or None (as held)")
    if experts is not None and not config.moe_layers:
        raise ConfigError(f"experts={experts!r}: allowed is None for a model without mixture layers")
    width = "hidden_size" if config.routed_expert_hidden_size is None else "routed_expert_hidden_size"
    for name in (width, "moe_intermediate_size") if experts == "mxfp4" else ():
        inputs = getattr(config, name)
        require(inputs % mxfp4.GROUP == 0, name, inputs, f"a multiple of {mxfp4.GROUP} for experts='mxfp4'")


# -- the tensors of a model -------------------------------------------------------------------------------------------


class _Source:
    """The tensors of one model, in its order. Values are copied, decoded or encoded when they are asked for."""

    def __init__(self, model: K3, config: K3Config, experts: str | None) -> None:
        self.parameters, self.released, self.experts = parameters_of(model), released_tensors(config), experts
        self.prefix = "" if "lm_head.weight" in self.released else PREFIX
        self.matrix = functools.lru_cache(maxsize=1)(self._matrix)  # codes are asked for, then their scales

    def tensors(self) -> Iterator[Tensor]:
        for path, parameter in self.parameters.items():
            if ".experts." not in path:
                shape, _ = self.released[self.prefix + path]
                yield Tensor(self.prefix + path, shape, parameter.dtype, functools.partial(self._padded, path, shape))
            elif not path.endswith("_scale"):  # these go with their codes
                yield from self._experts(path)

    def _experts(self, path: str) -> Iterator[Tensor]:
        held, packed, stack = self.parameters[path], path.endswith("_packed"), path.rpartition(".")[0]
        experts, out, in_ = held.shape
        pack = packed if self.experts is None else self.experts == "mxfp4"
        dtype = np.dtype(np.uint8) if pack else _BF16 if self.experts == "bf16" else held.dtype
        decoded = experts, out, in_ * (1 + packed)  # two columns a byte
        for expert, tensors in enumerate(matrices_of(f"{self.prefix}{stack}.weight", decoded, lambda _: pack)):
            for name, shape in tensors:
                yield Tensor(name, shape, dtype, functools.partial(self._part, stack, expert, name.rpartition(".")[2]))

    def _padded(self, path: str, shape: Shape) -> np.ndarray:
        """A parameter of the trunk in the released shape, with zeros past what the model holds (of A_log)."""
        # The copy: an array keeps for good what it has once sent to the host, and that would be a second model.
        value = np.asarray(jnp.copy(self.parameters[path][...]))
        if value.shape != shape:
            value = np.pad(value, (0, math.prod(shape) - value.size)).reshape(shape)
        return value

    def _part(self, stack: str, expert: int, kind: str) -> np.ndarray:
        return self.matrix(stack, expert)[kind]

    def _matrix(self, stack: str, expert: int) -> dict[str, np.ndarray]:
        """One expert's matrix as it is written: `weight`, or `weight_packed` and `weight_scale`."""
        held = {
            kind: np.asarray(self.parameters[f"{stack}.{kind}"][...][expert])
            for kind in ("weight", *_PAIR)
            if f"{stack}.{kind}" in self.parameters
        }
        if self.experts == "bf16" and "weight" in held:
            return {"weight": held["weight"].astype(_BF16)}
        if self.experts == "bf16":
            return {"weight": mxfp4.decode_numpy(held["weight_packed"], held["weight_scale"], _BF16)}
        if self.experts == "mxfp4" and "weight" in held:
            try:
                return dict(zip(_PAIR, mxfp4.encode(held["weight"]), strict=True))
            except ValueError as error:
                raise ValueError(f"{stack}, expert {expert}: {error}") from None
        return held


# -- files ------------------------------------------------------------------------------------------------------------


def _write_tensors(directory: Path, tensors: list[Tensor], shard_bytes: int) -> None:
    """`model.safetensors`, or numbered files and their index."""
    shards = _shards(tensors, shard_bytes)
    numbered = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = dict(zip(numbered if len(shards) > 1 else [SINGLE], shards, strict=True))
    total = sum(tensor.nbytes for tensor in tensors)
    written = (tensor for name, shard in files.items() for tensor in _write_file(directory / name, shard))
    console, quiet = Console(stderr=True), total < SHOW_PROGRESS
    for _ in track(written, "saving", total=len(tensors), disable=quiet, transient=True, console=console):
        pass
    if len(files) > 1:
        where = {tensor.name: name for name, shard in files.items() for tensor in shard}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _shards(tensors: list[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_file(path: Path, tensors: list[Tensor]) -> Iterator[Tensor]:
    """One file of safetensors; yields each tensor once it is written."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # each starts at a multiple of its item's size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers does not read the file
    end = 0
    for name, shape, dtype, _ in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = tensor.value()
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), tensor.name
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            yield tensor


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
