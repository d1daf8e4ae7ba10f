"""Loading onto meshes: the same bits as on one device, no byte twice, in little memory, over again after an interrupt."""

import importlib.util
import itertools
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import same_bits
from jax.sharding import NamedSharding

import k3jax
from k3jax import sharding
from k3jax.config import ConfigError, K3Config
from k3jax.io import hf, orbax
from k3jax.io import safetensors as reader
from k3jax.io.safetensors import Checkpoint, CheckpointError

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

spec = importlib.util.spec_from_file_location("full_shape", ROOT / "scripts" / "full_shape.py")
full_shape = importlib.util.module_from_spec(spec)
spec.loader.exec_module(full_shape)

# Four layers of k3-tiny's widths, MLA in the last: all that eight ranks can share, experts in MXFP4.
CONFIG = full_shape.smaller(K3Config.tiny(), layers=4, experts=8, vocab=64)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A released directory of that in several files."""
    directory = tmp_path_factory.mktemp("full") / "eight"
    full_shape.write(directory, CONFIG, seed=3, shard_bytes=300_000)
    return directory


@pytest.fixture(scope="module")
def whole():
    """Directories as one device holds them: parameters by path, loaded once."""
    kept = {}

    def load(directory, packed):
        if (directory, packed) not in kept:
            kept[directory, packed] = hf.load(directory, packed=packed).model
        return kept[directory, packed]

    return load


@pytest.fixture
def moved(monkeypatch):
    """Bytes that every checkpoint reads from its files, by tensor."""
    found = {}
    fill = Checkpoint._fill

    def count(self, out, tensor, start, where):
        name = re.search("tensor '([^']*)'", where)[1]
        found[name] = found.get(name, 0) + out.nbytes
        fill(self, out, tensor, start, where)

    monkeypatch.setattr(Checkpoint, "_fill", count)
    return found


def assert_same(model, want, mesh):
    """Every array, absorbed ones too, bit for bit and where the mesh wants it; every device's part is its own."""
    leaves, others, specs = map(jax.tree.leaves, (model, want, sharding.of_model(model)))
    for got, one, partition in zip(leaves, others, specs, strict=True):
        where = NamedSharding(mesh, partition)
        assert got.sharding.is_equivalent_to(where, got.ndim) and got.committed
        assert same_bits(got, one)
        assert all(same_bits(shard.data, np.asarray(one)[shard.index]) for shard in got.addressable_shards)


# On meshes.

MESHES = {  # of (tp, ep): ranks, and those over which whole experts are divided
    ROOT / "checkpoints" / "k3-tiny": [(2, 2), (8, 4), (8, 8)],
    GOLDEN / "k3_mxfp4": [(2, 2), (4, 4)],
    GOLDEN / "k3_mxfp4_wide": [(2, 1), (4, 2), (4, 4)],
    "eight": [(2, 2), (8, 4), (8, 1)],
}
CASES = [
    pytest.param(
        directory,
        packed,
        *ranks,
        id=f"{Path(directory).name}-{'packed' if packed else 'decoded'}-{ranks}",
        marks=pytest.mark.slow if "tiny" in str(directory) and ranks != (8, 4) else (),
    )
    for directory, meshes in MESHES.items()
    for packed in (False, True)
    for ranks in meshes
    if not (packed and "tiny" in str(directory))
]


@pytest.mark.parametrize("directory, packed, tp, ep", CASES)
def test_meshes_hold_what_one_device_does(eight, whole, moved, directory, packed, tp, ep):
    """And each tensor is read once, whoever holds it: B69, B89."""
    directory = eight if directory == "eight" else directory
    mesh = k3jax.make_mesh(tp=tp, ep=ep)
    want = whole(directory, packed)
    moved.clear()
    model = hf.load(directory, packed=packed, mesh=mesh).model
    assert_same(model, want, mesh)
    with Checkpoint(directory) as checkpoint:
        entry = {name: checkpoint.dtype(name).itemsize for name in checkpoint.names}
        sizes = {name: math.prod(checkpoint.shape(name)) * entry[name] for name in entry}
    heads = model.config.kda_num_heads
    sizes = {name: heads * entry[name] if name.endswith("A_log") else size for name, size in sizes.items()}
    assert moved == sizes


