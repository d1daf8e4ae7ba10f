"""The small all-reduce between the GPUs of a host: right to the bit, and microseconds of a sum beside NCCL's.

Right: every result of a chain of sums, each made of the one before, equals NumPy's on every rank, also where ranks come late.
Timed: a chain run alone, and ten runs queued. Each task is a process of its own, so that one that hangs loses only itself. Multicast
must be off: NCCL_NVLS_ENABLE=0 and XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels= are asked for.

python benchmarks/all_reduce.py [--rows 1 8 64 256] [--seconds 180] [--out DIR]
python benchmarks/all_reduce.py --compile 2     # for so many abstract H200s; no GPU, but Python 3.12 and jax[cuda13]
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--compile" in sys.argv:  # before jax starts
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import k3jax
from k3jax import sharding
from k3jax.bench import driver
from k3jax.pallas import all_reduce as kernel
from k3jax.pallas.common import launch
from k3jax.ranks import RANKS

TASKS = ("check", "psum", "kernel")  # the last two are timed
CALLS, WIDTH = 200, 7168  # sums of a chain, and the width of each
OFF = "--xla_gpu_experimental_use_collective_kernels="
SPLIT = jax.P(RANKS)  # every array has a leading axis of ranks


def late(x: jax.Array, turns: jax.Array) -> jax.Array:
    """x, after turns[0] turns of a loop, of a few cycles each."""

    def body(turns_ref: Any, x_ref: Any, y_ref: Any) -> None:
        turns = turns_ref[0]
        positive = jax.lax.fori_loop(0, turns, lambda _, v: v * 0.5 + 0.5, turns.astype(jnp.float32))
        y_ref[0, 0] = jnp.where(positive >= 0, x_ref[0, 0], 0)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(body, out_shape=[out], grid=(1,), warps=1, aliases={1: 0}, name="late")(turns, x)[0]


def program(mesh: Mesh, task: str, f: Callable[..., Any]) -> Any:
    """f(sum, x, mailbox, ...) of a rank; sum(x, mailbox) is what the task is about."""

    def of_rank(*args: jax.Array) -> Any:
        x, mailbox, *rest = (a[0] for a in args)
        peers: Any = None
        if task != "psum":
            peers, mailbox = kernel.connect(mailbox, RANKS)

        def sum(x: jax.Array, mailbox: jax.Array) -> Any:
            y = (jax.lax.psum(x, RANKS), mailbox) if task == "psum" else kernel.all_reduce(x, mailbox, peers)
            return jax.lax.optimization_barrier(y)

        return jax.tree.map(lambda a: a[None], f(sum, x, mailbox, *rest))

    return jax.jit(sharding.per_rank(of_rank, mesh, SPLIT, SPLIT), donate_argnums=1)


def chain(sum: Any, x: jax.Array, mailbox: jax.Array) -> Any:
    """CALLS sums, each of the one before, unrolled as a model's layers are."""
    return functools.reduce(lambda c, _: sum(*c), range(CALLS), (x, mailbox))


def different(sum: Any, x: jax.Array, mailbox: jax.Array, noise: jax.Array, turns: jax.Array) -> Any:
    """CALLS different sums, all their results. Between them is one sum in float32 of exact terms, and one rounding."""
    origin = x.astype(jnp.float32)

    def step(carry: Any, xs: Any) -> Any:
        y, mailbox = sum(late(carry[0], xs[1][None]), carry[1])
        x = y.astype(jnp.float32) / 4 + origin * xs[0]
        return (x.astype(y.dtype), mailbox), y

    (_, mailbox), results = jax.lax.scan(step, (x, mailbox), (noise, turns), unroll=2)
    return results, mailbox


