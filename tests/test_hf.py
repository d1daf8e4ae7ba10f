"""The loader: tensors bit for bit, every refusal by name, the released table, and the peak of memory."""

import io
import json
import math
import re
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
from helpers import K3_FIELDS, QUICK, checkpoint, same_bits, small, stored
from released import flat, nested, write
from rich.console import Console
from safetensors.numpy import load_file

from k3jax import reference
from k3jax.batch import single
from k3jax.config import ConfigError, K3Config
from k3jax.io import hf
from k3jax.io.safetensors import CheckpointError
from k3jax.kernels import Kernels
from k3jax.model import Context, forward

ROOT = Path(__file__).parents[1]
GOLDEN = sorted(path.parent for path in (ROOT / "tests" / "golden").glob("*/model.safetensors"))
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
PREFIX = "language_model."
IN_FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")  # of K3

# Two layers, KDA with a dense MLP and MLA with a mixture; K3's with experts that MXFP4 can hold.
TWO_LAYERS = dict(num_hidden_layers=2, kda_layers=(0,), num_experts=3, num_experts_per_token=2)
LINEAR = small(**TWO_LAYERS)
K3 = small(**TWO_LAYERS, **K3_FIELDS | dict(routed_expert_hidden_size=32), moe_intermediate_size=64)


@cache
def tensors_of(config, packed=False):
    return stored(config, checkpoint(config), packed)


def parameters(loaded):
    return {name: np.asarray(parameter[...]) for name, parameter in hf.parameters_of(loaded.model).items()}


def same(loaded, other):
    mine, theirs = parameters(loaded), parameters(other)
    return mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)


@jax.jit(compiler_options=QUICK)
def logits(model):
    tokens = jnp.arange(24, dtype=jnp.int32) * 7 % 31
    return forward(model, single(tokens, 24), None, Context(Kernels(kda="scan", moe="dense"))).logits


def refused(directory, *words, error=CheckpointError, **how):
    with pytest.raises(error) as caught:
        hf.load(directory, **how)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


# Every tensor in its place.


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
@pytest.mark.parametrize("directory", GOLDEN, ids=lambda path: path.name)
def test_golden_tensors_bit_for_bit(directory, packed):
    tensors = {name.removeprefix(PREFIX): value for name, value in load_file(directory / "model.safetensors").items()}
    if packed and "mxfp4" not in directory.name:
        refused(directory, "packed experts are asked for", packed=True)
        return
    loaded = hf.load(directory, packed=packed)
    assert loaded.config == hf.read_config(directory) and loaded.ignored == ()
    for path, value in parameters(loaded).items():
        if ".experts." not in path:
            want = tensors.pop(path)
            want = want.reshape(-1)[: loaded.config.kda_num_heads] if path.endswith("A_log") else want
        else:
            experts = [path.replace(".experts.", f".experts.{e}.") for e in range(loaded.config.num_experts)]
            if "mxfp4" in directory.name and not packed:
                pairs = [(tensors.pop(f"{name}_packed"), tensors.pop(f"{name}_scale")) for name in experts]
                want = np.stack([reference.mxfp4_decode(*pair) for pair in pairs]).astype(BF16)
            else:
                want = np.stack([tensors.pop(name) for name in experts])
        assert same_bits(value, want), path
    assert not tensors


