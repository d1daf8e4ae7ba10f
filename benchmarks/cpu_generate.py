"""What a first user waits for, and what decoding costs, on this processor.

    python benchmarks/cpu_generate.py [--model checkpoints/k3-tiny] [--out benchmarks/results]

Each measurement of a first token runs in a fresh process: once with an empty cache of compiled programs, once with the cache
that the first process filled. Decoding is timed after its programs are compiled. The KDA part is one KDA layer's step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_TOKEN = """
import sys, time
began = time.time()
import jax
seconds = {"trace": 0.0, "compile": 0.0}
def listen(event, duration, **_):
    seconds["trace"] += duration * event.endswith(("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration"))
    seconds["compile"] += duration * event.endswith("backend_compile_duration")
jax.monitoring.register_event_duration_secs_listener(listen)
import k3jax
lm = k3jax.load(sys.argv[1])
loaded = time.time()
lm.generate("In the beginning", k3jax.SamplingParams(max_tokens=1, temperature=0))
print(loaded - began, time.time() - began, seconds["trace"], seconds["compile"])
"""


def first_token(model: str, cache: str) -> dict[str, float]:
    """Seconds from a new process to the loaded model and to the first token, imports included; and of that, to trace and compile.

    Programs traced inside others count twice in trace_s; compile_or_cache_s is reading the cache in a second process.
    """
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN, model], env=env, capture_output=True, text=True, check=True
    )
    process = time.time() - began
    load, token, trace, compile_ = map(float, done.stdout.split())
    found = dict(load_s=load, first_token_s=token, process_s=process, trace_s=trace, compile_or_cache_s=compile_)
    return {name: round(value, 2) for name, value in found.items()}


def decode_rate(model: str, tokens: int) -> list[dict[str, float]]:
    """Tokens a second at batch 1 and 8: the difference of two lengths, so that the prefill cancels; best of three."""
    import k3jax

    lm = k3jax.load(model)
    rows = []
    for batch in (1, 8):
        prompts = [lm.encode("And the LORD said unto Moses,")] * batch

        def seconds(n: int, prompts: list[list[int]] = prompts) -> float:
            began = time.time()
            lm.generate(prompts, k3jax.SamplingParams(max_tokens=n, temperature=1.0, seed=1, ignore_eos=True))
            return time.time() - began

        began = time.time()
        seconds(1 + tokens)
        compiled = time.time() - began
        seconds(1)
        best = min(seconds(1 + tokens) - seconds(1) for _ in range(3))
        rows.append(
            {"batch": batch, "first_call_s": round(compiled, 2), "tokens_per_s": round(batch * tokens / best, 1)}
        )
    lm.close()
    return rows


def kda_step(model: str) -> dict[str, float]:
    """Milliseconds of one KDA layer's decode step, after a history of 128 and of 8192 tokens; median of 200."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import k3jax
    from k3jax import carry as carries
    from k3jax.batch import Batch, prepare

    lm = k3jax.load(model)
    layer = lm.model.model.layers[lm.config.kda_layers[0]].self_attn
    state = carries.empty(lm.config, slots=1, pages=1, dtype=str(lm.model.dtype)).kda[0]
    x = jax.random.normal(jax.random.key(0), (1, lm.config.hidden_size)).astype(lm.model.dtype)

    def run(layer, x, state, history):
        batch = Batch(
            jnp.zeros(1, jnp.int32),
            jnp.arange(2),
            history[None],
            jnp.zeros(1, jnp.int32),
            jnp.zeros((1, 129), jnp.int32),
            jnp.zeros(1, jnp.int32),
        )
        return layer(
            x,
            state,
            prepare(batch, 1, carries.PAGE, lm.config.short_conv_kernel_size),
            "chunk",
            lambda site, value: value,
        )

    step = jax.jit(run)
    result = {}
    for history in (128, 8192):
        times = []
        for _ in range(220):
            began = time.perf_counter()
            jax.block_until_ready(step(layer, x, state, np.int32(history)))
            times.append(time.perf_counter() - began)
        result[f"history_{history}_ms"] = round(1e3 * float(np.median(times[20:])), 4)
    result["ratio"] = round(result["history_8192_ms"] / result["history_128_ms"], 3)
    return result


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/k3-tiny")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = first_token(args.model, cache), first_token(args.model, cache)
    import flax
    import jax

    record = {
        "what": "cpu_generate",
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "cold": cold,
        "second_process": warm,
        "decode": decode_rate(args.model, args.tokens),
        "kda_layer_step": kda_step(args.model),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-cpu_generate-py{'.'.join(platform.python_version_tuple()[:2])}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
