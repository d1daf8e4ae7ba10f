"""Orbax checkpoints: what is saved comes back bit for bit, and nothing else is taken for one."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from helpers import K3_FIELDS, checkpoint, same_bits, small, stored
from released import flat, write

from k3jax.config import ConfigError
from k3jax.io import hf, orbax
from k3jax.io.safetensors import CheckpointError
from k3jax.model import K3

GOLDEN = Path(__file__).parent / "golden"
# Both mixers and both feed-forwards of K3, experts in MXFP4, a decay rank of its own.
CONFIG = small(
    **K3_FIELDS | dict(routed_expert_hidden_size=32), num_hidden_layers=2, kda_layers=(0,), num_experts=3,
    num_experts_per_token=2, moe_intermediate_size=64, kda_decay_rank=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Of float32 tensors, with the norms of the trunk in bfloat16: dtypes that differ within one checkpoint."""
    tensors = stored(CONFIG, checkpoint(CONFIG), packed=True)
    tensors |= {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items() if "layernorm" in name}
    return write(tmp_path_factory.mktemp("released"), flat(CONFIG), tensors)


@pytest.fixture(scope="module")
def saved(released, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    loaded = hf.load(released, packed=True)
    orbax.save(directory, loaded.model, loaded.config)
    return directory


def same(model, other):
    """Equal arrays, absorbed ones too, and equal static structure."""
    leaves, structure = jax.tree.flatten(model)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(map(same_bits, leaves, others))


def refused(directory, *words):
    with pytest.raises(CheckpointError) as caught:
        orbax.load(directory)
    for word in (str(directory), *words):
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_comes_back_bit_for_bit(released, saved, dtype):
    """In the dtypes that the released directory would have been loaded in."""
    want, found = hf.load(released, packed=True, dtype=dtype), orbax.load(saved, dtype)
    assert found.config == CONFIG and found.ignored == ()
    assert same(found.model, want.model)
    assert found.model.model.layers[1].self_attn.W_UV is not None


def test_decoded_experts_come_back_decoded(released, tmp_path):
    want = hf.load(released)
    orbax.save(str(tmp_path / "checkpoint"), want.model, want.config)
    assert same(orbax.load(str(tmp_path / "checkpoint")).model, want.model)


def test_stores_parameters_alone(saved):
    names = set(ocp.metadata(saved).metadata)
    assert names == set(hf.parameters_of(K3.abstract(CONFIG, packed=True)))
    assert not [name for name in names if "W_U" in name]


def test_tells_its_own_from_others(saved, released, tmp_path):
    assert orbax.is_orbax(saved) and orbax.is_orbax(str(saved))
    assert not orbax.is_orbax(released) and not orbax.is_orbax(GOLDEN / "k3_f32")
    assert not orbax.is_orbax(tmp_path) and not orbax.is_orbax(tmp_path / "absent")


def test_writes_over_nothing(saved, tmp_path):
    model = K3.abstract(CONFIG, packed=True)
    for directory in (saved, tmp_path):
        with pytest.raises(FileExistsError, match=str(directory)):
            orbax.save(directory, model, CONFIG)


def test_refuses_other_dtypes_to_load_in(saved):
    with pytest.raises(ConfigError, match="dtype='float16'.*'bfloat16', 'float32'"):
        orbax.load(saved, "float16")


def resaved(path, **changes):
    """An Orbax checkpoint of one array, with the metadata of a model that is not there."""
    config = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    ocp.save(path, {"a": np.zeros(2)}, custom_metadata={"k3jax_format": 1, "config": config} | changes)
    return path, config


def test_refuses_other_metadata(tmp_path):
    path, config = resaved(tmp_path / "arrays")
    refused(path, "a [2]", "in its config")
    without = {name: value for name, value in config.items() if name != "rms_norm_eps"}
    refused(resaved(tmp_path / "fields", config=without | {"frobnicate": 1})[0], "['frobnicate']", "['rms_norm_eps']")
    refused(resaved(tmp_path / "format", k3jax_format=2)[0], "format 2", "allowed is 1")
    refused(resaved(tmp_path / "none", config=None)[0], "not a checkpoint of k3jax")
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        orbax.load(resaved(tmp_path / "value", config=config | {"hidden_act": "gelu"})[0])


def test_refuses_foreign_directories(tmp_path, released):
    ocp.save(tmp_path / "foreign", {"params": {"w": np.zeros(2)}})
    refused(tmp_path / "foreign", "not a checkpoint of k3jax")
    for directory in (tmp_path, tmp_path / "absent", released):
        refused(directory, "not an Orbax checkpoint")


DAMAGE = """
import shutil, sys
from pathlib import Path
from k3jax.io import orbax

saved, copy = Path(sys.argv[1]), Path(sys.argv[2])
for pattern in sys.argv[3:]:
    for truncate in (False, True):
        shutil.copytree(saved, copy)
        victim = min(copy.glob(pattern))
        data = victim.read_bytes()
        victim.unlink()
        if truncate:
            victim.write_bytes(data[: len(data) // 2])
        try:
            orbax.load(copy)
        except Exception as error:
            print(pattern, type(error).__name__, str(copy) in str(error))
        shutil.rmtree(copy)
"""


def test_refuses_damaged_directories(saved, tmp_path):
    """Each kind of file missing, then cut in half; in a process of its own, since Orbax leaves tasks behind."""
    parts = "_CHECKPOINT_METADATA state/_METADATA state/manifest.ocdbt state/d/* state/ocdbt.process_0/d/*".split()
    command = [sys.executable, "-c", DAMAGE, str(saved), str(tmp_path / "copy"), *parts]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert done.stdout.splitlines() == [f"{part} CheckpointError True" for part in parts for _ in range(2)]


SHARE = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from k3jax.io import orbax
from k3jax.io.hf import parameters_of

loaded, shared = orbax.load(sys.argv[1]), 0
mesh = Mesh(np.array(jax.devices()), "x")
for parameter in parameters_of(loaded.model).values():
    value = parameter[...]
    axis = next((axis for axis, size in enumerate(value.shape) if size % 8 == 0), None)
    spec = PartitionSpec(*([None] * axis + ["x"])) if axis is not None else PartitionSpec()
    shared += axis is not None
    parameter.set_value(jax.device_put(value, NamedSharding(mesh, spec)))
assert len(jax.devices()) == 8 and shared >= 8, shared
orbax.save(sys.argv[2], loaded.model, loaded.config)
"""


def test_any_number_of_devices(saved, tmp_path):
    """Parameters go from one device to eight that share them, and back to one, in any dtype."""
    root = Path(__file__).parents[1]
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, "-c", SHARE, str(saved), str(tmp_path / "shared")]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    for dtype in (None, "bfloat16"):
        assert same(orbax.load(tmp_path / "shared", dtype).model, orbax.load(saved, dtype).model)