@pytest.mark.parametrize("config, packed", [(K3, True), (LINEAR, False)], ids=["k3", "kimi-linear"])
def test_every_tensor_moves_the_logits(tmp_path, config, packed):
    """But for layer 0's depth mix: its attention reads the embedding itself, and the released weights are dead."""
    tensors = tensors_of(config, packed)
    tensors = {name: value / 4 if name.endswith("bias") else value for name, value in tensors.items()}  # no idle expert
    moved = {name: value ^ 1 if value.dtype == np.uint8 else np.roll(value, 1) for name, value in tensors.items()}
    model = hf.load(write(tmp_path / "a", flat(config), tensors), packed=packed).model
    other = parameters(hf.load(write(tmp_path / "b", flat(config), moved), packed=packed))
    held, want, still = hf.parameters_of(model), logits(model), []
    for name in tensors:
        path = re.sub(r"\.experts\.\d+", ".experts", name)
        where = ... if path == name else int(re.search(r"\.experts\.(\d+)", name)[1])
        value = held[path][...]
        held[path].set_value(value.at[where].set(other[path][where]))
        if np.abs(logits(model) - want).max() < 1e-4:
            still.append(name)
        held[path].set_value(value)
    dead = [f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")]
    assert still == (dead if config is K3 else [])


def test_names_with_and_without_prefix_in_one_file_or_many(tmp_path):
    tensors = tensors_of(K3)
    prefixed = {PREFIX + name: value for name, value in tensors.items()}
    plain = hf.load(write(tmp_path / "plain", flat(K3), tensors))
    assert same(plain, hf.load(str(write(tmp_path / "k3", nested(K3), prefixed, shards=5))))


@pytest.mark.parametrize(("shown_from", "shown"), [(0, True), (1 << 30, False)])
def test_long_loads_show_how_far_they_are(monkeypatch, shown_from, shown):
    """On a terminal; what is small loads in silence."""
    screen = io.StringIO()
    monkeypatch.setattr(hf, "SHOW_PROGRESS", shown_from)
    monkeypatch.setattr(hf, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100))
    hf.load(GOLDEN[-1])
    assert ("loading" in screen.getvalue() and "100%" in screen.getvalue()) == shown


def test_a_name_without_the_others_prefix_is_not_taken_for_it(tmp_path):
    prefixed = {PREFIX + name: value for name, value in tensors_of(LINEAR).items()}
    prefixed["lm_head.weight"] = prefixed.pop(f"{PREFIX}lm_head.weight")
    text = refused(write(tmp_path, flat(LINEAR), prefixed), "(2):")
    assert f"missing {PREFIX}lm_head.weight" in text and "unread lm_head.weight" in text


# Spellings of single tensors.


@pytest.mark.parametrize("spelling", ["[H]", "[128]", "[1, 1, H, 1]", "[H, 1]"])
def test_spellings_of_a_log(tmp_path, spelling):
    rates = {name: value[:3] for name, value in tensors_of(LINEAR).items() if name.endswith("A_log")}
    shape = {"[H]": (-1,), "[1, 1, H, 1]": (1, 1, -1, 1), "[H, 1]": (-1, 1)}
    if spelling == "[128]":
        spelled = {name: np.pad(value, (0, 125), constant_values=np.nan) for name, value in rates.items()}
    else:
        spelled = {name: value.reshape(shape[spelling]) for name, value in rates.items()}
    found = parameters(hf.load(write(tmp_path, flat(LINEAR), tensors_of(LINEAR) | spelled)))
    assert len(rates) == 1 and all(same_bits(found[name], value) for name, value in rates.items())


@pytest.mark.parametrize("shape", [(2,), (0,), (3, 3), (1, 1, 2, 1), (1,)])
def test_refuses_other_shapes_of_a_log(tmp_path, shape):
    name = "model.layers.0.self_attn.A_log"
    directory = write(tmp_path, flat(LINEAR), tensors_of(LINEAR) | {name: np.zeros(shape, F32)})
    refused(directory, name, str(list(shape)), "[3]")


def test_convolutions_of_rank_two(tmp_path):
    flattened = {name: value[:, 0] for name, value in tensors_of(LINEAR).items() if "conv1d" in name}
    assert len(flattened) == 3
    rank3 = hf.load(write(tmp_path / "3", flat(LINEAR), tensors_of(LINEAR)))
    assert same(rank3, hf.load(write(tmp_path / "2", flat(LINEAR), tensors_of(LINEAR) | flattened)))


def test_ranks_come_from_the_tensors(tmp_path):
    config = small(**TWO_LAYERS, kda_decay_rank=5, kda_gate_rank=2)
    directory = write(tmp_path, flat(config), tensors_of(config))
    assert hf.read_config(directory) == LINEAR and hf.load(directory).config == config


# Dtypes.


