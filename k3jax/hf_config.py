"""A `config.json` in and out: K3's nested one or Kimi-Linear's flat one.

Of what is read, every field is used or known to have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from k3jax.config import DTYPES, FIELDS, ConfigError, K3Config, check_type, require

# Keys of `linear_attn_config` and the fields that they fill; the two lists of layers are read apart.
_LINEAR = {
    "num_heads": "kda_num_heads", "head_dim": "kda_head_dim", "short_conv_kernel_size": "short_conv_kernel_size",
    "use_full_rank_gate": "use_full_rank_gate", "gate_lower_bound": "gate_lower_bound",
}  # fmt: skip
_LAYER_LISTS = ("kda_layers", "full_attn_layers")
# Keys of the text model and the fields that they fill. Ranks come from the tensors, the latent norms' eps from no file.
_TEXT = {"torch_dtype": "dtype", "model_max_length": "max_position_embeddings"} | {
    name: name
    for name in FIELDS
    if name not in {*_LINEAR.values(), "kda_layers", "kda_decay_rank", "kda_gate_rank", "latent_norm_eps"}
}
_REQUIRED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "num_attention_heads", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_nope", "hidden_act", "intermediate_size",
    "linear_attn_config",
}  # fmt: skip
_REQUIRED_OF_SITU = {"activation_situ_beta", "activation_situ_linear_beta"}
_REQUIRED_OF_MOE = {
    "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_renormalize",
    "moe_router_activation_func", "routed_scaling_factor",
}  # fmt: skip
# Keys with the values that this package implements.
_FIXED: dict[str, tuple[Any, ...]] = {
    "mla_use_nope": (True,),  # rotary MLA is not supported
    "tie_word_embeddings": (False,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "use_grouped_topk": (True, False),
    "attention_bias": (False,),
    "dtype": DTYPES,
    "torch_dtype": DTYPES,
    "model_type": ("kimi_linear", "kimi_k3"),
}
# Keys that have no effect on the forward pass: what a configuration class writes of itself, training and generation
# settings, and rotary settings of a model that rotates nothing.
_INERT = set(
    """_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _from_model_config
    _name_or_path add_cross_attention architectures attention_dropout attn_implementation auto_map aux_loss_alpha
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index image_placeholder
    initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length max_new_tokens min_length min_p
    no_repeat_ngram_size num_beam_groups num_beams num_nextn_predict_layers num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate rope_interleave rope_parameters
    rope_scaling rope_theta router_aux_loss_coef sep_token_id seq_aux suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript transformers_version typical_p
    use_bfloat16 use_cache use_mamba_kernels""".split()
)
# How packed experts are announced. `ignore` is all that stays plain; as released it lacks its last three entries.
_MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "mxfp4-pack-quantized",
            "weights": {
                "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax", "observer_kwargs": {},
            },
        },
    },
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*", r"re:.*block_sparse_moe\.gate.*", "re:.*routed_expert_.*_proj.*",
        "re:.*_res_proj.*",
    ],
}  # fmt: skip
# Beside `text_config`: the vision tower (never built; its tensors stay on disk), and what the text model may leave out.
_SHARED = {
    "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id",
    "media_placeholder_token_id",
}  # fmt: skip


def read(config: Mapping[str, Any]) -> K3Config:
    """See K3Config.from_hf."""
    text = _text_config(config)
    _require_keys(text, _REQUIRED, "config")
    _check_fixed(text)
    _check_equal(text, {"num_key_value_heads": text["num_attention_heads"]}, "config")
    if "quantization_config" in text:
        _check_quantization(_object(text, "quantization_config"))
    linear = _object(text, "linear_attn_config")
    _refuse_unknown(linear, {*_LINEAR, *_LAYER_LISTS}, "linear_attn_config")
    _require_keys(linear, {"num_heads", "head_dim", *_LAYER_LISTS}, "linear_attn_config")

    fields: dict[str, Any] = {"dtype": "float32"} | _read(text, _TEXT) | _read(linear, _LINEAR, "linear_attn_config.")
    if not text.get("use_grouped_topk", True):
        fields |= {"num_expert_group": 1, "topk_group": 1}
    result = K3Config(**fields, kda_layers=_kda_layers(linear, fields["num_hidden_layers"]))
    _check_complete(result, text)
    return result


def write(config: K3Config, *, packed: bool = False) -> dict[str, Any]:
    """See K3Config.to_hf."""
    c, eps = config, K3Config.latent_norm_eps
    require(c.latent_norm_eps == eps, "latent_norm_eps", c.latent_norm_eps, f"{eps}: a config.json has no place for it")
    text: dict[str, Any] = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    text |= {name: getattr(c, name) for name, field in _TEXT.items() if name == field}
    text |= {
        "num_key_value_heads": c.num_attention_heads, "mla_use_nope": True, "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    linear = {name: getattr(c, field) for name, field in _LINEAR.items()}
    lists = ([layer + 1 for layer in layers] for layers in (sorted(c.kda_layers), c.mla_layers))
    text["linear_attn_config"] = _present(linear | dict(zip(_LAYER_LISTS, lists, strict=True)))
    if packed:
        text["quantization_config"] = copy.deepcopy(_MXFP4)
    text = _present(text)
    if c.attn_res_block_size is None and c.media_placeholder_token_id is None:
        text["model_max_length"] = text.pop("max_position_embeddings")
        return text
    top = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "tie_word_embeddings": False}
    top |= {name: value for name, value in text.items() if name in _SHARED and name != "quantization_config"}
    text.pop("media_placeholder_token_id", None)
    return top | {"text_config": text}


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's keys, flat. Null is the same as absent, as for the released code."""
    if "text_config" in config:
        _refuse_unknown(_present(config), {"text_config", "vision_config", *_SHARED, *_FIXED, *_INERT}, "config")
        _check_fixed(config)
        shared = {name: value for name, value in _present(config).items() if name in _SHARED}
        text = shared | _object(config, "text_config")
    elif "vision_config" in config or "media_placeholder_token_id" in config:
        raise ConfigError("vision_config without text_config: vision is not supported, only K3's text model is")
    else:
        text = _present(config)
    used = {"linear_attn_config", "num_key_value_heads", "quantization_config"}
    _refuse_unknown(text, {*used, *_TEXT, *_FIXED, *_INERT}, "text_config" if "text_config" in config else "config")
    return text


