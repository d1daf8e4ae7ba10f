"""Make checkpoints/k3-tiny of what train.py wrote: the released layout, bfloat16, shards of at most 12 MiB.

python scripts/k3_tiny/export.py TEXT_DIR TOKENIZER_DIR TRAINED_DIR OUT_DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from k3jax.config import K3Config
from k3jax.io.tokenizer import Tokenizer

SHARD = 12 << 20  # bytes


def released(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one parameter: bits back to bfloat16, experts one by one, A_log padded to 128 entries."""
    value = value.view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value
    name = f"language_model.{name}"
    if name.endswith("A_log"):
        value = np.pad(value, (0, 128 - len(value)))
    if ".experts." not in name:
        yield name, value
        return
    before, matrix = name.split(".experts.")
    for expert, weight in enumerate(value):
        yield f"{before}.experts.{expert}.{matrix}", np.ascontiguousarray(weight)


def hf_config(c: K3Config) -> dict[str, Any]:
    """The config.json of this architecture, field names and nesting as released."""
    one_based = [layer + 1 for layer in c.kda_layers], [layer + 1 for layer in c.mla_layers]
    same = (
        "vocab_size hidden_size num_hidden_layers intermediate_size hidden_act activation_situ_beta activation_situ_linear_beta "
        "rms_norm_eps max_position_embeddings num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim mla_use_output_gate attn_res_block_size num_experts num_experts_per_token num_shared_experts "
        "moe_intermediate_size routed_expert_hidden_size latent_moe_use_norm first_k_dense_replace moe_layer_freq moe_renormalize "
        "routed_scaling_factor num_expert_group topk_group bos_token_id eos_token_id pad_token_id dtype"
    ).split()
    text = {name: getattr(c, name) for name in same}
    text |= {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "num_key_value_heads": c.num_attention_heads,
        "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "use_grouped_topk": True,
        "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
        "linear_attn_config": {
            "head_dim": c.kda_head_dim, "num_heads": c.kda_num_heads, "short_conv_kernel_size": c.short_conv_kernel_size,
            "use_full_rank_gate": c.use_full_rank_gate, "gate_lower_bound": c.gate_lower_bound,
            "kda_layers": one_based[0], "full_attn_layers": one_based[1],
        },
    }  # fmt: skip
    top = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": c.dtype,
        "tie_word_embeddings": False,
    }
    return top | {
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "pad_token_id": c.pad_token_id,
        "text_config": text,
    }


def write_shards(tensors: dict[str, np.ndarray], out: Path) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, value in tensors.items():
        if sum(t.nbytes + 200 for t in shards[-1].values()) + value.nbytes > SHARD:  # 200: the header's share
            shards.append({})
        shards[-1][name] = value
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "tokenizer", "trained", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parameters: dict[str, np.ndarray] = {}
    for file in sorted(args.trained.glob("params_*.npz")):
        parameters |= np.load(file)
    write_shards({n: v for name, value in parameters.items() for n, v in released(name, value)}, args.out)

    vocab = parameters["model.embed_tokens.weight"].shape[0]
    tokenizer = Tokenizer.from_directory(args.tokenizer, vocab)
    assert tokenizer is not None
    ids = tokenizer.special_ids
    config = K3Config.tiny(
        vocab_size=vocab, bos_token_id=ids["[BOS]"], eos_token_id=ids["<|end_of_msg|>"], pad_token_id=ids["[PAD]"]
    )
    (args.out / "config.json").write_text(json.dumps(hf_config(config), indent=1) + "\n")
    (args.out / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}, indent=1) + "\n")
    for file in (
        args.tokenizer / "tiktoken.model",
        args.tokenizer / "tokenizer_config.json",
        args.text / "heldout.txt",
    ):
        shutil.copy(file, args.out)

    trained = json.loads((args.trained / "log.json").read_text())
    train, heldout = ((args.text / file).read_bytes() for file in ("train.txt", "heldout.txt"))
    record = {
        "source": "King James text of Debian's bible-kjv-text (bible -f gen1:1-rev22:21), verse references removed",
        "licence": "public domain",
        "split": f"held out: the last {len(heldout)} bytes, heldout.txt; trained on the {len(train)} before them",
        "seed": trained["settings"]["seed"],
        "steps": trained["settings"]["steps"],
        "hardware": trained["device"],
        "jax": trained["jax"],
        "settings": trained["settings"],
        "parameters": sum(value.size for value in parameters.values()),
        "loss_curve": trained["curve"],
        "bits_per_byte": trained["curve"][-1]["bits_per_byte"],
        "xz_bits_per_byte": round(corpus.xz_bits_per_byte(train, heldout), 4),
    }
    (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