def as_released(tensors, trunk, in_float32=IN_FLOAT32):
    """The trunk in another dtype; the rest in float32, as it is."""
    narrow = {name for name in tensors if not name.endswith(in_float32) and tensors[name].dtype != np.uint8}
    return {name: value.astype(trunk) if name in narrow else value for name, value in tensors.items()}


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("in_float32", [IN_FLOAT32, IN_FLOAT32[:2]], ids=["k3", "kimi-linear"])
def test_bfloat16_checkpoints(tmp_path, dtype, in_float32):
    """Float32 parameters stay as stored, be it bfloat16, and are widened with the rest: exactly."""
    tensors = as_released(tensors_of(K3), BF16, in_float32)
    loaded = hf.load(write(tmp_path, flat(K3, dtype="bfloat16"), tensors), dtype=dtype)
    assert loaded.model.dtype == (F32 if dtype == "float32" else BF16)
    for name, value in parameters(loaded).items():
        want = tensors[name.replace(".experts.", ".experts.2.")]
        want = want[:3] if name.endswith("A_log") else want
        want = want.astype(F32) if dtype == "float32" else want
        assert same_bits(value[2] if ".experts." in name else value, want), name


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_float32_checkpoints(tmp_path, dtype):
    """bfloat16 rounds the trunk and the experts to nearest, and leaves the float32 parameters alone."""
    tensors = tensors_of(K3)
    loaded = hf.load(write(tmp_path, flat(K3), tensors), dtype=dtype)
    for name, value in parameters(loaded).items():
        want = tensors[name.replace(".experts.", ".experts.1.")]
        want = want[:3] if name.endswith("A_log") else want
        narrow = dtype == "bfloat16" and not name.endswith(IN_FLOAT32)
        assert same_bits(value[1] if ".experts." in name else value, want.astype(BF16) if narrow else want), name


@pytest.mark.parametrize("dtype", ["float16", "int8", "bf16", "", jnp.float32])
def test_refuses_other_dtypes_to_load_in(dtype):
    refused(GOLDEN[0], "dtype=", repr(dtype), "'bfloat16'", "'float32'", "None", error=ConfigError, dtype=dtype)


@pytest.mark.parametrize("dtype", [
    np.float64, np.float16, np.int8, np.int64, np.uint8, np.bool_, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
])  # fmt: skip
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.block_sparse_moe.experts.2.w2.weight"])
def test_refuses_other_dtypes_of_tensors(tmp_path, name, dtype):
    tensors = tensors_of(LINEAR)
    directory = write(tmp_path, flat(LINEAR), tensors | {name: tensors[name].astype(dtype)})
    refused(directory, name, np.dtype(dtype).name, "bfloat16 or float32", "(1):")


def test_nan_and_infinity_are_weights_like_others(tmp_path):
    tensors = {name: np.full_like(value, [np.nan, np.inf][len(name) % 2]) for name, value in tensors_of(LINEAR).items()}
    found = parameters(hf.load(write(tmp_path, flat(LINEAR), tensors), dtype="bfloat16"))
    assert not any(np.isfinite(value.astype(F32)).any() for value in found.values())


def test_a_stack_takes_the_widest_dtype_of_its_experts(tmp_path):
    """So that no expert is narrowed, whichever comes first; decoded experts count as the trunk's dtype."""
    tensors = as_released(tensors_of(K3, packed=True), BF16)
    experts = "model.layers.1.block_sparse_moe.experts"
    wide = np.random.default_rng(0).normal(size=(64, 32)).astype(F32)
    for part in ("packed", "scale"):
        del tensors[f"{experts}.1.w3.weight_{part}"]
    tensors[f"{experts}.1.w3.weight"] = wide
    found = parameters(hf.load(write(tmp_path, flat(K3, dtype="bfloat16"), tensors)))
    assert same_bits(found[f"{experts}.w3.weight"][1], wide)
    pair = [tensors[f"{experts}.2.w3.weight_{part}"] for part in ("packed", "scale")]
    assert same_bits(found[f"{experts}.w3.weight"][2], reference.mxfp4_decode(*pair).astype(F32))
    assert found[f"{experts}.w1.weight"].dtype == BF16


# MXFP4.


