"""Released checkpoints in: a Hugging Face directory to a model, tensor by tensor.

Attribute paths of the modules are the released names, so the mapping below is short: experts are stacked, A_log drops
its padding, a convolution may lack its axis of one. Everything is checked before the first tensor is read.

A process reads what its own devices hold, and what several of them hold once. Parameters go by bands, the parts that
share their experts and rows: of a row, each part takes its columns. A few threads read, a block at a time, into the memory
that a CPU device then uses as it is, so that the peak is the size of the process's share.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from k3jax import sharding
from k3jax.config import ConfigError, K3Config, require
from k3jax.io.safetensors import BLOCK, Checkpoint, CheckpointError, unique
from k3jax.model import K3
from k3jax.ops import mxfp4

Shape = tuple[int, ...]
Tensor = tuple[str, Shape]
Parameters = dict[str, nnx.Param]  # by attribute path, with dots

PREFIX = "language_model."
_DTYPES = ("bfloat16", "float32")
_MXFP4 = (".weight_packed", ".weight_scale")
_BESIDE = ("tiktoken.model", "tokenizer_config.json", "generation_config.json", "chat_template*")
_LISTED = 20  # problems that an error spells out
SHOW_PROGRESS = 1 << 30  # bytes from which loading draws a bar
READERS = 8  # threads of a process that read
AHEAD = 1 << 30  # bytes of host memory that bands being read may take; two may always
_ALIGNMENT = 64  # bytes: NumPy memory that starts at a multiple becomes a CPU array without a copy


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, its configuration, and the names of the tensors that were left unread by rule."""

    model: K3
    config: K3Config
    ignored: tuple[str, ...] = ()


