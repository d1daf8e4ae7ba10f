"""The XLA path on one GPU: agreement with the golden data, bits per byte of k3-tiny, tokens a second.

python benchmarks/gpu_check.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from pathlib import Path

import flax
import jax
import numpy as np

import k3jax

ROOT = Path(__file__).parents[1]


def golden(name: str) -> dict[str, object]:
    """Largest logit difference over the case's prompts in float32, and whether a greedy continuation is equal."""
    folder = ROOT / "tests" / "golden" / name
    inputs, outputs = np.load(folder / "inputs.npz"), np.load(folder / "outputs.npz")
    with k3jax.load(folder, dtype="float32") as lm:
        chosen = (3, 6)
        prompts = [inputs[f"prompt_{i}"].tolist() for i in chosen]
        worst = max(
            float(np.abs(lm.logits(p) - outputs[f"logits_{i}"]).max()) for i, p in zip(chosen, prompts, strict=True)
        )
        made = lm.generate(prompts, k3jax.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        equal = all(c.token_ids == outputs[f"greedy_{i}"].tolist() for i, c in zip(chosen, made, strict=True))
    return {"case": name, "max_logit_difference": worst, "greedy_equal": equal}


def tiny() -> dict[str, object]:
    folder = ROOT / "checkpoints" / "k3-tiny"
    text = (folder / "heldout.txt").read_text()
    result: dict[str, object] = {}
    for dtype in ("bfloat16", "float32"):
        with k3jax.load(folder, dtype=dtype) as lm:
            result[f"bits_per_byte_{dtype}"] = round(lm.bits_per_byte(text), 5)
            if dtype == "bfloat16":
                prompt = [lm.encode("And the LORD said unto Moses,")]
                sampling = k3jax.SamplingParams(max_tokens=129, seed=1, ignore_eos=True)
                began = time.time()
                lm.generate(prompt, sampling)
                result["first_call_s"] = round(time.time() - began, 2)
                began = time.time()
                lm.generate(prompt, sampling)
                result["tokens_per_s_batch_1_prefill_included"] = round(129 / (time.time() - began), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    device = jax.devices()[0]
    record: dict[str, object] = {
        "what": "gpu_check", "date": datetime.date.today().isoformat(), "device": device.device_kind,
        "platform_version": device.client.platform_version, "python": platform.python_version(),
        "jax": jax.__version__, "flax": flax.__version__,
    }  # fmt: skip
    record["k3_tiny"] = tiny()
    print(json.dumps(record), flush=True)
    record["golden"] = []
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-gpu_check.json"
    for name in ("k3_mxfp4_wide", "kimi_linear_a", "k3_bf16"):
        record["golden"].append(golden(name))
        print(json.dumps(record["golden"][-1]), flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
