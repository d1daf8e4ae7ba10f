"""Directories in the released layout: a config.json from a K3Config, and safetensors beside it."""

import json

import numpy as np
from safetensors.numpy import save_file

# Fields that stand in `linear_attn_config` under other names, and those that no config.json has.
LINEAR = {
    "kda_num_heads": "num_heads", "kda_head_dim": "head_dim", "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound", "use_full_rank_gate": "use_full_rank_gate",
}  # fmt: skip
NOWHERE = {*LINEAR, "kda_layers", "kda_decay_rank", "kda_gate_rank", "latent_norm_eps", "media_placeholder_token_id"}


def flat(config, **changes):
    """The config.json of a text model alone; `changes` to its keys, None to leave one out."""
    fields = {name: value for name, value in vars(config).items() if name not in NOWHERE}
    fields["linear_attn_config"] = {
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        **{key: getattr(config, field) for field, key in LINEAR.items()},
    }
    fields |= dict(model_type="kimi_linear", mla_use_nope=True, moe_router_activation_func="sigmoid", **changes)
    return {name: value for name, value in fields.items() if value is not None}


def nested(config, **changes):
    """The same as K3 has it: the text model's keys one level down."""
    return {"model_type": "kimi_k3", "vision_config": {"patch_size": 14}, "text_config": flat(config, **changes)}


def write(directory, config, tensors, shards=1):
    """A directory of a config.json (an object) and of tensors, dealt to so many files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for shard in range(shards):
        part = {name: np.ascontiguousarray(tensors[name]) for name in list(tensors)[shard::shards]}
        save_file(part, directory / f"model-{shard:05}.safetensors")
    return directory
