"""A strict, streaming reader of a directory of safetensors files.

A file is an 8-byte little-endian length N, N bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the tensors'
bytes, row-major and back to back (github.com/huggingface/safetensors, "Format"). All headers are checked at opening.

Tensors come by plain file reads into their destination, never through a map of the file, as in the safetensors library:
mapped pages count as resident, and 0.33 GB read from open shards peak at 2.0 times their size there, at 1.0 here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

KINDS = dict(BOOL="?", I8="i1", U8="u1", I16="<i2", U16="<u2", I32="<i4", U32="<u4", I64="<i8", U64="<u8")
KINDS |= dict(F16="<f2", F32="<f4", F64="<f8", BF16=ml_dtypes.bfloat16)
KINDS |= dict(F8_E4M3=ml_dtypes.float8_e4m3fn, F8_E5M2=ml_dtypes.float8_e5m2)
DTYPES = {code: np.dtype(kind) for code, kind in KINDS.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK = 1 << 20  # bytes of scratch where a read must hold more than it gives, and of a cache's unit
MAX_HEADER = 100_000_000  # bytes, the format's own limit; a K3 shard of 17 GB has about 1 MB


class CheckpointError(ValueError):
    """A checkpoint that is not what it says it is; names the file, the tensor and what is allowed."""


class Tensor(NamedTuple):
    path: Path
    file: BinaryIO
    offset: int  # bytes from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]


class Checkpoint(contextlib.AbstractContextManager):
    """The tensors of the index's shards or, without an index, of `model.safetensors`, or else of every `*.safetensors`.

    `names` are in the order of the bytes on disk, file by file. Reads may come from several threads at once.
    cache: a directory that keeps what is read, see Cache.
    Raises CheckpointError, at opening, for anything malformed, for an index that disagrees with its shards, and for
    a `model.safetensors` that the index beside it leaves out: nothing says which of the two is meant.
    """

    def __init__(self, directory: str | os.PathLike, cache: str | os.PathLike | None = None):
        self.directory = Path(directory)
        self._tensors: dict[str, Tensor] = {}
        files, index = _layout(self.directory)
        with contextlib.ExitStack() as stack:
            for file in files:
                for name, tensor in _read_header(self.directory / file, stack).items():
                    first = self._tensors.setdefault(name, tensor)
                    if first is not tensor:
                        raise CheckpointError(f"{tensor.path}: tensor {name!r} is in {first.path.name} too")
            found = {name: tensor.path.name for name, tensor in self._tensors.items()}
            for name, file in sorted(index.items() ^ found.items()) if index else ():
                raise CheckpointError(f"{self.directory / file}: tensor {name!r} is in {INDEX} or here, not both")
            opened = {tensor.path.name: tensor.file for tensor in self._tensors.values()}
            self._cache = None if cache is None else Cache(cache, opened, stack)
            self.close = stack.pop_all().close
        self.names = tuple(self._tensors)

    def __exit__(self, *_: object) -> None:
        self.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensor(name).dtype

    def file_of(self, name: str) -> Path:
        return self._tensor(name).path

    def read(
        self, name: str, out: np.ndarray | None = None, rows: slice | None = None, columns: slice | None = None
    ) -> np.ndarray:
        """The tensor, or `start:stop` of its first axis (rows) and of its last (columns); in `out`, of that shape and dtype.

        Some of the columns come by whole rows, BLOCK bytes or a row at a time, of which the rest is dropped.
        CheckpointError unless `0 <= start <= stop <= shape[axis]` without a step, for columns of a vector, for an `out` that
        is not writable and C-contiguous, and for a file that has shrunk since. ValueError after close().
        """
        tensor = self._tensor(name)
        where = f"{tensor.path}: tensor {name!r} of {tensor.dtype}{list(tensor.shape)}"
        first, last = _range(rows, tensor.shape, 0, where)
        left, right = (0, -1) if columns is None else _range(columns, tensor.shape, len(tensor.shape) - 1, where)
        if columns is not None and len(tensor.shape) < 2:
            raise CheckpointError(f"{where} has no columns {columns}: a matrix has")
        whole = columns is None or (left, right) == (0, tensor.shape[-1])
        shape = tensor.shape if rows is None else (last - first, *tensor.shape[1:])
        shape = shape if whole else (*shape[:-1], right - left)
        if out is None:
            out = np.empty(shape, tensor.dtype)
        if (out.shape, out.dtype) != (shape, tensor.dtype) or not (out.flags.c_contiguous and out.flags.writeable):
            raise CheckpointError(f"{where}: out is {out.dtype}{list(out.shape)}, not {list(shape)} and contiguous")
        row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        if whole:
            self._fill(out, tensor, first * row, where)
            return out
        step = max(1, BLOCK // max(1, row))
        scratch = np.empty((min(step, last - first), *tensor.shape[1:]), tensor.dtype)
        for start in range(first, last, step):
            block = scratch[: min(step, last - start)]
            self._fill(block, tensor, start * row, where)
            out[start - first : start - first + len(block)] = block[..., left:right]
        return out

    def _fill(self, out: np.ndarray, tensor: Tensor, start: int, where: str) -> None:
        """The tensor's bytes from `start` on, as many as `out` has."""
        rest, offset = memoryview(out.reshape(-1).view(np.uint8).data), tensor.offset + start
        while rest:  # one call moves 2 GiB at most
            if self._cache is None:
                moved = os.preadv(tensor.file.fileno(), [rest], offset)
            else:
                moved = self._cache.read(tensor.path.name, rest, offset)
            if moved == 0:
                raise CheckpointError(f"{where}: the file ends {len(rest)} bytes early")
            rest, offset = rest[moved:], offset + moved

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory}: no tensor {name!r} among its {len(self._tensors)}")
        return self._tensors[name]