def read_config(directory: str | Path) -> K3Config:
    """The architecture in `config.json`. Raises ConfigError."""
    return K3Config.from_hf(read_json(Path(directory) / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model directory needs a config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON with unique keys ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, allowed is an object")
    return value


def load(
    directory: str | Path,
    *,
    dtype: str | None = None,
    packed: bool = False,
    mesh: Mesh | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Loaded:
    """Read a released directory, onto the default device or onto a mesh, of which each process reads its own devices' parts.

    dtype: "bfloat16" or "float32" for the trunk and the experts; None keeps every tensor as stored. Parameters that the
    architecture keeps in float32 are never narrowed. packed: keep MXFP4 experts packed in memory. cache: a directory on
    a faster disk that keeps the bytes read, so that the next load, or one that was interrupted, has them from there.
    Raises ConfigError and CheckpointError, which lists tensors that are missing, misshapen, of a wrong dtype or unread.
    """
    check_dtype(dtype)
    config = read_config(directory)
    with Checkpoint(directory, cache) as checkpoint:
        source = _Source(checkpoint, config)
        config = source.with_ranks(config)
        if packed and not any(name.endswith(_MXFP4) for name in source.names):
            raise CheckpointError(
                f"{directory}: packed experts are asked for, but this checkpoint holds no MXFP4 tensors"
            )
        model = K3.abstract(config, dtype=dtype or config.dtype, packed=packed)
        parameters = parameters_of(model)
        source.check(parameters)
        _read(source, parameters, dtype, mesh)
    model.absorb()
    return Loaded(sharding.placed(model, mesh, sharding.of_model(model)), config, source.ignored)


def holds_mxfp4(directory: str | Path) -> bool:
    """Whether a released directory has packed experts."""
    with Checkpoint(directory) as checkpoint:
        return any(name.endswith(_MXFP4) for name in checkpoint.names)


def files_beside(source: str | os.PathLike[str] | None) -> list[Path]:
    """A directory's tokenizer, chat template and generation defaults: what a copy of its model needs. Never code."""
    if source is None:
        return []
    require(Path(source).is_dir(), "source", str(source), "a model's directory")
    found = (file for pattern in _BESIDE for file in sorted(Path(source).glob(pattern)))
    return [file for file in found if file.is_file() and file.suffix != ".py"]


def released_tensors(config: K3Config) -> dict[str, tuple[Shape, np.dtype]]:
    """Names, shapes and dtypes of the released directory of an architecture, vision aside.

    With depth mixing as K3 is released: prefix, packed experts, A_log padded to a multiple of 128. Without as
    Kimi-Linear is: plain experts, A_log of rank 4, and nothing but A_log and dt_bias in float32.
    """
    k3, table = config.attn_res_block_size is not None, {}
    for path, parameter in parameters_of(K3.abstract(config, dtype=config.dtype)).items():
        in_float32 = parameter.dtype == np.float32 and (k3 or path.endswith(("A_log", "dt_bias")))
        for name, shape in itertools.chain(*matrices_of(PREFIX * k3 + path, parameter.shape, lambda weight: k3)):
            if path.endswith("A_log"):
                shape = (-(-shape[0] // 128) * 128,) if k3 else (1, 1, *shape, 1)
            dtype = "uint8" if name.endswith(_MXFP4) else "float32" if in_float32 else config.dtype
            table[name] = shape, jnp.dtype(dtype)
    return table


def parameters_of(model: K3) -> Parameters:
    """The parameters by attribute path: what they are set to, the model holds."""
    return {".".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}


def check_dtype(dtype: str | None) -> None:
    """ConfigError unless a model can be asked for in `dtype`."""
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"dtype={dtype!r}: allowed are {', '.join(map(repr, _DTYPES))} or None (as stored)")


def held_dtype(stored: np.dtype, declared: np.dtype, asked: str | None) -> np.dtype:
    """The dtype in memory of a parameter stored and declared so, where the model is asked for in `asked`."""
    keeps_float32 = declared == np.float32 and asked != "float32"  # such a parameter stays what the file holds
    return stored if asked is None or stored == np.uint8 or keeps_float32 else jnp.dtype(asked)


def matrices_of(name: str, shape: Shape, is_packed: Callable[[str], bool]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors that make a parameter: one; for experts one each, or codes and scales where `.weight` is packed."""
    if ".experts." not in name:
        yield ((name, shape),)
        return
    layer, matrix = name.split(".experts.")
    experts, out, in_ = shape
    for expert in range(experts):
        weight = f"{layer}.experts.{expert}.{matrix}"
        if is_packed(weight):
            yield (f"{weight}_packed", (out, in_ // 2)), (f"{weight}_scale", (out, in_ // mxfp4.GROUP))
        else:
            yield ((weight, (out, in_)),)


class _Band(NamedTuple):
    """The parts of a parameter that share their experts and rows; of a row, each has its columns.

    The parameter is seen as [experts, rows, columns]: without experts it is a stack of one, and a vector is a column.
    """

    path: str
    experts: range
    rows: range
    devices: dict[range, list[Any]]  # by columns: who holds them
    whole: Shape  # of the parameter
    part: Shape  # of what one device holds
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return len(self.devices) * math.prod(self.part) * self.dtype.itemsize


class _Read(NamedTuple):
    """Rows of one tensor, or of codes and their scales, and the memory of each part's columns of them."""

    names: tuple[str, ...]
    rows: range
    out: list[tuple[range, np.ndarray]]


def _bands(path: str, shape: Shape, dtype: np.dtype, where: NamedSharding | None) -> list[_Band]:
    """What this process's devices hold of a parameter, each distinct part once; all of it without `where`."""
    whole = (slice(None),) * len(shape)
    boxes = {None: whole} if where is None else where.addressable_devices_indices_map(shape)
    bands: dict[tuple[range, range], _Band] = {}
    for device, box in boxes.items():
        axes = [range(size)[part] for size, part in zip(shape, box or whole, strict=True)]
        one, column = [] if ".experts." in path else [range(1)], [range(1)] if len(shape) == 1 else []
        experts, rows, *_, columns = *one, *axes, *column
        band = _Band(path, experts, rows, {}, shape, tuple(map(len, axes)), dtype)
        bands.setdefault((experts, rows), band).devices.setdefault(columns, []).append(device)
    return [*bands.values()]


def _read(source: _Source, parameters: Parameters, asked: str | None, mesh: Mesh | None) -> None:
    """Set the parameters, on the default device or on a mesh."""
    dtypes = {path: source.held_dtype(path, p, asked) for path, p in parameters.items()}
    specs = {path: sharding.spec(p.axes) for path, p in parameters.items()}
    where = {path: None if mesh is None else NamedSharding(mesh, spec) for path, spec in specs.items()}
    bands = [band for path, p in parameters.items() for band in _bands(path, p.shape, dtypes[path], where[path])]
    arrays = _arrays(source, bands)
    for path, p in parameters.items():
        held, place = arrays.get(path, []), where[path]
        if place is None:
            p.set_value(held[0])
        else:
            p.set_value(jax.make_array_from_single_device_arrays(p.shape, place, held, dtype=dtypes[path]))


def _arrays(source: _Source, bands: list[_Band]) -> dict[str, list[jax.Array]]:
    """By path, an array for every device that holds a part."""
    total = sum(band.nbytes for band in bands)
    columns = *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()
    quiet = total < SHOW_PROGRESS or jax.process_index() > 0
    bar = Progress(*columns, disable=quiet, transient=True, console=Console(stderr=True))
    task = bar.add_task("loading", total=total)
    arrays: dict[str, list[jax.Array]] = {}
    pending: deque[tuple[_Band, dict[range, np.ndarray], list[Future[int]]]] = deque()

    def finish() -> None:
        """Wait for the band that was begun first, and hand it to its devices."""
        band, memory, reads = pending.popleft()
        for read in reads:
            bar.advance(task, read.result())
        put = [
            jax.device_put(memory[columns].reshape(band.part), device)
            for columns, devices in band.devices.items()
            for device in devices
        ]
        arrays.setdefault(band.path, []).extend(jax.block_until_ready(put))  # host memory that was copied is free now

    pool = ThreadPoolExecutor(READERS, "k3jax-load")
    with bar:
        try:
            for band in bands:
                while len(pending) > 1 and band.nbytes + sum(begun.nbytes for begun, *_ in pending) > AHEAD:
                    finish()
                memory = {columns: _aligned(band, columns) for columns in band.devices}
                pending.append((band, memory, [pool.submit(source.read, read) for read in source.reads(band, memory)]))
            while pending:
                finish()
        finally:  # after an error or an interrupt no read begins any more
            pool.shutdown(cancel_futures=True)
    return arrays


class _Source:
    """The tensors of one checkpoint, for the parameters of one model."""

    def __init__(self, checkpoint: Checkpoint, config: K3Config) -> None:
        self.checkpoint, names = checkpoint, checkpoint.names
        self.prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
        self.ignored = tuple(sorted(name for name in names if self._ignored(name, config.num_hidden_layers)))
        self.names = {*names} - {*self.ignored}
        self._matrices = functools.lru_cache(maxsize=1)(self._matrices_of)  # one band of a parameter follows another

    def _ignored(self, name: str, layers: int) -> bool:
        """The vision tower and its projector, and layers past the count (a multi-token-prediction head)."""
        layer = re.match(rf"{re.escape(self.prefix)}model\.layers\.(\d+)\.", name)
        return name.startswith(("vision_tower.", "mm_projector.")) or (layer is not None and int(layer[1]) >= layers)

    def with_ranks(self, config: K3Config) -> K3Config:
        """The ranks of the decay and gate projections, which only the tensors' shapes tell."""
        found = {}
        for field, projection in (("kda_decay_rank", "f_a_proj"), ("kda_gate_rank", "g_a_proj")):
            name = f"{self.prefix}model.layers.{min(config.kda_layers, default=0)}.self_attn.{projection}.weight"
            if name in self.names and (rank := math.prod(self.checkpoint.shape(name)[:1])) != config.kda_head_dim:
                found[field] = rank
        return dataclasses.replace(config, **found)

    def _matrices_of(self, path: str, shape: Shape) -> list[tuple[Tensor, ...]]:
        return list(matrices_of(self.prefix + path, shape, self._is_packed))

    def _is_packed(self, weight: str) -> bool:
        return weight not in self.names and not self.names.isdisjoint((f"{weight}_packed", f"{weight}_scale"))

    def check(self, parameters: Parameters) -> None:
        """Raise one CheckpointError for all tensors that are missing, unfit or left over."""
        wanted = dict(t for path, p in parameters.items() for tensors in self._matrices(path, p.shape) for t in tensors)
        problems = [problem for tensor in wanted.items() if (problem := self._problem(*tensor))]
        problems += [f"unread {name} {list(self.checkpoint.shape(name))}" for name in sorted(self.names - set(wanted))]
        if problems:
            more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
            heading = f"{self.checkpoint.directory}: tensors that do not fit config.json ({len(problems)}):"
            raise CheckpointError("\n  ".join([heading, *problems[:_LISTED], *more]))

    def _problem(self, name: str, wanted: Shape) -> str | None:
        if name not in self.names:
            return f"missing {name} {list(wanted)}"
        shape, dtype = self.checkpoint.shape(name), self.checkpoint.dtype(name)
        if not _fits(name, shape, wanted):
            return f"misshapen {name} {list(shape)}, allowed is {list(wanted)}"
        if name.endswith("_packed") and wanted[-1] % (mxfp4.GROUP // 2):
            return f"{name} packs {2 * wanted[-1]} inputs, allowed is a multiple of {mxfp4.GROUP}"
        allowed = ("uint8",) if name.endswith(_MXFP4) else _DTYPES
        return None if dtype.name in allowed else f"{name} is stored as {dtype}, allowed is {' or '.join(allowed)}"

    def held_dtype(self, path: str, parameter: nnx.Param, asked: str | None) -> np.dtype:
        """Of a parameter in memory: what is decoded takes the trunk's, and a stack its experts' widest."""
        trunk = f"{self.prefix}model.embed_tokens.weight"
        matrices = self._matrices(path, parameter.shape)
        dtypes = {self.checkpoint.dtype(tensors[0][0] if len(tensors) == 1 else trunk) for tensors in matrices}
        return held_dtype(max(dtypes, key=lambda dtype: dtype.itemsize), parameter.dtype, asked)

    def reads(self, band: _Band, memory: dict[range, np.ndarray]) -> Iterator[_Read]:
        """What fills the memory of a band, BLOCK bytes of a tensor or a row of it at a time."""
        matrices = self._matrices(band.path, band.whole)
        for i, expert in enumerate(band.experts):
            names = tuple(name for name, _ in matrices[expert])
            row = math.prod(self.checkpoint.shape(names[0])[1:]) * self.checkpoint.dtype(names[0]).itemsize
            step = max(1, BLOCK // row)
            for start in range(0, len(band.rows), step):
                here = i, slice(start, start + step)
                yield _Read(names, band.rows[here[1]], [(columns, part[here]) for columns, part in memory.items()])

    def read(self, read: _Read) -> int:
        """Fill its memory; the bytes of that."""
        (name, *scales), rows = read.names, slice(read.rows.start, read.rows.stop)
        shape, dtype, memory = self.checkpoint.shape(name), self.checkpoint.dtype(name), read.out[0][1]
        first, last = min(columns.start for columns, _ in read.out), max(columns.stop for columns, _ in read.out)
        if name.endswith("A_log") and len(shape) > 1:  # [1, 1, H, 1]
            block = self._tensor(name).reshape(-1, 1)[rows]
        elif scales:  # whole groups of columns, of which the parts may want less
            first, last = first - first % mxfp4.GROUP, last + -last % mxfp4.GROUP
            codes = self._tensor(name, None, rows, slice(first // 2, last // 2))
            factors = self._tensor(scales[0], None, rows, slice(first // mxfp4.GROUP, last // mxfp4.GROUP))
            block = mxfp4.decode_numpy(codes, factors, memory.dtype)
        else:
            columns = slice(first, last) if len(shape) > 1 else None
            if len(read.out) == 1 and memory.dtype == dtype:
                out = memory.reshape((len(memory), *shape[1:-1], *memory.shape[1:])[: len(shape)])
                self._tensor(name, out, rows, columns)
                return memory.nbytes
            block = self._tensor(name, None, rows, columns).reshape(len(memory), -1)
        for columns, memory in read.out:
            memory[...] = block[:, columns.start - first : columns.stop - first]
        return sum(memory.nbytes for _, memory in read.out)

    def _tensor(
        self, name: str, out: np.ndarray | None = None, rows: slice | None = None, columns: slice | None = None
    ) -> np.ndarray:
        value = self.checkpoint.read(name, out, rows, columns)
        if name.endswith("_scale") and (value == mxfp4.NAN).any():
            raise CheckpointError(f"{self.checkpoint.file_of(name)}: {name} holds scale byte {mxfp4.NAN} (NaN)")
        return value


def _fits(name: str, found: Shape, wanted: Shape) -> bool:
    if name.endswith(".A_log"):  # one entry a head, perhaps padded at the end: [H], [128], [1, 1, H, 1]
        return math.prod(found) == max(found, default=1) >= wanted[0]
    if name.endswith("_conv1d.weight"):  # [C, 1, W] or [C, W]
        return found in (wanted, (wanted[0], wanted[2]))
    return found == wanted


def _aligned(band: _Band, columns: range) -> np.ndarray:
    """Memory for a part of a band, [experts, rows, columns]."""
    shape = len(band.experts), len(band.rows), len(columns)
    size = math.prod(shape) * band.dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(band.dtype).reshape(shape)
