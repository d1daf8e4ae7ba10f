"""Saving as released: every tensor back byte for byte, the configuration's law, experts packed and unpacked, no halves."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import K3_FIELDS, QUICK, VARIANTS, checkpoint, same_bits, small, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from released import flat, write
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file

import k3jax
from k3jax.batch import single
from k3jax.config import ConfigError, K3Config
from k3jax.io import hf, release
from k3jax.io.safetensors import Checkpoint
from k3jax.kernels import Kernels
from k3jax.model import K3 as Model
from k3jax.model import Context, forward
from k3jax.ops import mxfp4

ROOT = Path(__file__).parents[1]
TINY = ROOT / "checkpoints" / "k3-tiny"
GOLDEN = sorted(path.parent for path in (ROOT / "tests" / "golden").glob("*/model.safetensors"))
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)

# Two layers, KDA with a dense MLP and MLA with a mixture; K3's with experts that MXFP4 can hold and a rank of its own.
TWO_LAYERS = dict(num_hidden_layers=2, kda_layers=(0,), num_experts=3, num_experts_per_token=2, dtype="float32")
LINEAR = small(**TWO_LAYERS)
K3 = small(
    **TWO_LAYERS, **K3_FIELDS | dict(routed_expert_hidden_size=32), moe_intermediate_size=64, kda_decay_rank=5
)  # fmt: skip


def tensors_in(directory):
    """All tensors of a directory, as the safetensors library reads them."""
    files = [load_file(file) for file in sorted(directory.glob("*.safetensors"))]
    tensors = {name: value for file in files for name, value in file.items()}
    assert len(tensors) == sum(map(len, files))
    return tensors


@cache
def loaded(config):
    """A small model of random float32 tensors."""
    with tempfile.TemporaryDirectory() as directory:
        return hf.load(write(Path(directory), flat(config), stored(config, checkpoint(config))))


def parameters(model):
    return {name: np.asarray(parameter[...]) for name, parameter in hf.parameters_of(model).items()}


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)


def saved(directory, model, **how):
    release.save(directory, model.model, model.config, **how)
    return tensors_in(directory)


# Byte for byte.


@pytest.mark.parametrize("shard_bytes", [release.SHARD, 100_000], ids=["one", "many"])
@pytest.mark.parametrize("directory", [TINY, *GOLDEN], ids=lambda path: path.name)
def test_every_tensor_comes_back(tmp_path, directory, shard_bytes):
    """In one file or many. Two golden cases spell A_log without the release's zeros; it is written with them."""
    found = hf.load(directory, packed="mxfp4" in directory.name)
    tensors, want = saved(tmp_path / "new", found, shard_bytes=shard_bytes), tensors_in(directory)
    for name, value in want.items():
        if value.ndim == 1 and name.endswith("A_log"):
            want[name] = np.concatenate([value, np.zeros(128 - value.size, F32)])
    assert same(tensors, want)
    again = hf.load(tmp_path / "new", packed="mxfp4" in directory.name)
    assert again.config == found.config and same(parameters(again.model), parameters(found.model))


@pytest.mark.parametrize("limit", [1, 5_000, 100_000])
def test_files_hold_so_many_bytes_at_most(tmp_path, limit):
    tensors = saved(tmp_path / "new", hf.load(GOLDEN[0]), shard_bytes=limit)
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index, where = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text()), {}
    sizes = []
    for file in files:
        with safe_open(file, "numpy") as content:
            names = list(content.keys())
            assert content.metadata() == {"format": "pt"}
        where |= dict.fromkeys(names, file.name)
        sizes.append(sum(tensors[name].nbytes for name in names))
        assert sizes[-1] <= limit or len(names) == 1
    assert all(a + b > limit for a, b in itertools.pairwise(sizes))  # no file for nothing
    assert index == {"metadata": {"total_size": sum(sizes)}, "weight_map": where}


def test_tensors_start_at_multiples_of_their_items_size(tmp_path):
    """Other readers map the file and view it in the tensor's dtype."""
    config = dataclasses.replace(K3, hidden_size=13, dtype="bfloat16")  # vectors of 26 bytes
    model = Model.abstract(config, packed=True)
    for parameter in hf.parameters_of(model).values():
        parameter.set_value(jnp.ones(parameter.shape, parameter.dtype))
    sizes = {value.dtype.itemsize for value in saved(tmp_path / "new", hf.Loaded(model, config)).values()}
    with Checkpoint(tmp_path / "new") as new:
        assert sizes == {1, 2, 4} and all(new._tensor(n).offset % new.dtype(n).itemsize == 0 for n in new.names)