@pytest.mark.parametrize("directory, packed, tp, ep", [
    (GOLDEN / "k3_mxfp4_wide", False, 4, 1), (GOLDEN / "k3_mxfp4_wide", True, 4, 2), ("eight", True, 8, 4), ("eight", False, 8, 8),
])  # fmt: skip
def test_a_process_reads_for_its_own_devices(eight, whole, moved, directory, packed, tp, ep):
    """As if one or two of the mesh's devices were its own: its parts come, by rows of which it has some columns.

    Of four ranks of 64 columns one has 16, half of those that share a scale.
    """
    directory = eight if directory == "eight" else directory
    mesh, want = k3jax.make_mesh(tp=tp, ep=ep), hf.parameters_of(whole(directory, packed))
    with Checkpoint(directory) as checkpoint:
        source = hf._Source(checkpoint, hf.read_config(directory))
        for own, (path, p) in itertools.product((mesh.devices.flat[1:2], mesh.devices.flat[2:4]), want.items()):
            where = NamedSharding(mesh, sharding.spec(p.axes))
            moved.clear()
            arrays = hf._arrays(source, [*bands_of(own, hf._bands(path, p.shape, p.dtype, where))])[path]
            boxes = {device: where.devices_indices_map(p.shape)[device] for device in own}
            assert len(arrays) == len(own)
            for device, box in boxes.items():
                [array] = [array for array in arrays if array.devices() == {device}]
                assert same_bits(array, np.asarray(p[...])[box]), path
            if packed or ".experts." not in path:
                axes = max(1, len(p.shape) - 1)  # all but the columns
                rows = {tuple(range(n)[part] for n, part in zip(p.shape[:axes], box)) for box in boxes.values()}  # noqa: B905
                count = sum(math.prod(map(len, box)) for box in rows) * math.prod(p.shape[axes:])
                assert sum(moved.values()) == count * p.dtype.itemsize, path


def bands_of(own, bands):
    """What some of the devices hold of these bands."""
    for band in bands:
        held = {columns: [device for device in devices if device in own] for columns, devices in band.devices.items()}
        if held := {columns: devices for columns, devices in held.items() if devices}:
            yield band._replace(devices=held)


def test_parts_of_a_group_of_columns(whole):
    """Decoded experts may be cut within the 32 columns that share a scale; packed ones may not."""
    mesh = k3jax.make_mesh(tp=4, ep=1)
    directory = GOLDEN / "k3_mxfp4_wide"  # 64 columns: 16 a rank
    assert_same(hf.load(directory, mesh=mesh).model, whole(directory, False), mesh)
    with pytest.raises(ValueError, match=r"tp / ep=4: allowed are divisors of 2, since MXFP4"):
        k3jax.load(directory, mesh=mesh, experts="packed")


def test_an_orbax_directory_of_packed_experts_is_refused_by_name(tmp_path):
    with k3jax.load(GOLDEN / "k3_mxfp4", experts="packed") as lm:
        lm.save(tmp_path / "packed", format="orbax")
    with pytest.raises(ValueError, match="tp / ep=2: allowed are divisors of 1, since MXFP4"):
        k3jax.load(tmp_path / "packed", mesh=k3jax.make_mesh(tp=2, ep=1))


