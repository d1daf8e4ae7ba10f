"""K3Config: the released files against the presets, every refusal by name, and the plan of layers."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
from released import flat, nested

from k3jax.config import ConfigError, K3Config

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*/config.json"))

MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None, "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "mxfp4-pack-quantized", "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": None, "observer": "minmax",
                "observer_kwargs": {}, "actorder": None, "block_structure": None,
            },
        },
    },
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
}  # fmt: skip
# What the configuration class of the release writes of itself.
BOILERPLATE = {
    "_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "prefix": None,
    "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>", "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiK3Config",
        "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    },
    "text_config": BOILERPLATE | {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 7168,
        "num_hidden_layers": 93, "vocab_size": 163840, "tie_word_embeddings": False, "intermediate_size": 33792,
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-05,
        "initializer_range": 0.02, "max_position_embeddings": 1048576, "num_nextn_predict_layers": 0,
        "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "mla_use_output_gate": True, "attn_res_block_size": 12, "num_experts": 896, "num_experts_per_token": 16,
        "num_shared_experts": 2, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "dtype": "bfloat16",
        "transformers_version": "4.56.2", "use_cache": True,
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
        },
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": [
                4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 93,
            ],
            "kda_layers": [
                1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35,
                37, 38, 39, 41, 42, 43, 45, 46, 47, 49, 50, 51, 53, 54, 55, 57, 58, 59, 61, 62, 63, 65, 66, 67, 69,
                70, 71, 73, 74, 75, 77, 78, 79, 81, 82, 83, 85, 86, 87, 89, 90, 91,
            ],
        },
        "quantization_config": MXFP4,
    },
    "vision_config": {
        "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "init_pos_emb_height": 64,
        "init_pos_emb_time": 4, "init_pos_emb_width": 64, "linear_bias": False, "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "mlp_type": "mlp2", "mm_hidden_size": 1024, "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm", "patch_embed_proj_bias": False, "patch_size": 14, "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
        "qkv_hidden_size": 1536, "text_hidden_size": 7168, "vt_hidden_size": 1024, "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27,
    },
}  # fmt: skip
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "first_k_dense_replace": 1,
    "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
    "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "transformers_version": "4.57.1",
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def changed(config, path, value):
    """A copy with the entry at `path` (keys with dots between) set; value `...` takes it out."""
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return config


def refused(config, *words):
    with pytest.raises(ConfigError) as caught:
        K3Config.from_hf(config)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# What must load.


def test_released_files_are_the_presets():
    assert K3Config.from_hf(K3) == K3Config.k3()
    assert K3Config.from_hf(KIMI_LINEAR) == K3Config.kimi_linear_48b()


def test_tiny_is_the_shipped_checkpoint():
    shipped = Path(__file__).parents[1] / "checkpoints" / "k3-tiny" / "config.json"
    assert K3Config.from_hf(json.loads(shipped.read_text())) == K3Config.tiny()


def test_text_config_alone_is_a_flat_file():
    want = dataclasses.replace(K3Config.k3(), media_placeholder_token_id=None)
    assert K3Config.from_hf(K3["text_config"]) == want


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.parent.name)
def test_golden_files(path):
    found = json.loads(path.read_text())
    text = found.get("text_config", found)
    config, linear = K3Config.from_hf(found), text["linear_attn_config"]
    same = set(vars(config)) & set(text) - {"use_full_rank_gate"}
    assert len(same) >= 25
    assert {name: getattr(config, name) for name in same} == {name: text[name] for name in same}
    assert [layer + 1 for layer in config.kda_layers] == linear["kda_layers"]
    assert [layer + 1 for layer in config.mla_layers] == linear["full_attn_layers"]
    assert (config.kda_num_heads, config.kda_head_dim) == (linear["num_heads"], linear["head_dim"])
    assert config.short_conv_kernel_size == linear["short_conv_kernel_size"]
    assert config.gate_lower_bound == linear.get("gate_lower_bound")
    assert config.use_full_rank_gate == linear.get("use_full_rank_gate", False)
    assert config.max_position_embeddings == 4096
    assert config.media_placeholder_token_id == found.get("media_placeholder_token_id")


# Of the released K3: a changed key, and the fields that then differ from the preset.
VARIATIONS = [
    ("text_config.hidden_size", 64, dict(hidden_size=64)),
    ("text_config.rms_norm_eps", 1, dict(rms_norm_eps=1)),  # a whole number may stand for a float
    ("text_config.num_expert_group", 8, dict(num_expert_group=8)),
    ("text_config.num_nextn_predict_layers", 1, {}),
    ("text_config.q_lora_rank", None, dict(q_lora_rank=None)),
    ("text_config.routed_expert_hidden_size", None, dict(routed_expert_hidden_size=None)),
    ("text_config.latent_moe_use_norm", False, dict(latent_moe_use_norm=False)),
    ("text_config.attn_res_block_size", None, dict(attn_res_block_size=None)),
    ("text_config.attn_res_block_size", ..., dict(attn_res_block_size=None)),
    ("text_config.mla_use_output_gate", ..., dict(mla_use_output_gate=False)),
    ("text_config.moe_layer_freq", 2, dict(moe_layer_freq=2)),
    ("text_config.linear_attn_config.gate_lower_bound", None, dict(gate_lower_bound=None)),
    ("text_config.linear_attn_config.use_full_rank_gate", ..., dict(use_full_rank_gate=False)),
    ("text_config.linear_attn_config.short_conv_kernel_size", 3, dict(short_conv_kernel_size=3)),
    ("text_config.quantization_config", ..., {}),
    ("text_config.quantization_config", None, {}),
    ("quantization_config", MXFP4, {}),
    ("text_config.dtype", "float32", dict(dtype="float32")),
    ("text_config.dtype", ..., {}),  # as the file's top level says
    ("text_config.eos_token_id", None, {}),
    ("text_config.num_key_value_heads", ..., {}),
    ("text_config.model_max_length", 7, {}),
    ("vision_config", ..., {}),
    *((f"text_config.{key}", value, {}) for key, value in {
        "_attn_implementation_autoset": True, "_attn_implementation": "eager", "torch_dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "rope_theta": 1e4, "rope_scaling": None,
        "use_mamba_kernels": True, "attention_dropout": 0.1, "head_dim": 74, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "pretraining_tp": 1, "transformers_version": "5.0.0", "min_p": None,
        "sliding_window": None,  # null asks for nothing, known or not
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize("path, value, fields", VARIATIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_variations_load(path, value, fields):
    assert K3Config.from_hf(changed(K3, path, value)) == dataclasses.replace(K3Config.k3(), **fields)


def test_group_limited_routing():
    text = flat(K3Config.tiny(), num_expert_group=4, topk_group=2)
    config = K3Config.from_hf(text)
    assert (config.num_expert_group, config.topk_group) == (4, 2)
    plain = K3Config.from_hf(text | {"use_grouped_topk": False})
    assert (plain.num_expert_group, plain.topk_group) == (1, 1)


@pytest.mark.parametrize("keys, dtype", [
    ({}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16"), ({"dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
])  # fmt: skip
def test_dtype_of_a_flat_file(keys, dtype):
    found = changed(KIMI_LINEAR, "dtype", ...) | keys
    assert K3Config.from_hf(found).dtype == dtype


def test_all_dense_needs_no_mixture_fields():
    found = {key: value for key, value in KIMI_LINEAR.items() if "expert" not in key and "moe" not in key}
    config = K3Config.from_hf(found | {"first_k_dense_replace": 27, "routed_scaling_factor": None})
    assert config.moe_layers == ()


def test_reads_what_it_writes():
    """Of every field another value than the default, so that none is dropped."""
    config = K3Config.tiny(
        rms_norm_eps=1e-4, short_conv_kernel_size=3, gate_lower_bound=-4.0, activation_situ_beta=3.0,
        activation_situ_linear_beta=12.0, moe_layer_freq=2, num_shared_experts=3, latent_moe_use_norm=False,
        moe_renormalize=False, routed_scaling_factor=2.5, num_expert_group=4, topk_group=3, dtype="float32",
    )  # fmt: skip
    default = {field.name: field.default for field in dataclasses.fields(config)}
    unset = {"kda_decay_rank", "kda_gate_rank", "latent_norm_eps", "media_placeholder_token_id"}
    assert {name for name, value in vars(config).items() if value == default[name]} == unset
    assert K3Config.from_hf(flat(config)) == K3Config.from_hf(nested(config)) == config


# What must be refused, by name.


@pytest.mark.parametrize("path", [
    "frobnicate", "text_config.frobnicate", "text_config.linear_attn_config.frobnicate",
    "text_config.quantization_config.frobnicate", "text_config.quantization_config.config_groups.group_0.frobnicate",
    "text_config.sliding_window", "text_config.num_experts_per_tok",
])  # fmt: skip
def test_refuses_unknown_fields(path):
    refused(changed(K3, path, 1), path.rpartition(".")[2], "unknown")


REQUIRED = """vocab_size hidden_size num_hidden_layers rms_norm_eps num_attention_heads kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim hidden_act intermediate_size linear_attn_config mla_use_nope
    activation_situ_beta activation_situ_linear_beta num_experts num_experts_per_token moe_intermediate_size
    num_shared_experts routed_scaling_factor moe_renormalize moe_router_activation_func latent_moe_use_norm
    max_position_embeddings linear_attn_config.num_heads linear_attn_config.head_dim linear_attn_config.kda_layers
    linear_attn_config.full_attn_layers quantization_config.format""".split()


@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
@pytest.mark.parametrize("name", REQUIRED)
def test_refuses_missing_fields(name, value):
    refused(changed(K3, f"text_config.{name}", value), name.rpartition(".")[2])


def test_refuses_a_missing_length():
    refused(changed(KIMI_LINEAR, "model_max_length", ...), "max_position_embeddings", "model_max_length")


@pytest.mark.parametrize("path, value, allowed", [
    ("hidden_act", "gelu", "situ"), ("moe_router_activation_func", "softmax", "sigmoid"),
    ("topk_method", "greedy", "noaux_tc"), ("mla_use_nope", False, "True"), ("mla_use_nope", 1, "True"),
    ("tie_word_embeddings", True, "False"), ("attention_bias", True, "False"), ("model_type", "deepseek_v3", "kimi"),
    ("dtype", "float16", "bfloat16"), ("torch_dtype", "float8_e4m3fn", "float32"), ("use_grouped_topk", 1, "True"),
    ("num_key_value_heads", 8, "96"), ("attn_res_block_size", 0, "1 or more"), ("vocab_size", 0, "1 or more"),
    ("num_hidden_layers", -1, "one-based"), ("moe_layer_freq", 0, "1 or more"), ("rms_norm_eps", 0.0, "positive"),
    ("first_k_dense_replace", -1, "0 or more"), ("num_shared_experts", -1, "0 or more"),
    ("num_experts", 0, "1 or more"), ("num_experts_per_token", 897, "896"), ("num_experts_per_token", 0, "896"),
    ("num_expert_group", 3, "divisor"), ("topk_group", 2, "1 to"), ("topk_group", 0, "1 to"),
    ("moe_intermediate_size", 0, "1 or more"), ("q_lora_rank", 0, "1 or more"),
    ("linear_attn_config.gate_lower_bound", 5.0, "negative"), ("linear_attn_config.short_conv_kernel_size", 1, "2"),
    ("quantization_config.format", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    ("quantization_config.quant_method", "fp8", "compressed-tensors"),
    ("quantization_config.config_groups.group_0.weights.num_bits", 8, "4"),
    ("quantization_config.config_groups.group_0.weights.group_size", 16, "32"),
    ("quantization_config.config_groups.group_0.weights.symmetric", False, "True"),
    ("quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}, "unknown"),
    ("quantization_config.kv_cache_scheme", {"num_bits": 8}, "unknown"),
])  # fmt: skip
def test_refuses_values_by_name_and_says_what_is_allowed(path, value, allowed):
    refused(changed(K3, f"text_config.{path}", value), path.rpartition(".")[2], allowed)


@pytest.mark.parametrize("groups, chosen", [((4, 1), 5), ((16, 3), 4)])
def test_refuses_more_experts_than_the_groups_leave(groups, chosen):
    """16 experts: 4 groups of 4, of which 1 stays; 16 groups of 1, of which 3 stay."""
    text = flat(K3Config.tiny(), num_expert_group=groups[0], topk_group=groups[1])
    assert K3Config.from_hf(text | {"num_experts_per_token": chosen - 1})
    refused(text | {"num_experts_per_token": chosen}, "num_experts_per_token", f"1 to {chosen - 1}")


@pytest.mark.parametrize("path, value, allowed", [
    ("hidden_size", "7168", "integer"), ("hidden_size", 7168.0, "integer"), ("hidden_size", True, "integer"),
    ("hidden_size", [7168], "integer"), ("attn_res_block_size", False, "integer"), ("rms_norm_eps", "1e-5", "number"),
    ("routed_scaling_factor", True, "number"), ("moe_renormalize", 1, "true or false"),
    ("latent_moe_use_norm", "true", "true or false"), ("eos_token_id", [163586, 163585], "integer"),
    ("hidden_act", 3, "situ"), ("linear_attn_config", [], "object"), ("quantization_config", "mxfp4", "object"),
    ("linear_attn_config.head_dim", "128", "integer"), ("linear_attn_config.use_full_rank_gate", 1, "true or false"),
    ("linear_attn_config.gate_lower_bound", "-5", "number"), ("linear_attn_config.kda_layers", 4, "list"),
    ("linear_attn_config.kda_layers", [1.0], "list"), ("linear_attn_config.full_attn_layers", [True], "list"),
    ("quantization_config.config_groups.group_0", 4, "object"),
])  # fmt: skip
def test_refuses_wrong_json_types(path, value, allowed):
    refused(changed(K3, f"text_config.{path}", value), path.rpartition(".")[2], "allowed is", allowed)


def test_refuses_a_text_config_that_is_no_object():
    refused(K3 | {"text_config": "kimi_linear"}, "text_config", "object")


@pytest.mark.parametrize("kda, full, words", [
    ([1, 2, 3, 5], [4, 5, 6], ["[5]", "twice"]),
    ([1, 2, 2, 3, 5], [4, 6], ["[2]", "twice"]),
    ([1, 2, 3], [4, 6], ["[5]", "neither"]),
    ([1, 2, 3, 5, 7], [4, 6], ["[7]", "one-based", "1 to num_hidden_layers=6"]),
    ([0, 1, 2, 4], [3, 5], ["[0]", "one-based", "1 to num_hidden_layers=6"]),  # zero-based lists
    ([-1, 1, 2, 3, 4], [5, 6], ["[-1]", "one-based"]),
])  # fmt: skip
def test_refuses_layer_lists_that_do_not_cover_all_layers_once(kda, full, words):
    text = flat(K3Config.tiny(num_hidden_layers=6, kda_layers=(0, 1, 2, 4)))
    text["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    refused(text, "kda_layers", *words)


@pytest.mark.parametrize("kda, full", [([3, 1, 2], [4]), ([], [1, 2, 3, 4]), ([1, 2, 3, 4], []), ([1, 2], [3, 4])])
def test_layer_lists_are_one_based(kda, full):
    text = flat(K3Config.tiny(num_hidden_layers=4, kda_layers=()))
    text["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    config = K3Config.from_hf(text)
    assert config.kda_layers == tuple(sorted(layer - 1 for layer in kda))
    assert config.mla_layers == tuple(layer - 1 for layer in full)


@pytest.mark.parametrize("vision", [{"vision_config": {"patch_size": 14}}, {"media_placeholder_token_id": 163605}])
def test_refuses_vision_in_a_flat_file(vision):
    refused(KIMI_LINEAR | vision, "vision", "not supported")


# The plan of layers.


def test_k3_plan():
    c = K3Config.k3()
    assert c.mla_layers == (*range(3, 92, 4), 92) and len(c.kda_layers) == 69
    assert c.moe_layers == tuple(range(1, 93))
    assert (c.qk_head_dim, c.latent_size, c.expert_width, c.decay_rank, c.gate_rank) == (192, 576, 3584, 128, 128)
    for layer in range(93):  # the specification's table of depth sources
        assert c.starts_block(layer) == (layer in (0, 12, 24, 36, 48, 60, 72, 84))
        assert c.depth_sources(layer, "attn") == (layer + 11) // 12 + 1
        assert c.depth_sources(layer, "mlp") == layer // 12 + 2


def test_plain_residual_has_one_source():
    c = K3Config.kimi_linear_48b()
    assert {c.depth_sources(layer, site) for layer in range(27) for site in ("attn", "mlp")} == {1}
    assert not any(map(c.starts_block, range(27))) and c.expert_width == 2304


def test_slice_keeps_the_first_layers():
    c = K3Config.k3()
    assert c.slice(93) == c
    part = c.slice(5)
    assert (part.kda_layers, part.mla_layers, part.moe_layers) == ((0, 1, 2, 4), (3,), (1, 2, 3, 4))
    assert part == dataclasses.replace(c, num_hidden_layers=5, kda_layers=(0, 1, 2, 4))
    assert c.slice(1).moe_layers == ()
    for layers in (0, 94):
        with pytest.raises(ConfigError, match=f"layers={layers}.*1 to 93"):
            c.slice(layers)


def test_refuses_layers_that_are_not_there():
    with pytest.raises(ConfigError, match=r"kda_layers=\[13, 99\].*below 13"):
        K3Config.tiny(kda_layers=(0, 13, 99))


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("hidden_size", True, "an integer"), ("num_experts", 8.0, "an integer"), ("rms_norm_eps", "1e-5", "a number"),
        ("mla_use_output_gate", 1, "true or false"), ("dtype", "float16", "'bfloat16' or 'float32'"),
        ("kda_layers", [0], "a tuple of integers"), ("kda_layers", (True,), "a tuple of integers"),
    ],
)  # fmt: skip
def test_a_config_made_by_hand_is_checked_too(field, value, allowed):
    with pytest.raises(ConfigError, match=re.escape(f"{field}={value!r}: allowed is {allowed}")):
        dataclasses.replace(K3Config.tiny(), **{field: value})