def test_a_model_held_in_another_dtype_is_saved_in_it(tmp_path):
    found = hf.load(TINY, dtype="float32")
    assert {value.dtype for value in saved(tmp_path / "new", found).values()} == {F32}
    again = hf.load(tmp_path / "new")
    assert again.config == dataclasses.replace(found.config, dtype="float32")
    assert same(parameters(again.model), parameters(found.model))


# The whole of a directory.


@jax.jit(compiler_options=QUICK)
def logits(model):
    tokens = jnp.arange(24, dtype=jnp.int32) * 83 % 320
    return forward(model, single(tokens, 24), None, Context(Kernels(kda="scan", moe="dense"))).logits


@pytest.mark.slow
@pytest.mark.parametrize("directory", [TINY, *(d for d in GOLDEN if d.name in ("k3_mxfp4_wide", "kimi_linear_b"))])
def test_a_saved_model_is_loaded_as_the_old_one(tmp_path, directory):
    """Logits bit for bit, the same tokenizer, the same ends of a generation."""
    old = k3jax.load(directory)
    release.save(tmp_path / "new", old.model, old.config, source=directory, shard_bytes=1 << 20)
    new = k3jax.load(str(tmp_path / "new"))
    assert new.config == old.config and new.end_ids == old.end_ids and new.ignored_tensors == ()
    assert same_bits(logits(new.model), logits(old.model))
    assert (old.tokenizer is None) == (new.tokenizer is None) == (directory is not TINY)
    if new.tokenizer is not None:
        assert new.encode("And God said") == old.encode("And God said")
        assert new.tokenizer.special_ids == old.tokenizer.special_ids


def test_copies_what_tokens_and_texts_need_and_no_code(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    kept = ["chat_template.jinja", "generation_config.json", "tiktoken.model", "tokenizer_config.json"]
    for name in [*kept, "chat_template.py", "modeling.py", "README.md", "config.json", "model.safetensors"]:
        (source / name).write_text(f"of {name}\r\n")
    (tmp_path / "blob").write_bytes(b"\xff\x00")
    (source / "tiktoken.model").unlink()
    (source / "tiktoken.model").symlink_to("../blob")  # as in the hub's cache
    saved(tmp_path / "new", loaded(LINEAR), source=str(source))
    files = {path.name: path for path in (tmp_path / "new").iterdir()}
    assert sorted(files) == sorted([*kept, "config.json", "model.safetensors"])
    assert not any(path.is_symlink() for path in files.values())
    assert all(files[name].read_bytes() == (source / name).read_bytes() for name in kept)


# Experts.


def experts_of(tensors):
    return {name: value for name, value in tensors.items() if ".experts." in name}


@pytest.mark.parametrize("packed", [False, True], ids=["held-plain", "held-packed"])
@pytest.mark.parametrize("directory", [d for d in GOLDEN if "mxfp4" in d.name], ids=lambda path: path.name)
def test_mxfp4_and_back_loses_nothing(tmp_path, directory, packed):
    """Held plain, the decoded values come back; held packed, the bytes."""
    found, want = hf.load(directory, packed=packed), hf.load(directory)
    tensors = saved(tmp_path / "mxfp4", found, experts="mxfp4")
    assert "quantization_config" in json.loads((tmp_path / "mxfp4" / "config.json").read_text())["text_config"]
    assert tensors.keys() == tensors_in(directory).keys()
    assert not packed or same(tensors, tensors_in(directory))
    assert same(parameters(hf.load(tmp_path / "mxfp4").model), parameters(want.model))
    assert hf.load(tmp_path / "mxfp4", packed=True).config == found.config

    tensors = saved(tmp_path / "bf16", found, experts="bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())["text_config"]
    assert {value.dtype for value in experts_of(tensors).values()} == {BF16}
    assert same(parameters(hf.load(tmp_path / "bf16").model), parameters(want.model))


@pytest.mark.parametrize("config", [K3, dataclasses.replace(LINEAR, hidden_size=32, moe_intermediate_size=64)])
def test_plain_experts_are_quantised_one_by_one(tmp_path, config):
    """By the rule of mxfp4.encode; the trunk stays as it is, and ranks come back from its shapes."""
    found = loaded(config)
    plain, packed = saved(tmp_path / "plain", found), saved(tmp_path / "packed", found, experts="mxfp4")
    want = {name: value for name, value in plain.items() if ".experts." not in name}
    for name, value in experts_of(plain).items():
        want[f"{name}_packed"], want[f"{name}_scale"] = mxfp4.encode(value)
    assert same(packed, want)
    assert hf.load(tmp_path / "packed", packed=True).config == config


def test_float32_experts_are_rounded_to_bfloat16(tmp_path):
    found = loaded(LINEAR)
    plain, rounded = saved(tmp_path / "plain", found), saved(tmp_path / "rounded", found, experts="bf16")
    assert same(experts_of(rounded), {name: value.astype(BF16) for name, value in experts_of(plain).items()})
    assert {value.dtype for name, value in rounded.items() if ".experts." not in name} == {F32}


# Refusals and interruptions.


def refused(tmp_path, found, *words, error=ConfigError, **how):
    with pytest.raises(error) as caught:
        release.save(tmp_path / "new", found.model, how.pop("config", found.config), **how)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how, words", [
    ({"experts": "fp8"}, ["experts='fp8'", "'bf16'", "'mxfp4'", "None"]),
    ({"experts": "mxfp4"}, ["hidden_size=12", "multiple of 32"]),
    ({"source": "nowhere"}, ["source='nowhere'", "directory"]),
    ({"shard_bytes": 0}, ["shard_bytes=0", "1 byte"]),
    ({"shard_bytes": 1e9}, ["shard_bytes=1000000000.0", "1 byte"]),
    ({"config": K3}, ["config", "not the configuration"]),
])  # fmt: skip
def test_refuses_by_name_before_any_work(tmp_path, how, words):
    refused(tmp_path, loaded(LINEAR), *words, **how)


