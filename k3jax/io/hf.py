"""Released checkpoints in: a Hugging Face directory to a model, tensor by tensor.

Attribute paths of the modules are the released names, so the mapping below is short: experts are stacked, A_log drops its
padding, convolutions lose or gain an axis of one. Everything is checked before the first tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from k3jax.config import ConfigError, K3Config
from k3jax.io.safetensors import Checkpoint, CheckpointError
from k3jax.model import K3
from k3jax.ops import mxfp4

_PREFIX = "language_model."
_DTYPES = ("bfloat16", "float32")
_SHOW_PROGRESS = 1 << 30  # bytes from which loading draws a bar


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, its configuration, and the names of the tensors that were left unread by rule."""

    model: K3
    config: K3Config
    ignored: tuple[str, ...]


def read_config(directory: Path) -> K3Config:
    """The architecture in `config.json`. Raises ConfigError."""
    return K3Config.from_hf(read_json(directory / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model directory needs a config.json") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, allowed is an object")
    return value


def load(directory: Path, *, dtype: str | None = None, packed: bool = False) -> Loaded:
    """Read a released directory.

    dtype: "bfloat16" or "float32" for the trunk and the experts; None keeps every tensor as stored. Parameters that the
    architecture keeps in float32 are never narrowed. packed: keep MXFP4 experts packed in memory.
    Raises ConfigError and CheckpointError; missing, misshapen and unread tensors are all listed.
    """
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"dtype={dtype!r}: allowed are {', '.join(map(repr, _DTYPES))} or None (as stored)")
    config = read_config(directory)
    with Checkpoint(directory) as checkpoint:
        source = _Source(checkpoint, config)
        config = source.with_ranks(config)
        if packed and not source.has_packed_experts:
            raise CheckpointError(f"{directory}: experts='packed' asks for MXFP4 experts, but this checkpoint holds none")
        model = K3.abstract(config, dtype=dtype or config.dtype, packed=packed)
        parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
        source.check(parameters)
        size = sum(math.prod(p.shape) * p.dtype.itemsize for _, p in parameters)
        for path, parameter in track(parameters, "loading", disable=size < _SHOW_PROGRESS, transient=True):
            array = source.array(path, tuple(parameter.shape))
            parameter.set_value(jnp.asarray(array, _held_dtype(array.dtype, parameter.dtype, dtype)))
        nnx.update(model, nnx.from_flat_state(parameters))
        return Loaded(model.absorb(), config, source.ignored)


def _held_dtype(stored: np.dtype, declared: np.dtype, asked: str | None) -> np.dtype:
    if asked is None or stored == np.uint8:
        return stored
    if declared == np.float32 and asked != "float32":  # a float32 parameter keeps what the file holds
        return stored
    return jnp.dtype(asked)