def _read(source: Mapping[str, Any], names: Mapping[str, str], where: str = "") -> dict[str, Any]:
    """The fields that `source` fills, each of the type that the field declares; an integer may stand for a float."""
    fields = {}
    for name, field in names.items():
        if name in source:
            check_type(field, where + name, source[name])
            fields[field] = source[name]
    return fields


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    require(isinstance(fields[name], Mapping), name, fields[name], "an object")
    return _present(fields[name])


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = ", ".join(sorted(set(fields) - known))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown}; it may change the model, so it is not ignored")


def _require_keys(fields: Mapping[str, Any], required: set[str], where: str) -> None:
    missing = ", ".join(sorted(required - set(fields)))
    if missing:
        raise ConfigError(f"{where}: missing {missing}")


def _check_fixed(fields: Mapping[str, Any]) -> None:
    for name, allowed in _FIXED.items():
        value = fields.get(name)
        if value is not None:  # compared as written: 1 is not true
            require(repr(value) in map(repr, allowed), name, value, " or ".join(map(repr, allowed)))


def _check_complete(config: K3Config, text: Mapping[str, Any]) -> None:
    """What a model of this kind must say for itself, since a default may be another model's value."""
    if config.hidden_act == "situ":
        _require_keys(text, _REQUIRED_OF_SITU, "hidden_act='situ'")
    if config.moe_layers:
        _require_keys(text, _REQUIRED_OF_MOE, "config with mixture layers")
    if config.moe_layers and config.routed_expert_hidden_size is not None:
        _require_keys(text, {"latent_moe_use_norm"}, "config with routed_expert_hidden_size")
    if not {"max_position_embeddings", "model_max_length"} & set(text):
        raise ConfigError("config: missing max_position_embeddings or model_max_length")


def _kda_layers(linear: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Zero-based KDA layers from the two one-based lists, which must cover 1..layers once."""
    for name in _LAYER_LISTS:
        ok = isinstance(linear[name], list | tuple) and all(type(layer) is int for layer in linear[name])
        require(ok, name, linear[name], "a list of integers")
    named, all_layers = [*linear["kda_layers"], *linear["full_attn_layers"]], set(range(1, layers + 1))
    problems = {
        f"out of range; they are one-based, 1 to num_hidden_layers={layers}": set(named) - all_layers,
        "named twice": {layer for layer in named if named.count(layer) > 1},
        "named in neither": all_layers - set(named),
    }
    for problem, wrong in problems.items():
        if wrong:
            shown = ", ".join(map(str, sorted(wrong)[:8])) + ", ..." * (len(wrong) > 8)
            raise ConfigError(f"{' and '.join(_LAYER_LISTS)}: [{shown}] {problem}")
    return tuple(sorted(layer - 1 for layer in linear["kda_layers"]))


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    """Only MXFP4 as released; which tensors are packed is read from the tensors, not from the ignore list."""
    where = "quantization_config"
    fixed = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    inert = {"config_groups", "ignore", "quantization_status", "global_compression_ratio", "version"}
    _require_keys(quantization, {"format"}, where)
    _refuse_unknown({name: value for name, value in quantization.items() if value}, {*fixed, *inert}, where)
    _check_equal(quantization, fixed, where)
    groups = _object(quantization, "config_groups") if "config_groups" in quantization else {}
    for name in groups:
        group = _object(groups, name)
        _refuse_unknown(group, {"format", "targets", "weights"}, f"{where}.{name}")  # activations are not quantised
        weights = dict(num_bits=4, type="float", group_size=32, strategy="group", symmetric=True, dynamic=False)
        _check_equal(_object(group, "weights") if "weights" in group else {}, weights, f"{where}.{name}.weights")


def _check_equal(fields: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    for name, value in wanted.items():
        require(fields.get(name, value) == value, f"{where}.{name}", fields.get(name), repr(value))