class Cache:
    """What was read of some files, in a directory on a faster disk: for checkpoints that lie across a network.

    Each file has two here: `NAME.bytes`, the file with holes where nothing was read yet; and `NAME.sums`, 8 bytes for each
    BLOCK of it, 2^32 + CRC-32, or 0 for a hole. A sum is written after its block, so that an interrupted load
    goes on where it was, under whatever mesh, dtype or number of processes. The first use of a block in a process checks
    its sum; one that is torn or changed is read from the source again. Threads and processes may share a cache.

    `source.json` says which files these are, by size and time of change. CheckpointError if they are others, or if the
    directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike, sources: dict[str, BinaryIO], stack: contextlib.ExitStack):
        """`sources` are open, by name; what is opened here closes with the stack."""
        self.directory, self._sources = Path(directory), sources
        self._locks = [threading.Lock() for _ in range(64)]  # by block: two threads do not fetch one twice
        self._good: set[tuple[str, int]] = set()  # blocks whose sum was right
        stats = {name: os.fstat(file.fileno()) for name, file in sources.items()}
        self._sizes = {name: stat.st_size for name, stat in stats.items()}
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._claim({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})
            self._bytes, self._sums = (
                {name: self._open(f"{name}.{kind}", stack) for name in sources} for kind in ("bytes", "sums")
            )

    def _open(self, name: str, stack: contextlib.ExitStack) -> int:
        """The descriptor of a file of this cache, made if need be."""
        path = self.directory / name
        path.touch()
        return stack.enter_context(path.open("r+b", buffering=0)).fileno()

    def read(self, name: str, out: memoryview, offset: int) -> int:
        """Like os.preadv, of the file of this name."""
        end = min(offset + len(out), self._sizes[name])
        for block in range(offset // BLOCK, -(-end // BLOCK)):
            with self._locks[hash((name, block)) % len(self._locks)]:
                if (name, block) not in self._good:
                    self._fetch(name, block)
        return os.preadv(self._bytes[name], [out], offset)

    def _fetch(self, name: str, block: int) -> None:
        """Have a block here whose sum is right."""
        start = block * BLOCK
        size = min(BLOCK, self._sizes[name] - start)
        kept, sums = self._bytes[name], self._sums[name]
        if (had := os.pread(sums, 8, 8 * block)) == bytes(8) or had != _sum(os.pread(kept, size, start)):
            data = os.pread(self._sources[name].fileno(), size, start)
            if len(data) < size:
                raise CheckpointError(f"{self._sources[name].name}: the file ends {size - len(data)} bytes early")
            with self._writing():
                if os.pwrite(kept, data, start) < size:
                    raise OSError("the disk took a part of a block")
                os.pwrite(sums, _sum(data), 8 * block)
        self._good.add((name, block))

    def _claim(self, identity: dict[str, list[int]]) -> None:
        """Say of which files this is a cache, or find that it is one of these."""
        path = self.directory / "source.json"
        if not path.exists():
            mine = self.directory / f".source-{os.getpid()}"
            mine.write_text(json.dumps(identity, indent=1))
            mine.replace(path)  # whole, also for a process that looks at this moment
        if (found := _json_object(path.read_bytes(), path)) != identity:
            name = next(name for name in sorted({*found, *identity}) if found.get(name) != identity.get(name))
            allowed = "a new directory, or that of the same files, unchanged"
            raise CheckpointError(f"cache={str(self.directory)!r} keeps another {name}: allowed is {allowed}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cache={str(self.directory)!r} cannot be written: {error}") from error


def _sum(data: bytes) -> bytes:
    return (2**32 + zlib.crc32(data)).to_bytes(8, "little")


def _range(part: slice | None, shape: tuple[int, ...], axis: int, where: str) -> tuple[int, int]:
    """Start and stop of a part of an axis; None is all of it."""
    size = shape[axis] if shape else -1
    if part is None:
        return 0, size
    start, stop = part.start or 0, size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise CheckpointError(f"{where} has no {part}: 0 <= start <= stop <= shape[{axis}], no step")
    return start, stop


def _layout(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files to read and the index's `{tensor: file}`. An index names files beside it and no paths; such a file may
    be a link that leaves the directory, as in the hub cache (`../../blobs`)."""
    present = {path.name for path in directory.glob("*.safetensors*")}
    files = {name for name in present if name.endswith(".safetensors")}
    if INDEX in present:
        path = directory / INDEX
        index = _json_object(path.read_bytes(), path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{path}: weight_map is {index!r}, not an object of tensor: file")
        for name, file in index.items():
            if not isinstance(file, str) or file not in files:
                raise CheckpointError(f"{path}: tensor {name!r} in {file!r}, not a *.safetensors file beside the index")
        if SINGLE in files - set(index.values()):
            raise CheckpointError(f"{directory / SINGLE}: not in {INDEX}; keep one of the two")
        return sorted(set(index.values())), index
    if not files:
        raise CheckpointError(f"{directory}: no {SINGLE}, {INDEX} or *.safetensors")
    return [SINGLE] if SINGLE in files else sorted(files), None


def _read_header(path: Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """The file's tensors in the order of their bytes, which leave no gap and end where the file ends."""
    if not path.is_file():
        raise CheckpointError(f"{path}: not a regular file, or a link to none")
    file = stack.enter_context(path.open("rb"))
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER):
        raise CheckpointError(f"{path}: a header of {length} bytes in a file of {size}; at most {MAX_HEADER}")
    header = _json_object(file.read(length), path)
    header.pop("__metadata__", None)
    spans = {name: _span(entry, f"{path}: tensor {name!r}") for name, entry in header.items()}
    tensors, start, end = {}, 8 + length, 0
    for name, (begin, stop, dtype, shape) in sorted(spans.items(), key=lambda item: item[1][:2]):
        if begin != end or stop > size - start:
            allowed = f"free from {end}, the data end at {size - start}"
            raise CheckpointError(f"{path}: tensor {name!r} at bytes {begin} to {stop}; {allowed}")
        tensors[name], end = Tensor(path, file, start + begin, dtype, shape), stop
    if start + end != size:
        raise CheckpointError(f"{path}: {size} bytes in the file, and its tensors end at {start + end}")
    return tensors


def _span(entry: Any, where: str) -> tuple[int, int, np.dtype, tuple[int, ...]]:
    """Begin, end, dtype and shape of one header entry; begin and end in bytes after the header."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end], **other} if not other:
            known = code in DTYPES and all(type(value) is int and value >= 0 for value in (*shape, begin, end))
        case _:
            code, shape, begin, end, known = "", [], 0, 0, False
    if not known:
        raise CheckpointError(f"{where} is {entry!r}, not a dtype of {', '.join(DTYPES)}, a shape and data_offsets")
    dtype = DTYPES[code]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where} of {code}{shape}: not as many bytes as from {begin} to {end}")
    if len(shape) > 32 or math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{where}: shape {shape} is beyond NumPy's 32 axes and 2^63 bytes, even if empty")
    return begin, end, dtype, tuple(shape)


def _json_object(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not UTF-8 JSON with unique keys: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON {type(value).__name__}, not an object")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ, for `json.loads`; of two alike the last would win in silence."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"duplicate {Counter(key for key, _ in pairs).most_common(1)[0][0]!r}")
    return dict(pairs)
