"""The whole of K3 compiled for a mesh without its memory: what a device is given, what a step needs beside it, how long it takes.

On virtual CPU devices, or with --h200 for abstract H200s (no GPU is needed, but Python 3.12 and jax[cuda13]; GEMMs are not tuned
then). Figures of a CPU have copies that a GPU has not: XLA widens bfloat16 matrices to float32 before a product there.

python benchmarks/full_size.py [--ranks 8 16] [--layers 93] [--rows 64] [--context 1024] [--prompt 8192] [--h200] [--out DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax starts
    if "--h200" in sys.argv:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16".strip()

import jax
from jax.sharding import AxisType, Mesh

import k3jax
from k3jax import K3Config, abstract

H200 = (Path(__file__).parent / "h200.textproto").read_text()  # what XLA must know of a card that is not there


def mesh(ranks: int, h200: bool) -> Mesh:
    if not h200:
        return k3jax.make_mesh(tp=ranks)
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{ranks}")
    return jax.make_mesh((1, ranks, 1), ("data", "ep", "tp"), axis_types=(AxisType.Auto,) * 3, devices=topology.devices)


def collectives(text: str) -> dict[str, int]:
    """How many of a compiled program's exchanges there are, by kind and result."""
    kinds = r"= (\S+|\([^=]*?\)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    found = Counter(f"{kind} {re.sub(r'{[^}]*}', '', shape)}" for shape, kind in re.findall(kinds, text))
    return dict(sorted(found.items()))


def measure(name: str, step: Any, platform: str) -> dict[str, Any]:
    start = time.perf_counter()
    lowered = step.traced.lower(lowering_platforms=(platform,))
    lowering, start = time.perf_counter() - start, time.perf_counter()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "program": name,
        "lower_s": round(lowering, 1),
        "compile_s": round(time.perf_counter() - start, 1),
        "planned": {"weights": step.weights, "state": step.state, "batch": step.batch, "sum": step.bytes},
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "collectives": collectives(compiled.as_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    for name, value in (("layers", 93), ("rows", 64), ("context", 1024), ("prompt", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--h200", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config, found = K3Config.k3().slice(args.layers), []
    for ranks in args.ranks:
        devices = mesh(ranks, args.h200)
        # Triton kernels ask for the mesh in scope where no card is.
        with jax.set_mesh(devices) if args.h200 else contextlib.nullcontext():
            for name in ("decode", "prefill"):
                if args.only not in (None, name):
                    continue
                start = time.perf_counter()
                if name == "decode":
                    step = abstract.decode(config, devices, rows=args.rows, context=args.context, packed=True)
                else:
                    step = abstract.prefill(config, devices, tokens=args.prompt, slots=args.rows, packed=True)
                traced = time.perf_counter() - start
                row = measure(name, step, "cuda" if args.h200 else "cpu")
                row = {"ranks": ranks, "trace_s": round(traced, 1)} | row
                print(json.dumps(row), flush=True)
                found.append(row)
    if args.out:
        where = "h200-abstract" if args.h200 else "cpu"
        options = {key: getattr(args, key) for key in ("layers", "rows", "context", "prompt")}
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), **versions}
        record = {"date": f"{datetime.date.today()}", "machine": machine, "options": options, "programs": found}
        path = args.out / f"{record['date']}-full_size-{where}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
