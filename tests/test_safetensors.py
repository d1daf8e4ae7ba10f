"""The reader against the library's writer, every malformed file written byte by byte, and its peak memory."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from k3jax.io import safetensors as reader
from k3jax.io.safetensors import Checkpoint, CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def write(path, header, data=b""):
    """A file of exactly this header (text or an object) and data."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    """Two shards of one tensor each and their index: {"a": one.safetensors, "b": two.safetensors}."""
    write(tmp_path / "one.safetensors", {"a": entry(0, 2)}, b"\1\2")
    write(tmp_path / "two.safetensors", {"b": entry(0, 3)}, b"\3\4\5")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def names_in(directory):
    with Checkpoint(directory) as checkpoint:
        return checkpoint.names


def refused(directory, *words):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_reads_what_the_library_writes(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {code: rng.integers(0, 2, (3, 5, 2)).astype(dtype) for code, dtype in DTYPES.items()}
    tensors |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 7), np.float32), "empty2": np.zeros((4, 0))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(str(tmp_path)) as checkpoint:
        assert set(checkpoint.names) == set(tensors)
        for name, value in tensors.items():
            assert checkpoint.shape(name) == value.shape and checkpoint.dtype(name) == value.dtype
            assert checkpoint.file_of(name) == tmp_path / "model.safetensors"
            np.testing.assert_array_equal(checkpoint.read(name), value)
            assert checkpoint.read(name).flags.writeable
    assert np.dtype(reader.DTYPES["BF16"]) == ml_dtypes.bfloat16 and reader.DTYPES.keys() == DTYPES.keys()


def test_reads_the_bits_of_nan_and_negative_zero(tmp_path):
    write(tmp_path / "model.safetensors", {"x": entry(0, 6, [3], "BF16")}, bytes.fromhex("c1ff00803f80"))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("x").tobytes() == bytes.fromhex("c1ff00803f80")


@pytest.fixture
def matrix(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
    others = {"before": np.ones(3, np.float64), "scalar": np.array(1, np.float32)}
    save_file(others | {"x": values}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        yield checkpoint, values


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5), slice(4, None), slice(6, 6), slice(None, 3, 1)])
def test_reads_rows(matrix, rows):
    checkpoint, values = matrix
    np.testing.assert_array_equal(checkpoint.read("x", rows=rows), values[rows])
    stack = np.full((3, *values[rows].shape), -1, np.float32)
    assert checkpoint.read("x", out=stack[1], rows=rows).base is stack
    np.testing.assert_array_equal(stack[1], values[rows])
    assert (stack[[0, 2]] == -1).all()


@pytest.mark.parametrize("rows", [slice(2, 7), slice(-2, None), slice(4, 2), slice(0, 4, 2), slice(None, None, -1)])
def test_refuses_rows_out_of_range(matrix, rows):
    with pytest.raises(CheckpointError, match=r"'x'.*0 <= start"):
        matrix[0].read("x", rows=rows)
    with pytest.raises(CheckpointError, match=r"'scalar'.*0 <= start"):
        matrix[0].read("scalar", rows=rows)


def read_only(shape):
    array = np.empty(shape, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("out", [
    np.empty((6, 4), np.float32), np.empty((6, 2, 2), np.int32), np.empty((6, 2, 4), np.float32)[:, :, ::2],
    np.empty((2, 2, 6), np.float32).T, read_only((6, 2, 2)),
])  # fmt: skip
def test_refuses_an_unfit_out(matrix, out):
    with pytest.raises(CheckpointError, match="'x'.*out is"):
        matrix[0].read("x", out=out)


def test_refuses_an_unknown_name_a_shrunk_file_and_a_closed_one(matrix):
    checkpoint, _ = matrix
    for call in (checkpoint.read, checkpoint.shape, checkpoint.dtype, checkpoint.file_of):
        with pytest.raises(CheckpointError, match="no tensor 'y'"):
            call("y")
    with open(checkpoint.file_of("x"), "r+b") as file:
        file.truncate(file.seek(0, 2) - 100)
    with pytest.raises(CheckpointError, match="bytes early"):
        checkpoint.read("x")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("x")


def test_names_follow_the_bytes(tmp_path):
    write(tmp_path / "model.safetensors", {"z": entry(4, 6), "m": entry(0, 4), "a": entry(4, 4)}, bytes(6))
    assert names_in(tmp_path) == ("m", "a", "z")


def test_reads_shards_by_index_and_leaves_other_files_alone(sharded):
    (sharded / "extra.safetensors").write_bytes(b"not listed")
    with Checkpoint(sharded) as checkpoint:
        assert checkpoint.names == ("a", "b") and checkpoint.file_of("b").name == "two.safetensors"
        assert checkpoint.read("b").tolist() == [3, 4, 5]


def test_reads_every_file_without_an_index_and_model_alone_if_there_is_one(sharded):
    (sharded / INDEX).unlink()
    assert names_in(sharded) == ("a", "b")
    write(sharded / "model.safetensors", {"c": entry(0, 0)})
    assert names_in(sharded) == ("c",)


def test_reads_linked_files_as_in_the_hub_cache(sharded):
    blobs, snapshot = sharded / "blobs", sharded / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("one.safetensors", "two.safetensors", INDEX)):
        (sharded / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    with Checkpoint(snapshot) as checkpoint:
        assert checkpoint.read("a").tolist() == [1, 2] and checkpoint.file_of("a").parent == snapshot


def raw(length, rest=b""):
    return struct.pack("<Q", length) + rest


FILES = {  # what is wrong: (bytes of the file, words of the error)
    "empty file": (b"", ["header of 0 bytes in a file of 0"]),
    "no length": (b"\2\0\0", ["in a file of 3"]),
    "header past the end": (raw(3, b"{}"), ["header of 3 bytes"]),
    "huge header": (raw(2**64 - 1, b"{}"), [f"header of {2**64 - 1} bytes", "100000000"]),
    "no header": (raw(0), ["not UTF-8 JSON"]),
    "not JSON": (raw(4, b"{a:}"), ["not UTF-8 JSON"]),
    "not UTF-8": (raw(4, b'"\xff"}'), ["not UTF-8 JSON"]),
    "deep JSON": (raw(200_000, b"[" * 200_000), ["not UTF-8 JSON"]),
    "a list": (raw(2, b"[]"), ["list, not an object"]),
    "trailing bytes": (raw(2, b"{}!"), ["11 bytes in the file", "end at 10"]),
}
TWICE = '{"x": %s, "x": %s}' % ((json.dumps(entry(0, 4)),) * 2)
HEADERS = {  # what is wrong: (header over 4 bytes of data, words of the error)
    "truncated data": ({"x": entry(0, 8)}, ["'x' at bytes 0 to 8", "free from 0, the data end at 4"]),
    "trailing data": ({"x": entry(0, 3)}, ["bytes in the file", "end at"]),
    "duplicate name": (TWICE, ["unique keys", "duplicate 'x'"]),
    "duplicate field": ('{"x": {"dtype": "U8", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}', ["'dtype'"]),
    "gap before": ({"x": entry(1, 4)}, ["'x' at bytes 1 to 4", "free from 0, the data end at 4"]),
    "gap between": ({"x": entry(0, 1), "y": entry(2, 4)}, ["'y' at bytes 2 to 4", "free from 1, the data end at 4"]),
    "overlap": ({"x": entry(0, 3), "y": entry(2, 4)}, ["'y' at bytes 2 to 4", "free from 3, the data end at 4"]),
    "same bytes": ({"x": entry(0, 4), "y": entry(0, 4)}, ["'y' at bytes 0 to 4", "free from 4, the data end at 4"]),
    "negative offset": ({"x": entry(-4, 0, [4])}, ["'x'", "-4"]),
    "backward": ({"x": entry(4, 0, [4])}, ["'x'", "4 to 0"]),
    "past the end": ({"x": entry(0, 4), "y": entry(4, 2**40)}, ["'y' at bytes 4 to", "free from 4, the data end at 4"]),
    "too few bytes": ({"x": entry(0, 4, [2], "F32")}, ["'x'", "F32[2]"]),
    "too many bytes": ({"x": entry(0, 4, [1], "F16")}, ["'x'", "F16[1]"]),
    "wrapping shape": ({"x": entry(0, 4, [4, 2**63 + 1])}, ["'x'", str(2**63 + 1)]),
    "wrapping empty shape": ({"x": entry(0, 4), "y": entry(4, 4, [0, 2**40, 2**40])}, ["'y'", "2^63"]),
    "too many axes": ({"x": entry(0, 4, [4] + [1] * 70)}, ["'x'", "32 axes"]),
    "negative size": ({"x": entry(0, 4, [-2, -2])}, ["'x'", "-2"]),
    "fractional size": ({"x": entry(0, 4, [4.0])}, ["'x'", "4.0"]),
    "boolean size": ({"x": entry(0, 4, [4, True])}, ["'x'", "True"]),
    "shape a number": ({"x": entry(0, 4, 4)}, ["'x'", "shape"]),
    "shape a string": ({"x": entry(0, 4, "4")}, ["'x'", "shape"]),
    "one offset": ({"x": {"dtype": "U8", "shape": [4], "data_offsets": [4]}}, ["'x'", "data_offsets"]),
    "offset NaN": ('{"x": {"dtype": "U8", "shape": [4], "data_offsets": [NaN, 4]}}', ["'x'", "nan"]),
    "no dtype": ({"x": {"shape": [4], "data_offsets": [0, 4]}}, ["'x'", "dtype"]),
    "unknown dtype": ({"x": entry(0, 4, [4], "F8_E8M0")}, ["'x'", "F8_E8M0", "BF16"]),
    "dtype a list": ({"x": entry(0, 4, [4], ["U8"])}, ["'x'", "dtype"]),
    "unknown field": ({"x": entry(0, 4) | {"strides": [1]}}, ["'x'", "strides"]),
    "entry a list": ({"x": [0, 4]}, ["'x'", "[0, 4]"]),
}


@pytest.mark.parametrize("data, words", FILES.values(), ids=FILES)
def test_refuses_a_malformed_file(tmp_path, data, words):
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, "model.safetensors", *words)


@pytest.mark.parametrize("header, words", HEADERS.values(), ids=HEADERS)
def test_refuses_a_malformed_header(tmp_path, header, words):
    write(tmp_path / "model.safetensors", header, bytes(4))
    refused(tmp_path, "model.safetensors", *words)


def test_refuses_a_header_over_the_limit(tmp_path, monkeypatch):
    write(tmp_path / "model.safetensors", "{}" + " " * 98)
    monkeypatch.setattr(reader, "MAX_HEADER", 100)
    assert names_in(tmp_path) == ()
    monkeypatch.setattr(reader, "MAX_HEADER", 99)
    refused(tmp_path, "header of 100 bytes", "at most 99")


def test_refuses_a_directory_without_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, str(tmp_path), "*.safetensors")
    refused(tmp_path / "absent", "absent", "*.safetensors")


def test_refuses_a_name_in_two_files(sharded):
    (sharded / INDEX).unlink()
    write(sharded / "three.safetensors", {"a": entry(0, 0)})
    refused(sharded, "three.safetensors", "'a'", "one.safetensors")


def test_refuses_a_file_that_is_no_file(sharded):
    (sharded / "two.safetensors").unlink()
    (sharded / "two.safetensors").symlink_to("absent")
    refused(sharded, "two.safetensors", "link")
    (sharded / "two.safetensors").unlink()
    (sharded / "two.safetensors").mkdir()
    refused(sharded, "two.safetensors", "regular")


@pytest.mark.parametrize("file", [
    "three.safetensors", "../one.safetensors", "./one.safetensors", "sub/one.safetensors", "..", ".", "", "one", None,
    1, ["one.safetensors"], INDEX, "/one.safetensors", "..\\one.safetensors", "one.safetensors\0",
])  # fmt: skip
def test_refuses_an_index_entry_that_is_no_file_beside_it(sharded, file):
    for directory in (sharded / "sub", sharded.parent):
        directory.mkdir(exist_ok=True)
        write(directory / "one.safetensors", {"a": entry(0, 2)}, b"\1\2")
    file = str(sharded / "one.safetensors") if file == "/one.safetensors" else file
    write_index(sharded, {"a": file, "b": "two.safetensors"})
    refused(sharded, INDEX, "'a'", repr(file), "beside the index")


@pytest.mark.parametrize("weight_map, words", [
    ({"a": "one.safetensors"} | {"b": "one.safetensors"}, ["'b'", "one.safetensors"]),
    ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, ["'c'", "two.safetensors"]),
    ({"a": "two.safetensors", "b": "one.safetensors"}, ["'a'", INDEX]),
    ({}, ["weight_map"]), (None, ["weight_map"]), ([["a", "one.safetensors"]], ["weight_map"]), ("one", ["weight_map"]),
])  # fmt: skip
def test_refuses_an_index_that_disagrees(sharded, weight_map, words):
    write_index(sharded, weight_map)
    refused(sharded, INDEX, *words)


def test_refuses_a_tensor_the_index_does_not_list(sharded):
    write(sharded / "two.safetensors", {"b": entry(0, 3), "d": entry(3, 4)}, bytes(4))
    refused(sharded, "two.safetensors", "'d'", INDEX)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {"a": "one.safetensors", "a": "two"}}'])
def test_refuses_a_malformed_index(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX)


def test_refuses_two_checkpoints_in_one_directory(sharded):
    write(sharded / "model.safetensors", {"a": entry(0, 2)}, b"\1\2")
    refused(sharded, "model.safetensors", INDEX)


# VmHWM, not ru_maxrss: the latter is inherited from the parent through exec, and a large parent would hide all growth.
LOAD = """
import sys
from k3jax.io.safetensors import Checkpoint

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

before = peak()
with Checkpoint(sys.argv[1]) as checkpoint:
    tensors = [checkpoint.read(name) for name in checkpoint.names]
print((peak() - before) / sum(tensor.nbytes for tensor in tensors))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory from /proc")
def test_loading_peaks_at_the_bytes_loaded(tmp_path):
    for shard in range(3):  # 3 x 4 x 25 MiB
        tensors = {f"{shard}.{name}": np.full((25, 1 << 19), shard, ml_dtypes.bfloat16) for name in "abcd"}
        save_file(tensors, tmp_path / f"{shard}.safetensors")
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    ratio = float(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert 0.95 < ratio < 1.3  # under 1 the measure itself would be wrong