@pytest.mark.parametrize("changes, words", [
    (dict(routed_expert_hidden_size=32, moe_intermediate_size=48), ["moe_intermediate_size=48", "multiple of 32"]),
    (dict(routed_expert_hidden_size=33, moe_intermediate_size=64), ["routed_expert_hidden_size=33", "multiple of 32"]),
    (dict(first_k_dense_replace=2), ["experts='mxfp4'", "without mixture layers"]),
    (dict(routed_expert_hidden_size=32, moe_intermediate_size=64, latent_norm_eps=1e-5), ["latent_norm_eps=1e-05", "1e-06"]),
])  # fmt: skip
def test_refuses_what_the_layout_cannot_hold(tmp_path, changes, words):
    """Of a model without memory: nothing of it is touched."""
    config = dataclasses.replace(LINEAR, **changes)
    refused(tmp_path, hf.Loaded(Model.abstract(config, dtype="float32"), config), *words, experts="mxfp4")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_to_quantise_what_is_not_finite(tmp_path, value):
    found = loaded.__wrapped__(K3)
    weights = hf.parameters_of(found.model)["model.layers.1.block_sparse_moe.experts.w3.weight"]
    weights.set_value(weights[...].at[2, 5, 7].set(value))
    refused(tmp_path, found, "layers.1.", "w3", "expert 2", "not finite", error=ValueError, experts="mxfp4")


def test_writes_over_nothing(tmp_path):
    found = loaded(LINEAR)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("absent")
    (tmp_path / "directory").mkdir()
    for name in ("file", "link", "directory"):
        with pytest.raises(FileExistsError, match=str(tmp_path / name)):
            release.save(tmp_path / name, found.model, found.config)
    assert (tmp_path / "file").read_text() == "kept" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("matrices", [0, 5])
def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch, matrices):
    found, encode, calls = loaded(K3), mxfp4.encode, []

    def interrupted(weights):
        if len(calls) == matrices:
            assert list(tmp_path.rglob("*.safetensors"))  # it is being written
            raise KeyboardInterrupt
        calls.append(weights)
        return encode(weights)

    with monkeypatch.context() as patch:
        patch.setattr(mxfp4, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release.save(tmp_path / "a" / "new", found.model, found.config, experts="mxfp4", shard_bytes=5_000)
    assert not list((tmp_path / "a").iterdir())
    assert saved(tmp_path / "a" / "new", found, experts="mxfp4")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]


@pytest.mark.parametrize(("shown_from", "shown"), [(0, True), (1 << 30, False)])
def test_long_saves_show_how_far_they_are(tmp_path, monkeypatch, shown_from, shown):
    screen = io.StringIO()
    monkeypatch.setattr(release, "SHOW_PROGRESS", shown_from)
    monkeypatch.setattr(release, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100))
    saved(tmp_path / "new", loaded(LINEAR))
    assert ("saving" in screen.getvalue() and "100%" in screen.getvalue()) == shown


# Memory. VmHWM as in test_hf.

SAVE = """
import sys
import jax, jax.numpy as jnp
from k3jax.config import K3Config
from k3jax.io import hf, release
from k3jax.model import K3

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

config = K3Config.tiny(
    vocab_size=20480, hidden_size=512, routed_expert_hidden_size=512, moe_intermediate_size=512, num_experts=16
)
model = K3.abstract(config)
for parameter in hf.parameters_of(model).values():
    parameter.set_value(jnp.ones(parameter.shape, parameter.dtype))
size, before = sum(array.nbytes for array in jax.tree.leaves(model)), peak()
release.save(sys.argv[1], model, config)
assert size > 3e8
print((peak() - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory from /proc")
def test_saving_needs_a_tensor_beside_the_model():
    """The largest is a twentieth of this model; a copy of all stacks or of the trunk would be half of it or more."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", SAVE, f"{scratch}/new"]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert float(done.stdout) < 0.15