@pytest.mark.parametrize("trunk, dtype, want", [
    (BF16, None, BF16), (BF16, "float32", F32), (F32, None, F32), (F32, "bfloat16", BF16),
])  # fmt: skip
def test_packed_experts_are_decoded_exactly(tmp_path, trunk, dtype, want):
    tensors = as_released(tensors_of(K3, packed=True), trunk)
    loaded = hf.load(write(tmp_path, flat(K3, dtype=trunk.name), tensors), dtype=dtype)
    for name, value in parameters(loaded).items():
        if ".experts." in name:
            pair = [tensors[f"{name.replace('.experts.', '.experts.1.')}_{part}"] for part in ("packed", "scale")]
            assert same_bits(value[1], reference.mxfp4_decode(*pair).astype(want))


def test_packed_in_memory_gives_the_same_logits(tmp_path):
    directory = write(tmp_path, flat(K3), tensors_of(K3, packed=True))
    decoded, packed = (hf.load(directory, packed=packed) for packed in (False, True))
    experts = [value for name, value in parameters(packed).items() if ".experts." in name]
    assert len(experts) == 3 * 2 and all(value.dtype == np.uint8 for value in experts)
    assert same_bits(logits(packed.model), logits(decoded.model))


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
@pytest.mark.parametrize("part", ["packed", "scale"])
def test_refuses_half_a_pair(tmp_path, part, packed):
    tensors = {name: value for name, value in tensors_of(K3, packed=True).items() if name != f"{EXPERT}_{part}"}
    refused(write(tmp_path, flat(K3), tensors), f"missing {EXPERT}_{part}", "(1):", packed=packed)


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_refuses_an_expert_twice(tmp_path, packed):
    tensors = tensors_of(K3, packed=True) | {EXPERT: tensors_of(K3)[EXPERT]}
    refused(write(tmp_path, flat(K3), tensors), f"unread {EXPERT}", packed=packed)


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_refuses_scale_byte_255(tmp_path, packed):
    scales = tensors_of(K3, packed=True)[f"{EXPERT}_scale"].copy()
    scales[3, 1] = 255
    directory = write(tmp_path, flat(K3), tensors_of(K3, packed=True) | {f"{EXPERT}_scale": scales})
    refused(directory, f"{EXPERT}_scale", "255", ".safetensors", packed=packed)


@pytest.mark.parametrize("part, dtype", [("packed", np.int8), ("scale", np.float32), ("scale", BF16)])
def test_refuses_pairs_that_are_not_bytes(tmp_path, part, dtype):
    name = f"{EXPERT}_{part}"
    tensors = tensors_of(K3, packed=True)
    directory = write(tmp_path, flat(K3), tensors | {name: tensors[name].astype(dtype)})
    refused(directory, name, np.dtype(dtype).name, "uint8")


@pytest.mark.parametrize("packed", [False, True], ids=["decoded", "packed"])
def test_refuses_groups_that_are_not_full(tmp_path, packed):
    config = small(**TWO_LAYERS, moe_intermediate_size=48, hidden_size=32)
    tensors = dict(tensors_of(config))
    for expert in range(3):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
        del tensors[name]
        tensors |= {f"{name}_packed": np.zeros((32, 24), np.uint8), f"{name}_scale": np.zeros((32, 1), np.uint8)}
    refused(write(tmp_path, flat(config), tensors), "experts.0.w2.weight_packed", "multiple of 32", packed=packed)


# Strictness.


