"""K3Config: every architecture number of a Kimi K3 or Kimi-Linear checkpoint, once, with its unit.

Axis letters, one meaning each, used in shapes and name suffixes everywhere:

    T packed tokens   B rows or slots   S cached positions   D model width    H heads on this shard
    K key dim         V value dim       C latent or channels W conv width     E experts on this shard
    A active experts  L expert latent   F expert hidden      R depth sources  N vocabulary

Both released families carry `model_type: kimi_linear`, so every variant is decided by fields, never by a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Mixer = Literal["kda", "mla"]


class ConfigError(ValueError):
    """A configuration that cannot be right, or that asks for something this package does not do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """The architecture. Names follow the released `text_config`; layer indices are zero-based."""

    # Trunk.
    vocab_size: int  # N, token ids
    hidden_size: int  # D, channels
    num_hidden_layers: int  # layers
    rms_norm_eps: float = 1e-5  # added to a mean square; all norms but the two latent ones
    max_position_embeddings: int = 1048576  # context, tokens (nothing is rotated)
    attn_res_block_size: int | None = None  # layers per depth block; None: plain residual stream

    # Kimi Delta Attention.
    kda_layers: tuple[int, ...] = ()  # zero-based layers whose mixer is KDA; the others are MLA
    kda_num_heads: int = 1  # H
    kda_head_dim: int = 1  # K = V, channels a head
    short_conv_kernel_size: int = 4  # W, taps; W-1 past inputs are kept
    gate_lower_bound: float | None = None  # nats a token: g = bound*sigmoid(.); None: g = -exp(A_log)*softplus(.)
    use_full_rank_gate: bool = False  # output gate g_proj(x), or g_b_proj(g_a_proj(x))
    kda_decay_rank: int | None = None  # rank of f_a_proj; None: kda_head_dim
    kda_gate_rank: int | None = None  # rank of g_a_proj; None: kda_head_dim

    # Multi-head latent attention, without rotary positions.
    num_attention_heads: int = 1  # H
    q_lora_rank: int | None = None  # channels; None: one full q_proj
    kv_lora_rank: int = 1  # channels of the cached latent
    qk_nope_head_dim: int = 1  # key channels a head made from the latent
    qk_rope_head_dim: int = 1  # key channels shared by all heads (never rotated)
    v_head_dim: int = 1  # value channels a head
    mla_use_output_gate: bool = False  # multiply the heads' output by sigmoid(g_proj(x))
    latent_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm: a constant of the released code

    # Feed-forward.
    hidden_act: Literal["situ", "silu"] = "silu"
    activation_situ_beta: float = 4.0  # limit of the gate branch
    activation_situ_linear_beta: float = 25.0  # limit of the up branch
    intermediate_size: int = 1  # hidden channels of the dense layers
    first_k_dense_replace: int = 0  # dense layers before the first mixture of experts
    moe_layer_freq: int = 1  # layer l is a mixture iff l >= first_k_dense_replace and l % moe_layer_freq == 0
    num_experts: int = 0  # E
    num_experts_per_token: int = 1  # A
    num_shared_experts: int = 0  # multiplies the width of the one shared MLP
    moe_intermediate_size: int = 1  # F, hidden channels of an expert
    routed_expert_hidden_size: int | None = None  # L, latent channels; None: experts at full width D
    latent_moe_use_norm: bool = True  # RMSNorm on the complete routed sum, before the up-projection
    moe_renormalize: bool = True  # divide the chosen scores by their sum
    routed_scaling_factor: float = 1.0  # on the weights, before combination
    num_expert_group: int = 1  # groups of experts
    topk_group: int = 1  # groups a token may use

    # Tokens and storage.
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    media_placeholder_token_id: int | None = None  # image parts: refused, vision is not supported
    dtype: str = "bfloat16"  # of the trunk as stored

    def __post_init__(self) -> None:
        _validate(self)

    # -- the plan of layers --------------------------------------------------------------------------------------
    def mixer(self, layer: int) -> Mixer:
        return "kda" if layer in self.kda_layers else "mla"

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.kda_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe(layer))

    def starts_block(self, layer: int) -> bool:
        """Whether this layer stores the running sum as a depth source and restarts it."""
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0

    def depth_sources(self, layer: int, site: Literal["attn", "mlp"]) -> int:
        """R: stored blocks plus the running sum, as seen by the layer's attention or MLP site."""
        if self.attn_res_block_size is None:
            return 1
        stored = -(-layer // self.attn_res_block_size)
        return stored + 1 + (site == "mlp" and self.starts_block(layer))

    # -- sizes that follow ---------------------------------------------------------------------------------------
    @property
    def qk_head_dim(self) -> int:
        """MLA key channels a head, latent-made and shared parts together; the softmax scale is this ** -0.5."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Numbers a token keeps in one MLA layer: the normed latent and the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Input and output channels of a routed expert: L, or D where there is no latent."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def decay_rank(self) -> int:
        return self.kda_decay_rank or self.kda_head_dim

    @property
    def gate_rank(self) -> int:
        return self.kda_gate_rank or self.kda_head_dim

    def slice(self, layers: int) -> K3Config:
        """The first `layers` layers at true width, so that one GPU can hold a part of K3."""
        if not 1 <= layers <= self.num_hidden_layers:
            raise ConfigError(f"slice(layers={layers}): allowed are 1 to {self.num_hidden_layers}")
        kept = tuple(layer for layer in self.kda_layers if layer < layers)
        return dataclasses.replace(self, num_hidden_layers=layers, kda_layers=kept)

    # -- constructors --------------------------------------------------------------------------------------------
    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> K3Config:
        """Read a `config.json`: K3's nested one or Kimi-Linear's flat one.

        Raises ConfigError on a field that is neither used nor known to have no effect, so that nothing is silently lost.
        """
        return _from_hf(config)

    @classmethod
    def k3(cls) -> K3Config:
        """The released Kimi K3: 93 layers, 2.78 T parameters."""
        mla = {*range(3, 92, 4), 92}
        return cls(
            vocab_size=163840, hidden_size=7168, num_hidden_layers=93, attn_res_block_size=12,
            kda_layers=tuple(layer for layer in range(93) if layer not in mla),
            kda_num_heads=96, kda_head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True,
            num_attention_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, mla_use_output_gate=True,
            hidden_act="situ", intermediate_size=33792, first_k_dense_replace=1,
            num_experts=896, num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=3072,
            routed_expert_hidden_size=3584, routed_scaling_factor=1.0,
            bos_token_id=163584, eos_token_id=163586, pad_token_id=163839, media_placeholder_token_id=163605,
        )  # fmt: skip

    @classmethod
    def kimi_linear_48b(cls) -> K3Config:
        """The released Kimi-Linear-48B-A3B: 27 layers, 49.1 B parameters, one GPU."""
        mla = {*range(3, 24, 4), 26}
        return cls(
            vocab_size=163840, hidden_size=2304, num_hidden_layers=27,
            kda_layers=tuple(layer for layer in range(27) if layer not in mla), kda_num_heads=32, kda_head_dim=128,
            num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            hidden_act="silu", intermediate_size=9216, first_k_dense_replace=1,
            num_experts=256, num_experts_per_token=8, num_shared_experts=1, moe_intermediate_size=1024,
            routed_scaling_factor=2.446,
            bos_token_id=163584, eos_token_id=163586, pad_token_id=163839,
        )  # fmt: skip

    @classmethod
    def tiny(cls, **changes: Any) -> K3Config:
        """The shape of checkpoints/k3-tiny: every part of K3 switched on, small enough for a laptop."""
        fields: dict[str, Any] = dict(
            vocab_size=2048, hidden_size=128, num_hidden_layers=13, max_position_embeddings=4096, attn_res_block_size=4,
            kda_layers=(0, 1, 2, 4, 5, 6, 8, 9, 10), kda_num_heads=8, kda_head_dim=32, gate_lower_bound=-5.0,
            use_full_rank_gate=True, num_attention_heads=8, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32,
            qk_rope_head_dim=16, v_head_dim=32, mla_use_output_gate=True,
            hidden_act="situ", intermediate_size=512, first_k_dense_replace=1,
            num_experts=16, num_experts_per_token=4, num_shared_experts=1, moe_intermediate_size=256,
            routed_expert_hidden_size=32, bos_token_id=2040, eos_token_id=2042, pad_token_id=2047,
        )  # fmt: skip
        return cls(**{**fields, **changes})


# -- checks ------------------------------------------------------------------------------------------------------


def _validate(c: K3Config) -> None:
    for name in _FIELDS:
        _check_type(name, name, getattr(c, name))
    _require(c.dtype in _FIXED["dtype"], "dtype", c.dtype, " or ".join(map(repr, _FIXED["dtype"])))
    optional = ("attn_res_block_size", "q_lora_rank", "routed_expert_hidden_size", "kda_decay_rank", "kda_gate_rank")
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "kda_num_heads", "kda_head_dim",
        "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
        "moe_layer_freq", "num_expert_group", *optional,
    ):  # fmt: skip
        value = getattr(c, name)
        if not (value is None and name in optional):
            _require(isinstance(value, int) and value >= 1, name, value, "an integer of 1 or more")
    _require(c.short_conv_kernel_size >= 2, "short_conv_kernel_size", c.short_conv_kernel_size, "2 or more taps")
    for name in ("rms_norm_eps", "latent_norm_eps", "activation_situ_beta", "activation_situ_linear_beta"):
        _require(getattr(c, name) > 0, name, getattr(c, name), "a positive number")
    _require(c.hidden_act in ("situ", "silu"), "hidden_act", c.hidden_act, "'situ' or 'silu'")
    _require(
        c.gate_lower_bound is None or c.gate_lower_bound < 0,
        "gate_lower_bound",
        c.gate_lower_bound,
        "a negative number or null",
    )
    wrong = [layer for layer in c.kda_layers if not 0 <= layer < c.num_hidden_layers]
    _require(not wrong, "kda_layers", wrong, f"zero-based layers below {c.num_hidden_layers}")
    _require(0 <= c.first_k_dense_replace, "first_k_dense_replace", c.first_k_dense_replace, "0 or more")
    if c.moe_layers:
        _require(c.num_experts >= 1, "num_experts", c.num_experts, "1 or more where there are mixture layers")
        _require(
            c.num_experts % c.num_expert_group == 0,
            "num_expert_group",
            c.num_expert_group,
            f"a divisor of {c.num_experts}",
        )
        _require(
            1 <= c.topk_group <= c.num_expert_group,
            "topk_group",
            c.topk_group,
            f"1 to num_expert_group={c.num_expert_group}",
        )
        reachable = c.topk_group * c.num_experts // c.num_expert_group
        _require(
            1 <= c.num_experts_per_token <= reachable,
            "num_experts_per_token",
            c.num_experts_per_token,
            f"1 to {reachable}",
        )
        _require(c.moe_intermediate_size >= 1, "moe_intermediate_size", c.moe_intermediate_size, "1 or more")
        _require(c.num_shared_experts >= 0, "num_shared_experts", c.num_shared_experts, "0 or more")


def _require(ok: bool, field: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{field}={value!r}: allowed is {allowed}")


# -- reading a config.json -----------------------------------------------------------------------------------------

_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(K3Config)}
# Keys of `linear_attn_config` and the fields that they fill; the two lists of layers are read apart.
_LINEAR = {
    "num_heads": "kda_num_heads", "head_dim": "kda_head_dim", "short_conv_kernel_size": "short_conv_kernel_size",
    "use_full_rank_gate": "use_full_rank_gate", "gate_lower_bound": "gate_lower_bound",
}  # fmt: skip
_LAYER_LISTS = ("kda_layers", "full_attn_layers")
# Keys of the text model and the fields that they fill. Ranks come from the tensors, the latent norms' eps from no file.
_TEXT = {"torch_dtype": "dtype", "model_max_length": "max_position_embeddings"} | {
    name: name
    for name in _FIELDS
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
    "dtype": ("bfloat16", "float32"),
    "torch_dtype": ("bfloat16", "float32"),
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
# Beside `text_config`: the vision tower (never built; its tensors stay on disk), and what the text model may leave out.
_SHARED = {
    "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id",
    "media_placeholder_token_id",
}  # fmt: skip
# Of a declared type: the JSON types that do, and how an error says so.
_JSON = {
    "int": ((int,), "an integer"), "float": ((float, int), "a number"), "bool": ((bool,), "true or false"),
    "str": ((str,), "a string"),
}  # fmt: skip


def _from_hf(config: Mapping[str, Any]) -> K3Config:
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
            _check_type(field, where + name, source[name])
            fields[field] = source[name]
    return fields


def _check_type(field: str, name: str, value: Any) -> None:
    """That `value`, known to the user as `name`, is of the type that the field declares."""
    declared = _FIELDS[field].removesuffix(" | None")
    if value is None and declared != _FIELDS[field]:
        return
    if declared == "tuple[int, ...]":
        ok = type(value) is tuple and all(type(entry) is int for entry in value)
        _require(ok, name, value, "a tuple of integers")
    elif declared in _JSON:
        types, allowed = _JSON[declared]
        _require(type(value) in types, name, value, allowed)


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    _require(isinstance(fields[name], Mapping), name, fields[name], "an object")
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
            _require(repr(value) in map(repr, allowed), name, value, " or ".join(map(repr, allowed)))


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
        _require(ok, name, linear[name], "a list of integers")
    named, all_layers = [*linear["kda_layers"], *linear["full_attn_layers"]], set(range(1, layers + 1))
    problems = {
        f"out of range; they are one-based, 1 to num_hidden_layers={layers}": set(named) - all_layers,
        "named twice": {layer for layer in named if named.count(layer) > 1},
        "named in neither": all_layers - set(named),
    }
    for problem, wrong in problems.items():
        if wrong:
            raise ConfigError(f"{' and '.join(_LAYER_LISTS)}: {sorted(wrong)} {problem}")
    return tuple(sorted(layer - 1 for layer in linear["kda_layers"]))


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    """Only MXFP4 as released; which tensors are packed is read from the tensors, not from the ignore list."""
    where = "quantization_config"
    fixed = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    inert = {"config_groups", "ignore", "quantization_status", "global_compression_ratio", "version"}
    _require_keys(quantization, {"format"}, where)
    _refuse_unknown({name: value for name, value in quantization.items() if value}, {*fixed, *inert}, where)
    _check_equal(quantization, fixed, where)
    for name in quantization.get("config_groups", {}):
        group = _object(quantization["config_groups"], name)
        _refuse_unknown(group, {"format", "targets", "weights"}, f"{where}.{name}")  # activations are not quantised
        weights = dict(num_bits=4, type="float", group_size=32, strategy="group", symmetric=True, dynamic=False)
        _check_equal(_object(group, "weights") if "weights" in group else {}, weights, f"{where}.{name}.weights")


def _check_equal(fields: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    for name, value in wanted.items():
        _require(fields.get(name, value) == value, f"{where}.{name}", fields.get(name), repr(value))