# The configuration.


def same_config(config, packed):
    """What is written reads as the configuration, but for the ranks, which are the tensors'."""
    text = json.dumps(config.to_hf(packed=packed), allow_nan=False)
    want = dataclasses.replace(config, kda_decay_rank=None, kda_gate_rank=None)
    return K3Config.from_hf(json.loads(text)) == want and ("mxfp4-pack-quantized" in text) == packed


CONFIGS = {
    "k3": K3Config.k3(), "kimi_linear_48b": K3Config.kimi_linear_48b(), "tiny": K3Config.tiny(),
    "slice": K3Config.k3().slice(5), "dense": K3Config.kimi_linear_48b().slice(1),
    "k3-tiny": hf.read_config(TINY), **{path.name: hf.read_config(path) for path in GOLDEN},
    **{name: small(**changes) for name, changes in VARIANTS.items()},
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_read_as_they_were_written(name, packed):
    assert same_config(CONFIGS[name], packed)


POSITIVE = st.floats(1e-30, 1e30) | st.integers(1, 99)
COUNT, IDS = st.integers(1, 300), st.none() | st.integers(0, 2047)
FIELDS = dict(
    vocab_size=COUNT, hidden_size=COUNT, rms_norm_eps=POSITIVE, max_position_embeddings=COUNT,
    attn_res_block_size=st.none() | COUNT, kda_layers=st.sets(st.integers(0, 12)).map(lambda s: tuple(sorted(s))),
    kda_num_heads=COUNT, kda_head_dim=COUNT, short_conv_kernel_size=st.integers(2, 9),
    gate_lower_bound=st.none() | POSITIVE.map(lambda bound: -bound), use_full_rank_gate=st.booleans(),
    kda_decay_rank=st.none() | COUNT, kda_gate_rank=st.none() | COUNT, num_attention_heads=COUNT,
    q_lora_rank=st.none() | COUNT, kv_lora_rank=COUNT, qk_nope_head_dim=COUNT, qk_rope_head_dim=COUNT,
    v_head_dim=COUNT, mla_use_output_gate=st.booleans(), hidden_act=st.sampled_from(["situ", "silu"]),
    activation_situ_beta=POSITIVE, activation_situ_linear_beta=POSITIVE, intermediate_size=COUNT,
    first_k_dense_replace=st.integers(0, 14), moe_layer_freq=st.integers(1, 14), num_experts=st.sampled_from([16, 64]),
    num_experts_per_token=st.integers(1, 4), num_shared_experts=st.integers(0, 3), moe_intermediate_size=COUNT,
    routed_expert_hidden_size=st.none() | COUNT, latent_moe_use_norm=st.booleans(), moe_renormalize=st.booleans(),
    routed_scaling_factor=POSITIVE, num_expert_group=st.sampled_from([4, 8]), topk_group=st.sampled_from([2, 4]),
    bos_token_id=IDS, eos_token_id=IDS, pad_token_id=IDS, media_placeholder_token_id=IDS,
    dtype=st.sampled_from(["bfloat16", "float32"]),
)  # fmt: skip


@settings(deadline=None)
@given(changes=st.fixed_dictionaries({}, optional=FIELDS), packed=st.booleans())
def test_any_configuration_reads_as_it_was_written(changes, packed):
    groups = {"num_expert_group": 4, "topk_group": 2} if {"num_expert_group", "topk_group"} & set(changes) else {}
    assert same_config(K3Config.tiny(**groups | changes), packed)


def test_every_field_is_drawn():
    assert {field.name for field in dataclasses.fields(K3Config)} - set(FIELDS) == {
        "num_hidden_layers",
        "latent_norm_eps",
    }


def test_forms_are_the_released_ones():
    k3, linear = K3Config.k3().to_hf(packed=True), K3Config.kimi_linear_48b().to_hf()
    assert (k3["model_type"], k3["architectures"]) == ("kimi_k3", ["KimiK3ForConditionalGeneration"])
    assert k3["text_config"]["linear_attn_config"]["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert "quantization_config" in k3["text_config"] and "quantization_config" not in k3
    assert linear["architectures"] == ["KimiLinearForCausalLM"] and "text_config" not in linear
    assert linear["model_max_length"] == 1048576 and linear["num_key_value_heads"] == 32