def test_one_error_lists_all_that_does_not_fit(tmp_path):
    tensors = dict(tensors_of(LINEAR))
    del tensors["model.layers.0.self_attn.dt_bias"]
    tensors["model.norm.weight"] = np.zeros((1, 12), F32)
    tensors["model.layers.1.self_attn.q_norm.weight"] = np.zeros((5, 7), F32)
    tensors["model.layers.0.self_attn.A_log"] = np.zeros(2, F32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T
    text = refused(write(tmp_path, flat(LINEAR), tensors), str(tmp_path))
    assert text.splitlines()[0].endswith("tensors that do not fit config.json (5):")
    assert {line.strip() for line in text.splitlines()[1:]} == {
        "missing model.layers.0.self_attn.dt_bias [12]",
        "misshapen model.norm.weight [1, 12], allowed is [12]",
        "unread model.layers.1.self_attn.q_norm.weight [5, 7]",
        "misshapen model.layers.0.self_attn.A_log [2], allowed is [3]",
        "misshapen lm_head.weight [12, 31], allowed is [31, 12]",
    }


def test_long_lists_are_cut(tmp_path):
    tensors = {f"other.{name}": value for name, value in tensors_of(LINEAR).items()}
    lines = refused(write(tmp_path, flat(LINEAR), tensors)).splitlines()
    assert f"({2 * len(tensors)}):" in lines[0] and len(lines) == 22
    assert lines[-1].strip() == f"and {2 * len(tensors) - 20} more"


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_ignores_by_rule_what_is_not_of_the_text_model(tmp_path, prefix):
    extra = {
        "vision_tower.encoder.blocks.0.wqkv.weight": np.zeros(2, np.float64),
        "mm_projector.proj.0.weight": np.zeros(2, np.int8),
        f"{prefix}model.layers.2.eh_proj.weight": np.zeros(2, F32),
        f"{prefix}model.layers.10.mlp.up_proj.weight": np.zeros(2, F32),
    }
    tensors = {prefix + name: value for name, value in tensors_of(LINEAR).items()}
    loaded = hf.load(write(tmp_path, flat(LINEAR), tensors | extra))
    assert loaded.ignored == tuple(sorted(extra))
    assert same(loaded, hf.load(write(tmp_path / "alone", flat(LINEAR), tensors_of(LINEAR))))


@pytest.mark.parametrize("name", [
    "vision_tower", "text.vision_tower.x", "model.layers.x.weight", "model.layers.2", "model.norm.bias", "layers.2.x",
])  # fmt: skip
def test_ignores_nothing_else(tmp_path, name):
    refused(write(tmp_path, flat(LINEAR), tensors_of(LINEAR) | {name: np.zeros(2, F32)}), f"unread {name} [2]")


@pytest.mark.parametrize("text, words", [
    (None, ["no such file"]), ("{", ["not JSON"]), ("[]", ["list", "object"]), ("\xff", ["not JSON"]),
])  # fmt: skip
def test_refuses_a_config_json_that_is_none(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    refused(tmp_path, str(tmp_path / "config.json"), *words, error=ConfigError)


# The released table, as the specification has it.

K3_LAYER = {
    "input_layernorm.weight": ([7168], BF16), "post_attention_layernorm.weight": ([7168], BF16),
    "self_attention_res_norm.weight": ([7168], BF16), "self_attention_res_proj.weight": ([1, 7168], BF16),
    "mlp_res_norm.weight": ([7168], BF16), "mlp_res_proj.weight": ([1, 7168], BF16),
    "self_attn.g_proj.weight": ([12288, 7168], BF16), "self_attn.o_proj.weight": ([7168, 12288], BF16),
}  # fmt: skip
K3_KDA = {
    "self_attn.q_proj.weight": ([12288, 7168], BF16), "self_attn.k_proj.weight": ([12288, 7168], BF16),
    "self_attn.v_proj.weight": ([12288, 7168], BF16), "self_attn.b_proj.weight": ([96, 7168], BF16),
    "self_attn.f_a_proj.weight": ([128, 7168], BF16), "self_attn.f_b_proj.weight": ([12288, 128], BF16),
    "self_attn.q_conv1d.weight": ([12288, 1, 4], F32), "self_attn.k_conv1d.weight": ([12288, 1, 4], F32),
    "self_attn.v_conv1d.weight": ([12288, 1, 4], F32), "self_attn.A_log": ([128], F32),
    "self_attn.dt_bias": ([12288], F32), "self_attn.o_norm.weight": ([128], F32),
}  # fmt: skip
K3_MLA = {
    "self_attn.q_a_proj.weight": ([1536, 7168], BF16), "self_attn.q_a_layernorm.weight": ([1536], BF16),
    "self_attn.q_b_proj.weight": ([18432, 1536], BF16), "self_attn.kv_a_proj_with_mqa.weight": ([576, 7168], BF16),
    "self_attn.kv_a_layernorm.weight": ([512], BF16), "self_attn.kv_b_proj.weight": ([24576, 512], BF16),
}  # fmt: skip
K3_DENSE = {
    "mlp.gate_proj.weight": ([33792, 7168], BF16), "mlp.up_proj.weight": ([33792, 7168], BF16),
    "mlp.down_proj.weight": ([7168, 33792], BF16),
}  # fmt: skip
K3_MOE = {
    "block_sparse_moe.gate.weight": ([896, 7168], BF16), "block_sparse_moe.gate.e_score_correction_bias": ([896], F32),
    "block_sparse_moe.routed_expert_down_proj.weight": ([3584, 7168], BF16),
    "block_sparse_moe.routed_expert_up_proj.weight": ([7168, 3584], BF16),
    "block_sparse_moe.routed_expert_norm.weight": ([3584], BF16),
    "block_sparse_moe.shared_experts.gate_proj.weight": ([6144, 7168], BF16),
    "block_sparse_moe.shared_experts.up_proj.weight": ([6144, 7168], BF16),
    "block_sparse_moe.shared_experts.down_proj.weight": ([7168, 6144], BF16),
}  # fmt: skip
K3_EXPERT = {
    "w1.weight_packed": ([3072, 1792], np.uint8), "w1.weight_scale": ([3072, 112], np.uint8),
    "w3.weight_packed": ([3072, 1792], np.uint8), "w3.weight_scale": ([3072, 112], np.uint8),
    "w2.weight_packed": ([3584, 1536], np.uint8), "w2.weight_scale": ([3584, 96], np.uint8),
}  # fmt: skip
K3_GLOBAL = {
    "model.embed_tokens.weight": ([163840, 7168], BF16), "model.norm.weight": ([7168], BF16),
    "model.output_attn_res_norm.weight": ([7168], BF16), "model.output_attn_res_proj.weight": ([1, 7168], BF16),
    "lm_head.weight": ([163840, 7168], BF16),
}  # fmt: skip


def size(table):
    """Tensors, parameters (two for a byte of MXFP4 codes, none for its scale) and bytes."""
    per = {"packed": 2, "scale": 0}
    weights = sum(math.prod(shape) * per.get(name.rpartition("_")[2], 1) for name, (shape, _) in table.items())
    return len(table), weights, sum(math.prod(shape) * dtype.itemsize for shape, dtype in table.values())


def test_table_of_k3():
    table = hf.released_tensors(K3Config.k3())
    want = {PREFIX + name: entry for name, entry in K3_GLOBAL.items()}
    for layer in range(93):
        parts = [K3_LAYER, K3_MLA if layer + 1 in (*range(4, 93, 4), 93) else K3_KDA, K3_MOE if layer else K3_DENSE]
        for part in parts:
            want |= {f"{PREFIX}model.layers.{layer}.{name}": entry for name, entry in part.items()}
        for expert in range(896 if layer else 0):
            at = f"{PREFIX}model.layers.{layer}.block_sparse_moe.experts.{expert}."
            want |= {at + name: entry for name, entry in K3_EXPERT.items()}
    assert table == {name: (tuple(shape), dtype) for name, (shape, dtype) in want.items()}
    vision_tensors, vision_bytes = 165 + 3, 894_717_952
    assert size(table) == (497_220 - vision_tensors, 2_779_484_478_208, 1_560_860_324_864 - vision_bytes)


def test_table_of_kimi_linear():
    table = hf.released_tensors(K3Config.kimi_linear_48b())
    assert size(table)[:2] == (20_493, 49_122_681_728)
    attn = "model.layers.0.self_attn."
    want = {
        "model.embed_tokens.weight": ([163840, 2304], BF16), f"{attn}A_log": ([1, 1, 32, 1], F32),
        f"{attn}dt_bias": ([4096], F32), f"{attn}q_conv1d.weight": ([4096, 1, 4], BF16),
        f"{attn}o_norm.weight": ([128], BF16), f"{attn}g_a_proj.weight": ([128, 2304], BF16),
        f"{attn}g_b_proj.weight": ([4096, 128], BF16), "model.layers.3.self_attn.q_proj.weight": ([6144, 2304], BF16),
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": ([256], BF16),
        "model.layers.26.block_sparse_moe.experts.255.w1.weight": ([1024, 2304], BF16),
        "model.layers.26.block_sparse_moe.experts.255.w2.weight": ([2304, 1024], BF16),
    }  # fmt: skip
    assert all(table.get(name) == (tuple(shape), dtype) for name, (shape, dtype) in want.items())
    assert not [name for name in table if name.startswith(PREFIX) or "g_proj" in name or "_res_" in name]


@pytest.mark.parametrize("case", ["k3_mxfp4", "k3_mxfp4_wide", "kimi_linear_a", "kimi_linear_b"])
def test_table_of_golden_directories(case):
    directory = ROOT / "tests" / "golden" / case
    tensors = load_file(directory / "model.safetensors")
    table = hf.released_tensors(hf.read_config(directory))
    assert {name: shape for name, (shape, _) in table.items()} == {name: value.shape for name, value in tensors.items()}
    if case.startswith("k3"):
        assert all(table[name][1] == value.dtype for name, value in tensors.items())


# Memory. VmHWM, not ru_maxrss: the latter is inherited from the parent through exec.

LOAD = """
import json, sys
import jax, jax.numpy as jnp
from k3jax.io import hf

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

jnp.ones((8, 8)).sum().block_until_ready()
before = peak()
model = hf.load(sys.argv[1], **json.loads(sys.argv[2])).model
print((peak() - before) / sum(array.nbytes for array in jax.tree.leaves(model)))
"""


def peak(directory, **how):
    """The peak above that of an idle process, over the bytes that the loaded model holds."""
    command = [sys.executable, "-c", LOAD, str(directory), json.dumps(how)]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def large(layers, **changes):
    """Some 60 MB a layer in bfloat16, half of them in stacks of experts, and 40 MB of embedding and head."""
    fields = dict(
        vocab_size=10240, hidden_size=1024, num_hidden_layers=layers, first_k_dense_replace=1, intermediate_size=4096,
        kda_layers=tuple(layer for layer in range(layers) if layer % 4 != 3), kda_num_heads=8, kda_head_dim=128,
        num_attention_heads=8, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        num_experts=16, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=512, dtype="bfloat16",
    )  # fmt: skip
    return K3Config(**fields | changes)


def write_large(directory, config, at_least):
    """Random numbers repeated, in a file a layer or so; returns the directory."""
    noise = np.random.default_rng(0).normal(size=1 << 20)
    blocks = {np.dtype(np.uint8): (noise * 9 + 99).astype(np.uint8), F32: noise.astype(F32), BF16: noise.astype(BF16)}
    table = hf.released_tensors(config)
    assert size(table)[2] >= at_least
    names, shards = sorted(table), config.num_hidden_layers
    for shard in range(shards):
        part = {name: np.resize(blocks[table[name][1]], table[name][0]) for name in names[shard::shards]}
        write(directory / f"{shard}", {}, part)
        (directory / f"{shard}" / "model-00000.safetensors").rename(directory / f"{shard:03}.safetensors")
    (directory / "config.json").write_text(json.dumps(flat(config)))
    return directory


@pytest.fixture
def scratch():
    """A directory that is gone after the test: pytest keeps its own, and these are large."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory from /proc")


@on_linux
def test_loading_peaks_at_the_bytes_loaded(scratch):
    directory = write_large(scratch, large(6), at_least=300e6)
    assert 0.95 < peak(directory) < 1.2  # under 1 the measure itself would be wrong


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"dtype": "float32"}], ids=str)
def test_loading_2_gb_peaks_at_the_bytes_loaded(scratch, how):
    directory = write_large(scratch, large(38), at_least=2e9)
    assert 0.95 < peak(directory, **how) < 1.1


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"packed": True}], ids=str)
def test_loading_packed_experts_peaks_at_the_bytes_loaded(scratch, how):
    config = large(24, attn_res_block_size=12, routed_expert_hidden_size=512, num_experts=64)
    directory = write_large(scratch, config, at_least=1e9)
    assert 0.95 < peak(directory, **how) < 1.1