class _Source:
    """The tensors of one checkpoint under the names of the modules' attribute paths."""

    def __init__(self, checkpoint: Checkpoint, config: K3Config) -> None:
        self.checkpoint, self.config = checkpoint, config
        names = set(checkpoint.names)
        self.prefix = _PREFIX if any(name.startswith(_PREFIX) for name in names) else ""
        self.ignored = tuple(sorted(name for name in names if self._ignored(name)))
        self.names = names - set(self.ignored)

    def _ignored(self, name: str) -> bool:
        """The vision tower and its projector, and layers past the count (a multi-token-prediction head)."""
        if name.startswith(("vision_tower.", "mm_projector.")):
            return True
        layer = re.match(rf"{re.escape(self.prefix)}model\.layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= self.config.num_hidden_layers

    @property
    def has_packed_experts(self) -> bool:
        return any(name.endswith(".weight_packed") for name in self.names)

    def with_ranks(self, config: K3Config) -> K3Config:
        """The ranks of the decay and gate projections, which only the tensors' shapes tell."""
        found: dict[str, int] = {}
        for field, tensor in (("kda_decay_rank", "f_a_proj"), ("kda_gate_rank", "g_a_proj")):
            name = next((n for layer in config.kda_layers if (n := self._name(f"model.layers.{layer}.self_attn.{tensor}.weight")) in self.names), None)
            if name is not None and len(self.checkpoint.shape(name)) == 2 and self.checkpoint.shape(name)[0] != config.kda_head_dim:
                found[field] = self.checkpoint.shape(name)[0]
        return dataclasses.replace(config, **found) if found else config

    def _name(self, path: str) -> str:
        return self.prefix + path

    def _parts(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors, with the shapes wanted, that make the parameter at `path`."""
        dotted = self._name(".".join(map(str, path)))
        if "experts" not in path:
            yield dotted, shape
            return
        before, matrix = dotted.rsplit(".experts.", 1)
        out, in_ = shape[1], shape[2]
        for expert in range(shape[0]):
            base = f"{before}.experts.{expert}.{matrix}"
            pair = base.removesuffix(".weight") + ".weight_packed", base.removesuffix(".weight") + ".weight_scale"
            if base.endswith(".weight") and base not in self.names and self.names.intersection(pair):
                yield pair[0], (out, in_ // 2)
                yield pair[1], (out, -(-in_ // 32))
            else:
                yield base, (out, in_)

    def check(self, parameters: list[tuple[tuple[Any, ...], nnx.Param]]) -> None:
        """Raise CheckpointError listing every tensor that is missing, misshapen or left over."""
        problems, read = [], set()
        for path, parameter in parameters:
            for name, shape in self._parts(path, tuple(parameter.shape)):
                read.add(name)
                if name not in self.names:
                    problems.append(f"missing {name} {list(shape)}")
                elif not _fits(name, self.checkpoint.shape(name), shape):
                    problems.append(f"{name} has shape {list(self.checkpoint.shape(name))}, wanted is {list(shape)}")
                elif not _readable(name, self.checkpoint.dtype(name)):
                    problems.append(f"{name} is stored as {self.checkpoint.dtype(name)}, which is not supported")
        problems += [f"unread {name} {list(self.checkpoint.shape(name))}" for name in sorted(self.names - read)]
        if problems:
            raise CheckpointError(f"{len(problems)} tensors do not fit config.json:\n  " + "\n  ".join(problems))

    def array(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
        """The parameter at `path`, in the dtype of the file (decoded experts: the trunk's)."""
        parts = [name for name, _ in self._parts(path, shape)]
        if "experts" not in path:
            value = self.checkpoint.read(parts[0])
            return value.reshape(-1)[: shape[0]] if path[-1] == "A_log" else value.reshape(shape)
        trunk = self.checkpoint.dtype(self._name("model.embed_tokens.weight"))
        packed_in_memory = path[-1] != "weight"
        stacked = np.empty(shape, np.uint8 if packed_in_memory or not parts[0].endswith(".weight") else self.checkpoint.dtype(parts[0]))
        if not packed_in_memory and stacked.dtype == np.uint8:
            stacked = np.empty(shape, trunk)
        names = iter(parts)
        for expert in stacked:
            name = next(names)
            if name.endswith(".weight_packed") and not packed_in_memory:
                scales = next(names)
                expert[...] = self._decoded(name, scales, stacked.dtype)
            else:
                expert[...] = self.checkpoint.read(name)
                if name.endswith(".weight_scale"):
                    mxfp4.check_scales(expert, name)
        return stacked

    def _decoded(self, packed: str, scales: str, dtype: np.dtype) -> np.ndarray:
        scale = self.checkpoint.read(scales)
        mxfp4.check_scales(scale, scales)
        return mxfp4.decode_numpy(self.checkpoint.read(packed), scale, dtype)


def _fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if name.endswith("self_attn.A_log"):  # one entry a head, perhaps padded at the end: [H], [128], [1, 1, H, 1]
        return math.prod(found) == max(found, default=1) >= wanted[0]
    if name.endswith("_conv1d.weight"):
        return found in (wanted, (wanted[0], wanted[2]))
    return found == wanted


def _readable(name: str, dtype: np.dtype) -> bool:
    if name.endswith((".weight_packed", ".weight_scale")):
        return dtype == np.uint8
    return dtype in (np.dtype(np.float32), jnp.dtype("bfloat16"))