def expected(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The results of `different`, [calls, rows, width]; x [ranks, rows, width]."""
    origin, found = x.astype(np.float32), []
    for factor in noise.T:
        found.append(functools.reduce(np.add, x.astype(np.float32)).astype(x.dtype))
        x = (found[-1].astype(np.float32) / 4 + origin * factor[:, None, None]).astype(x.dtype)
    return np.stack(found)


def compiled(task: str, f: Any, *args: Any) -> Any:
    """Refuses a program with multicast in it, or one that moves the mailbox."""
    lowered = f.trace(*args).lower(lowering_platforms=("cuda",))
    text, done = lowered.as_text(), lowered.compile()
    assert "multimem" not in text and "multicast" not in text
    assert task == "psum" or "st.relaxed.sys" in text, "the kernel's code is to be read in the text"
    assert not [line for line in done.as_text().splitlines() if f"{args[1].shape[1]}]" in line and " copy" in line]
    return done


def check(task: str, mesh: Mesh, rows: list[int], put: Any, mailbox: jax.Array) -> Iterator[dict[str, Any]]:
    rng, shape = np.random.default_rng(0), (mesh.size, CALLS)
    for count in rows:
        x = rng.standard_normal((mesh.size, count, WIDTH)).astype(jnp.bfloat16)
        noise = rng.integers(-8, 9, shape).astype(np.float32)
        turns = np.where(rng.random(shape) < 0.3, rng.exponential(30_000, shape), 0).astype(np.int32)
        want, run = expected(x, noise).view(np.uint16), None
        for skewed in (False, True):
            args = put(noise), put(turns * skewed)
            run = run or compiled(task, program(mesh, task, different), put(x), mailbox, *args)
            wrong = []
            for _ in range(3):
                got, mailbox = run(put(x), mailbox, *args)
                wrong.append(int((np.asarray(got).view(np.uint16) != want).sum()))
            yield {"task": task, "rows": count, "skewed": skewed, "right": not any(wrong), "wrong": wrong}


def timed(task: str, mesh: Mesh, rows: list[int], put: Any, mailbox: jax.Array) -> Iterator[dict[str, Any]]:
    for count in rows:
        x = put(np.zeros((mesh.size, count, WIDTH), jnp.bfloat16))
        run = compiled(task, program(mesh, task, chain), x, mailbox)

        def us(runs: int, run: Any = run, x: Any = x) -> float:
            """Of a sum, with so many runs queued."""
            nonlocal mailbox
            start = time.perf_counter()
            for _ in range(runs):
                y, mailbox = run(x, mailbox)
            jax.block_until_ready((y, mailbox))
            return round((time.perf_counter() - start) / runs / CALLS * 1e6, 2)

        us(2)
        alone, queued = (statistics.median(us(runs) for _ in range(5)) for runs in (1, 10))
        yield {"task": task, "rows": count, "us": alone, "us_queued": queued}


def child(task: str, rows: list[int]) -> None:
    """Its results, a line each. All sizes share a mailbox."""
    device, mesh = jax.devices()[0], k3jax.make_mesh()
    facts = {"device": device.device_kind, "ranks": mesh.size, "platform_version": device.client.platform_version}
    print(json.dumps({"facts": facts}), flush=True)
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, SPLIT))
    mailbox = put(np.zeros((mesh.size, kernel.words(mesh.size, max(rows) * WIDTH)), np.int32))
    jax.block_until_ready(mailbox)
    for line in (check if task == "check" else timed)(task, mesh, rows, put, mailbox):
        print(json.dumps(line), flush=True)


def compile_all(ranks: int, rows: list[int]) -> None:
    from full_size import mesh as devices

    mesh = devices(ranks, h200=True)
    spec = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, SPLIT))
    mailbox = spec((ranks, kernel.words(ranks, max(rows) * WIDTH)), jnp.int32)
    rest = [spec((ranks, CALLS), dtype) for dtype in (jnp.float32, jnp.int32)]
    with jax.set_mesh(mesh):  # Triton kernels ask for it where no card is
        for count, task in itertools.product(rows, TASKS):
            start, x = time.perf_counter(), spec((ranks, count, WIDTH), jnp.bfloat16)
            f, more = (different, rest) if task == "check" else (chain, [])
            memory = compiled(task, program(mesh, task, f), x, mailbox, *more).memory_analysis()
            row = {"ranks": ranks, "task": task, "rows": count, "seconds": round(time.perf_counter() - start, 1)}
            print(json.dumps(row | {"temp_bytes": memory.temp_size_in_bytes}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--seconds", type=float, default=180, help="that a task may take")
    parser.add_argument("--compile", type=int, metavar="RANKS")
    parser.add_argument("--task", choices=TASKS, help="this one alone, in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.compile:
        compile_all(args.compile, args.rows)
        return
    flags = {flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith(OFF)}
    if os.environ.get("NCCL_NVLS_ENABLE") != "0" or flags != {OFF}:
        raise SystemExit(f"environment: allowed is NCCL_NVLS_ENABLE=0 with {OFF} (empty) in XLA_FLAGS: no multicast")
    if args.task:
        child(args.task, args.rows)
        return
    found: list[dict[str, Any]] = []
    for task in TASKS:
        command = [sys.executable, __file__, "--task", task, "--rows", *map(str, args.rows)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=args.seconds)
            output, end = done.stdout.decode(), done.returncode
        except subprocess.TimeoutExpired as e:
            output, end = (e.stdout or b"").decode(), f"stopped after {args.seconds} s"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
        lines += [{"task": task, "end": end, "output": output[-2000:]}] if end else []
        print(*map(json.dumps, lines), sep="\n", flush=True)
        found += lines
    if args.out:
        record: dict[str, Any] = {"what": "all_reduce", "date": f"{datetime.date.today()}"}
        for line in found:
            record |= line.get("facts", {})
        record |= {
            "driver": driver(), "python": platform.python_version(), "jax": importlib.metadata.version("jax"),
            "options": {"calls": CALLS, "width": WIDTH}, "rows": [line for line in found if "facts" not in line],
        }  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{record['date']}-all_reduce.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)
    if any(line.get("right") is False or "end" in line for line in found):
        raise SystemExit("not right, or not done")


if __name__ == "__main__":
    main()