def test_each_rank_has_its_heads_decay_rates():
    """Stored as [1, 1, H, 1]: of four ranks the first one's share is as long as that tensor's first axis."""
    mesh = k3jax.make_mesh(tp=4)
    directory = GOLDEN / "kimi_linear_a"
    assert_same(hf.load(directory, mesh=mesh).model, hf.load(directory).model, mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_on_a_mesh(eight, dtype):
    mesh = k3jax.make_mesh(tp=8, ep=2)
    assert_same(hf.load(eight, dtype=dtype, mesh=mesh).model, hf.load(eight, dtype=dtype).model, mesh)


def test_copies_are_read_once_and_share_their_memory(eight, whole, moved):
    """Two copies of a model on a CPU: what several devices hold is in memory once."""
    mesh = k3jax.make_mesh(data=2, tp=4, ep=2)
    want = whole(eight, True)
    moved.clear()
    model = hf.load(eight, packed=True, mesh=mesh).model
    assert_same(model, want, mesh)
    with Checkpoint(eight) as checkpoint:
        norm = "language_model.model.norm.weight"
        assert moved[norm] == 2 * checkpoint.shape(norm)[0]
    if jax.default_backend() == "cpu":
        gain = model.model.norm.weight[...]
        assert len({shard.data.unsafe_buffer_pointer() for shard in gain.addressable_shards}) == 1


def test_reads_are_small_and_bands_wait_for_room(eight, whole, monkeypatch):
    """Blocks of 1,000 bytes, one band ahead: the same, and no read is longer than a block or a row of 1 KiB."""
    longest = []
    preadv = reader.os.preadv
    monkeypatch.setattr(hf, "BLOCK", 1000)
    monkeypatch.setattr(hf, "AHEAD", 0)
    monkeypatch.setattr(
        reader.os, "preadv", lambda file, out, at: longest.append(sum(map(len, out))) or preadv(file, out, at)
    )
    mesh = k3jax.make_mesh(ep=4)
    model = hf.load(eight, mesh=mesh).model
    assert max(longest) <= 1024 < len(longest)
    assert_same(model, whole(eight, False), mesh)


# Columns of a matrix.


@pytest.fixture
def matrix(tmp_path):
    """A tensor [7, 3, 11] of two-byte numbers, as its file and as it is."""
    value = np.arange(7 * 3 * 11, dtype=np.uint16).reshape(7, 3, 11)
    header = json.dumps({"x": {"dtype": "U16", "shape": value.shape, "data_offsets": [0, value.nbytes]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + value.tobytes())
    with Checkpoint(tmp_path) as checkpoint:
        yield checkpoint, value


@pytest.mark.parametrize("block", [1, 66, 150, 1 << 20])
@pytest.mark.parametrize("rows", [None, slice(2, 6), slice(3, 3)])
@pytest.mark.parametrize("columns", [slice(0, 11), slice(4, 9), slice(10, None), slice(5, 5)])
def test_reads_columns(matrix, monkeypatch, block, rows, columns):
    checkpoint, value = matrix
    monkeypatch.setattr(reader, "BLOCK", block)
    want = value[rows or slice(None), :, columns]
    assert same_bits(checkpoint.read("x", rows=rows, columns=columns), want)
    out = np.full((2, *want.shape), 7, np.uint16)
    checkpoint.read("x", out[1], rows, columns)
    assert same_bits(out[1], want) and (out[0] == 7).all()


@pytest.mark.parametrize("columns", [slice(0, 12), slice(-1, None), slice(3, 2), slice(0, 4, 2)])
def test_refuses_columns_out_of_range(matrix, columns):
    with pytest.raises(CheckpointError, match=r"'x'.*has no slice.*shape\[2\]"):
        matrix[0].read("x", columns=columns)


# Trouble.


def test_errors_in_a_part_are_named_and_end_the_reading(tmp_path):
    """A scale that only the last rank reads; nothing goes on reading afterwards."""
    full_shape.write(tmp_path / "bad", CONFIG)
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight_scale"
    with Checkpoint(tmp_path / "bad") as checkpoint:
        file, offset = checkpoint.file_of(name), checkpoint._tensor(name).offset
        last = math.prod(checkpoint.shape(name)) - 1
    with open(file, "r+b") as opened:
        opened.seek(offset + last)
        opened.write(b"\xff")
    for packed in (True, False):
        with pytest.raises(CheckpointError, match=rf"{re.escape(name)} holds scale byte 255"):
            hf.load(tmp_path / "bad", packed=packed, mesh=k3jax.make_mesh(ep=4))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("k3jax-load")]


def test_an_interrupt_ends_the_reading(eight, monkeypatch):
    """The reads that wait, hundreds of them, do not begin."""
    calls = []

    def slow(self, what):
        calls.append(what)
        if len(calls) == 1:
            raise KeyboardInterrupt
        time.sleep(0.05)
        return 0

    monkeypatch.setattr(hf._Source, "read", slow)
    with pytest.raises(KeyboardInterrupt):
        hf.load(eight, mesh=k3jax.make_mesh(ep=4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("k3jax-load")]
    assert len(calls) < 150 < len(hf.released_tensors(CONFIG))


# The cache.


@pytest.fixture
def fetched(monkeypatch):
    """Blocks that caches fetch from the source, by file."""
    found, now = [], threading.local()
    fetch, pread = reader.Cache._fetch, reader.os.pread

    def counting(self, name, block):
        now.file, now.what = self._sources[name].fileno(), (name, block)
        fetch(self, name, block)

    def noticed(file, size, at):
        if file == now.file:
            found.append(now.what)
        return pread(file, size, at)

    monkeypatch.setattr(reader.os, "pread", noticed)
    monkeypatch.setattr(reader.Cache, "_fetch", counting)
    monkeypatch.setattr(reader, "BLOCK", 10_000)
    return found


def test_a_cache_goes_on_where_it_was(eight, whole, tmp_path, fetched, monkeypatch):
    """Interrupted, then on another mesh, then from the cache alone: no block of the source is fetched twice."""
    size, read, calls = 10_000, hf._Source.read, []

    def interrupted(self, what):
        calls.append(what)
        if len(calls) == 150:
            raise KeyboardInterrupt
        return read(self, what)

    with monkeypatch.context() as patch:
        patch.setattr(hf._Source, "read", interrupted)
        patch.setattr(hf, "AHEAD", 0)  # the interrupt is soon noticed
        with pytest.raises(KeyboardInterrupt):
            hf.load(eight, packed=True, cache=tmp_path / "cache")
    part = len(fetched)
    mesh = k3jax.make_mesh(ep=4)
    assert_same(hf.load(eight, packed=True, mesh=mesh, cache=tmp_path / "cache").model, whole(eight, True), mesh)
    blocks = sum(-(-file.stat().st_size // size) for file in eight.glob("*.safetensors"))
    assert 0 < part < len(fetched) == len(set(fetched)) <= blocks
    count = len(fetched)
    assert_same(hf.load(eight, mesh=mesh, cache=str(tmp_path / "cache")).model, whole(eight, False), mesh)
    assert len(fetched) == count


def test_what_is_torn_in_a_cache_is_read_again(eight, whole, tmp_path, monkeypatch):
    """A changed byte, a file cut short, sums cut short: never used, and put right."""
    mesh, want = k3jax.make_mesh(ep=4), whole(eight, True)
    monkeypatch.setattr(reader, "BLOCK", 10_000)
    hf.load(eight, packed=True, mesh=mesh, cache=tmp_path)
    victim = sorted(tmp_path.glob("*.bytes"))[1]
    sums = victim.with_suffix(".sums")
    sound = victim.read_bytes()
    changed = bytearray(sound)
    changed[len(sound) // 2] ^= 1
    for file, torn in ((victim, bytes(changed)), (victim, sound[:-5000]), (sums, sums.read_bytes()[:-8])):
        file.write_bytes(torn)
        assert_same(hf.load(eight, packed=True, mesh=mesh, cache=tmp_path).model, want, mesh)
        assert victim.read_bytes() == sound


def test_a_cache_is_of_one_checkpoint(eight, tmp_path):
    for part in ("a", "b"):
        full_shape.write(tmp_path / part, CONFIG)
    hf.load(tmp_path / "a", cache=tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"cache='.*cache' keeps another model-.*: allowed is a new directory"):
        hf.load(tmp_path / "b", cache=tmp_path / "cache")
    hf.load(tmp_path / "a", cache=tmp_path / "cache")
    [file] = (tmp_path / "a").glob("*.safetensors")
    file.touch()
    with pytest.raises(CheckpointError, match=r"cache='.*cache' keeps another model-"):
        hf.load(tmp_path / "a", cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(eight, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cache='.*file.*' cannot be written: "):
        hf.load(eight, cache=tmp_path / "file")


# Orbax.


def test_orbax_restores_onto_any_mesh(eight, whole, tmp_path, monkeypatch):
    """From eight ranks onto one and onto two, and from one device onto eight: B112."""
    want = whole(eight, True)
    for name, mesh in (("eight", k3jax.make_mesh(ep=4)), ("none", None)):
        loaded = hf.load(eight, packed=True, mesh=mesh)
        orbax.save(tmp_path / name, loaded.model, loaded.config)
    restored, load = [], orbax.ocp.load
    monkeypatch.setattr(orbax.ocp, "load", lambda *how: restored.append(load(*how)) or restored[-1])
    for name, tp, ep in (("eight", 1, 1), ("eight", 2, 1), ("none", 8, 4)):
        mesh = k3jax.make_mesh(tp=tp, ep=ep)
        model = orbax.load(tmp_path / name, mesh=mesh).model
        assert_same(model, want, mesh)
        for path, p in hf.parameters_of(model).items():  # at once, not by way of one device
            assert restored[-1][path].sharding == NamedSharding(mesh, sharding.spec(p.axes))


def test_orbax_restores_in_the_dtype_asked_for(eight, tmp_path):
    loaded = hf.load(eight, mesh=k3jax.make_mesh(ep=4))
    orbax.save(tmp_path / "saved", loaded.model, loaded.config)
    mesh = k3jax.make_mesh(tp=2, ep=1)
    got = orbax.load(tmp_path / "saved", dtype="float32", mesh=mesh).model
    assert_same(got, hf.load(eight, dtype="float32").model, mesh)


# The generator.


def test_the_generator_writes_what_it_says(eight):
    table = hf.released_tensors(CONFIG)
    with Checkpoint(eight) as checkpoint:
        assert set(checkpoint.names) == set(table) and len({checkpoint.file_of(name) for name in table}) > 3
        for name, (shape, dtype) in table.items():
            value = checkpoint.read(name)
            assert (value.shape, value.dtype) == (shape, dtype)
            assert same_bits(value, full_shape.values(name, shape, dtype, seed=3))
            box = tuple(slice(size // 3, size // 2 + 1) for size in shape)
            assert same_bits(value[box], full_shape.values(name, shape, dtype, box, seed=3))
    assert hf.read_config(eight) == CONFIG


def test_the_generator_repeats_itself(tmp_path, monkeypatch):
    """A block of 101 entries: tensors are many times as long."""
    monkeypatch.setattr(full_shape, "PERIOD", 101)
    full_shape._block.cache_clear()
    full_shape.write(tmp_path / "model", CONFIG)
    with Checkpoint(tmp_path / "model") as checkpoint:
        for name, (shape, dtype) in hf.released_tensors(CONFIG).items():
            value = checkpoint.read(name)
            assert same_bits(value, full_shape.values(name, shape, dtype))
            assert same_bits(value.reshape(-1)[101:], value.reshape(-1)[:-101])
    full_shape._block.cache_clear()


def test_the_generator_tells_tensors_rows_and_seeds_apart(eight):
    table = hf.released_tensors(CONFIG)
    heads = {
        full_shape.values(name, shape, dtype, (slice(0, 8),), 3).tobytes()[:16]
        for name, (shape, dtype) in table.items()
    }
    assert len(heads) == len(table)
    rows = full_shape.values("x", (4096, 1024), np.dtype(np.uint8))
    assert len({row.tobytes() for row in rows}) == len(rows)
    other = full_shape.values("x", (4096, 1024), np.dtype(np.uint8), seed=1)
    assert (rows != other).mean() > 0.99


def test_the_whole_k3_as_holes(tmp_path):
    """The released sizes; no room on disk, and zeros as weights."""
    config = full_shape.smaller(K3Config.k3(), layers=4, experts=3, vocab=5)
    total = full_shape.write(tmp_path / "holes", config, holes=True)
    assert total == sum(math.prod(shape) * dtype.itemsize for shape, dtype in hf.released_tensors(config).values())
    files = list((tmp_path / "holes").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > total > 1e9 > sum(file.stat().st_blocks * 512 for file in files)
    with Checkpoint(tmp_path / "holes") as checkpoint:
        name = "language_model.model.layers.3.block_sparse_moe.experts.2.w2.weight_packed"
        assert checkpoint.shape(name) == (3584, 1536) and not checkpoint.read(name, rows=slice(7)).any()


def test_the_generator_refuses(tmp_path):
    for sizes, words in (
        (dict(layers=5, experts=0, vocab=9), "experts=0: allowed is 1 to 16"),
        (dict(layers=5, experts=9, vocab=2049), "vocab=2049: allowed is 1 to 2048"),
        (dict(layers=14, experts=9, vocab=9), r"slice\(layers=14\): allowed are 1 to 13"),
    ):
        with pytest.raises(ConfigError, match=words):
            full_shape.smaller(K3Config.tiny(), **sizes)
    with pytest.raises(FileExistsError):
        full_shape.write(tmp_path, CONFIG)


# Two processes, of which each reads its half.

PROCESS = """
import json, sys
import jax
process, address, directory, small = int(sys.argv[1]), *sys.argv[2:]
jax.distributed.initialize(address, 2, process)
sys.path[:0] = ["scripts", "tests"]
import numpy as np
import full_shape, k3jax
from k3jax.io import hf
from k3jax.io.safetensors import Checkpoint

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

mesh = k3jax.make_mesh(ep=4)
hf.load(small, packed=True, mesh=mesh)  # what programs and threads take whatever the size
moved, fill = [], Checkpoint._fill
def count(self, out, tensor, start, where):
    moved.append(out.nbytes)
    fill(self, out, tensor, start, where)
Checkpoint._fill = count

before = peak()
loaded = hf.load(directory, packed=True, mesh=mesh)
grown = peak() - before

def parts(array):  # what this process holds, each once
    return {str(shard.index): shard for shard in array.addressable_shards}.values()

shares = [shard.data.nbytes for array in jax.tree.leaves(loaded.model) for shard in parts(array)]
table = hf.released_tensors(loaded.config)
whole, wrong = 0, []
for path, parameter in hf.parameters_of(loaded.model).items():
    cut_columns = len(parameter.shape) == 2 and parameter.axes[1] in ("heads", "mlp")  # over both processes
    for shard in parts(parameter[...]):
        whole += shard.data.nbytes * (2 if cut_columns else 1)
        if ".experts." in path:
            experts, rows, columns = shard.index
            for i, expert in enumerate(range(loaded.config.num_experts)[experts]):
                name = path.replace(".experts.", f".experts.{expert}.").replace(".weight.", ".weight_")
                name, box = f"language_model.{name}", (rows, columns)
                want = full_shape.values(name, *table[name], box)
                wrong += [name] if np.asarray(shard.data)[i].tobytes() != want.tobytes() else []
        elif not path.endswith("A_log"):
            name = f"language_model.{path}"
            want = full_shape.values(name, *table[name], shard.index)
            wrong += [name] if np.asarray(shard.data).tobytes() != want.tobytes() else []
print(json.dumps({"peak": grown / sum(shares), "read": sum(moved), "of": whole, "wrong": wrong,
                  "devices": [len(jax.local_devices()), len(jax.devices())]}))
"""


def two(*directories):
    """What the two processes of a mesh of eight devices say of loading it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PATH": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(process), address, *map(str, directories)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    done = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], done[0][1][-2000:] + done[1][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory from /proc")
def test_each_of_two_processes_reads_its_half_on_linux(eight):
    """Its parts are right, no byte is read twice, and memory peaks at its share: 1.2 times at most."""
    config = full_shape.smaller(K3Config.k3(), layers=1, experts=1, vocab=64)
    config = full_shape.dataclasses.replace(
        config, num_hidden_layers=2, kda_layers=(0,), hidden_size=1024, intermediate_size=4096, num_experts=400,
        num_experts_per_token=2, moe_intermediate_size=512, routed_expert_hidden_size=1024, kda_num_heads=16,
        num_attention_heads=16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as path:  # gone at once: it is large
        total = full_shape.write(Path(path) / "model", config)
        both = two(Path(path) / "model", eight)
    for found in both:
        assert found["wrong"] == [] and found["devices"] == [4, 8]
        assert found["read"] == found["of"] < 0.65 * total
        assert found["peak"] < 1.2
