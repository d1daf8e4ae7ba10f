"""What loading costs beside the disk: seconds per GB, and peak memory over what a process's devices hold.

    python benchmarks/loading.py [--layers 4] [--experts 32] [--vocab 8192] [--scratch DIR] [--out benchmarks/results]

A checkpoint of K3's shapes is made in a scratch directory and loaded with packed experts, each time by fresh processes: onto one
device, onto eight of one process, and onto eight of two processes that load at once. Before a "cold" run the kernel is asked
to drop the files' pages; a "warm" one finds them in memory. The disk's own rate is that of the same files read whole by as many
threads in blocks as large: into one block a thread, and into fresh memory as large as the files, which a loaded model needs too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

COMMON = """
import json, os, sys, time
from pathlib import Path
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
"""

DISK = """
import threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from k3jax.io.hf import READERS
from k3jax.io.safetensors import BLOCK
fresh, files = sys.argv[1] == "fresh", [open(path, "rb") for path in sorted(Path(sys.argv[2]).glob("*.safetensors"))]
sizes = [os.fstat(file.fileno()).st_size for file in files]
places = [np.empty(size, np.uint8) if fresh else None for size in sizes]
own = threading.local()
def read(job):
    i, at = job
    if not hasattr(own, "block"):
        own.block = np.empty(BLOCK, np.uint8)
    return os.preadv(files[i].fileno(), [own.block if places[i] is None else places[i][at : at + BLOCK]], at)
began = time.perf_counter()
with ThreadPoolExecutor(READERS) as pool:
    jobs = ((i, at) for i, size in enumerate(sizes) for at in range(0, size, BLOCK))
    assert sum(pool.map(read, jobs)) == sum(sizes)
print(json.dumps({"read_gb": sum(sizes) / 1e9, "seconds": time.perf_counter() - began}))
"""

LOAD = """
process, processes, address, directory, small = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
import jax
if processes > 1:
    jax.distributed.initialize(address, processes, process)
import k3jax
from k3jax.io import hf
from k3jax.io.safetensors import Checkpoint
mesh = k3jax.make_mesh(ep=jax.device_count() // 2) if jax.device_count() > 1 else None
hf.load(small, packed=True, mesh=mesh)
moved, fill = [], Checkpoint._fill
def counting(self, out, *rest):
    moved.append(out.nbytes)
    fill(self, out, *rest)
Checkpoint._fill = counting
before, began = peak(), time.perf_counter()
model = hf.load(directory, packed=True, mesh=mesh).model
jax.block_until_ready(jax.tree.leaves(model))
seconds = time.perf_counter() - began
parts = [{str(part.index): part.data.nbytes for part in a.addressable_shards} for a in jax.tree.leaves(model)]
held = sum(sum(part.values()) for part in parts)
print(json.dumps({"read_gb": sum(moved) / 1e9, "held_gb": held / 1e9, "seconds": seconds,
                  "peak_over_held": (peak() - before) / held}))
"""


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("full_shape", ROOT / "scripts" / "full_shape.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drop(directory: Path) -> None:
    """Ask the kernel to forget the pages of a directory's files."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(code: str, devices: int, *arguments: list[str]) -> list[dict[str, float]]:
    """What fresh processes print that run at once, one for each list of arguments."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    started = [
        subprocess.Popen([sys.executable, "-c", COMMON + code, *args], env=env, stdout=subprocess.PIPE, text=True)
        for args in arguments
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [
        {
            **{name: round(value, 3) for name, value in each.items()},
            "s_per_gb": round(each["seconds"] / each["read_gb"], 3),
        }
        for each in found
    ]


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(directory: Path, small: Path) -> list[dict[str, Any]]:
    rows = []
    for page_cache in ("cold", "warm"):
        cases = [
            ("disk, one block a thread", DISK, 1, [["block", str(directory)]]),
            ("disk, into fresh memory", DISK, 1, [["fresh", str(directory)]]),
            ("1 device", LOAD, 1, [["0", "1", "", str(directory), str(small)]]),
            ("8 devices", LOAD, 8, [["0", "1", "", str(directory), str(small)]]),
        ]
        address = free_address()
        both = [[str(i), "2", address, str(directory), str(small)] for i in range(2)]
        cases.append(("8 devices of 2 processes", LOAD, 4, both))
        for case, code, devices, arguments in cases:
            if page_cache == "cold":
                drop(directory)
            for found in run(code, devices, *arguments):
                rows.append({"case": case, "page_cache": page_cache, **found})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument(
        "--scratch", type=Path, default=None, help="where the checkpoint is made; on the disk in question"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    import jax

    from k3jax.config import K3Config
    from k3jax.io.hf import READERS
    from k3jax.io.safetensors import BLOCK

    full_shape = generator()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        directory, small = Path(scratch) / "model", Path(scratch) / "small"
        config = full_shape.smaller(K3Config.k3(), args.layers, args.experts, args.vocab)
        total = full_shape.write(directory, config, shard_bytes=10**9)
        full_shape.write(small, full_shape.smaller(K3Config.tiny(), args.layers, 8, 64))
        rows = measure(directory, small)
    record = {
        "what": "loading",
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "checkpoint": {
            "layers": args.layers,
            "experts": args.experts,
            "vocab": args.vocab,
            "gb": round(total / 1e9, 3),
        },
        "threads": READERS,
        "block": BLOCK,
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-loading.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
