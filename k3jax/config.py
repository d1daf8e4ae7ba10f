"""K3Config: every architecture number of a Kimi K3 or Kimi-Linear checkpoint, once, with its unit.

Axis letters in shapes and name suffixes; a file that needs others, or one of these for something of its own, says so:

    T packed tokens   B rows or slots   S cached positions   D model width    H heads on this shard
    K key dim         V value dim       C latent or channels W conv width     E experts on this shard
    A active experts  L expert latent   F expert hidden      R depth sources  N vocabulary

Both released families carry `model_type: kimi_linear`, so every variant is decided by fields, never by a name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

DTYPES = ("bfloat16", "float32")
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
        from k3jax import hf_config  # it makes configs, so it comes second

        return hf_config.read(config)

    def to_hf(self, *, packed: bool = False) -> dict[str, Any]:
        """The `config.json` that from_hf reads as this very configuration, fields named and nested as released.

        K3's form where depth is mixed or a token stands for images, Kimi-Linear's flat one elsewhere. packed: announce
        MXFP4 experts. The two KDA ranks are left to the tensors' shapes, which tell them.
        Raises ConfigError where latent_norm_eps is not the released 1e-6, which a config.json cannot say.
        """
        from k3jax import hf_config

        return hf_config.write(self, packed=packed)

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
            routed_expert_hidden_size=32, bos_token_id=2032, eos_token_id=2034, pad_token_id=2047,
        )  # fmt: skip
        return cls(**{**fields, **changes})


# -- checks ------------------------------------------------------------------------------------------------------


def _validate(c: K3Config) -> None:
    for name in FIELDS:
        check_type(name, name, getattr(c, name))
    require(c.dtype in DTYPES, "dtype", c.dtype, " or ".join(map(repr, DTYPES)))
    optional = ("attn_res_block_size", "q_lora_rank", "routed_expert_hidden_size", "kda_decay_rank", "kda_gate_rank")
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "kda_num_heads", "kda_head_dim",
        "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
        "moe_layer_freq", "num_expert_group", *optional,
    ):  # fmt: skip
        value = getattr(c, name)
        if not (value is None and name in optional):
            require(isinstance(value, int) and value >= 1, name, value, "an integer of 1 or more")
    require(c.short_conv_kernel_size >= 2, "short_conv_kernel_size", c.short_conv_kernel_size, "2 or more taps")
    for name in (
        "rms_norm_eps", "latent_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor",
    ):  # fmt: skip
        require(0 < getattr(c, name) < math.inf, name, getattr(c, name), "a positive number")
    require(c.hidden_act in ("situ", "silu"), "hidden_act", c.hidden_act, "'situ' or 'silu'")
    require(
        c.gate_lower_bound is None or -math.inf < c.gate_lower_bound < 0,
        "gate_lower_bound",
        c.gate_lower_bound,
        "a negative number or null",
    )
    wrong = [layer for layer in c.kda_layers if not 0 <= layer < c.num_hidden_layers]
    require(not wrong, "kda_layers", wrong, f"zero-based layers below {c.num_hidden_layers}")
    require(0 <= c.first_k_dense_replace, "first_k_dense_replace", c.first_k_dense_replace, "0 or more")
    if c.moe_layers:
        require(c.num_experts >= 1, "num_experts", c.num_experts, "1 or more where there are mixture layers")
        require(
            c.num_experts % c.num_expert_group == 0,
            "num_expert_group",
            c.num_expert_group,
            f"a divisor of {c.num_experts}",
        )
        require(
            1 <= c.topk_group <= c.num_expert_group,
            "topk_group",
            c.topk_group,
            f"1 to num_expert_group={c.num_expert_group}",
        )
        reachable = c.topk_group * c.num_experts // c.num_expert_group
        require(
            1 <= c.num_experts_per_token <= reachable,
            "num_experts_per_token",
            c.num_experts_per_token,
            f"1 to {reachable}",
        )
        require(c.moe_intermediate_size >= 1, "moe_intermediate_size", c.moe_intermediate_size, "1 or more")
        require(c.num_shared_experts >= 0, "num_shared_experts", c.num_shared_experts, "0 or more")


FIELDS = {field.name: str(field.type) for field in dataclasses.fields(K3Config)}
# Of a declared type: the types that do, and how an error says so.
_TYPES = {
    "int": ((int,), "an integer"), "float": ((float, int), "a number"), "bool": ((bool,), "true or false"),
    "str": ((str,), "a string"),
}  # fmt: skip


def check_type(field: str, name: str, value: Any) -> None:
    """That `value`, known to the user as `name`, is of the type that the field declares."""
    declared = FIELDS[field].removesuffix(" | None")
    if value is None and declared != FIELDS[field]:
        return
    if declared == "tuple[int, ...]":
        ok = type(value) is tuple and all(type(entry) is int for entry in value)
        require(ok, name, value, "a tuple of integers")
    elif declared in _TYPES:
        types, allowed = _TYPES[declared]
        require(type(value) in types, name, value, allowed)


def require(ok: bool, field: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{field}={value!r}: allowed is {allowed}")
