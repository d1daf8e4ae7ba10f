"""The KDA prefill kernels beside this file against the recurrence, and their time on one GPU.

    python benchmarks/trials/kda_prefill_bench.py [--out benchmarks/results] [--peer]

`--peer` times FLA 0.6.0 (PyTorch) on the same shapes. Without a GPU the kernels are interpreted and only checked.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array
from kda_prefill import CHUNK, DEFAULT, Raw, Tuning, Work, prefill, prepare, scan, tiles_of

from k3jax.ops import kda

# -- check ---------------------------------------------------------------------------------------------------------

K = 128
GATES = {  # f of each token and channel: sigmoid(+-30) is 1 and 0
    "mixed": lambda r, shape: 3 * r.standard_normal(shape),
    "0": lambda r, shape: np.full(shape, -30.0),
    "-5": lambda r, shape: np.full(shape, 30.0),
    "channels at 0 or -5": lambda r, shape: np.broadcast_to(r.choice([-30.0, 30.0], (1, *shape[1:])), shape),
    "tokens at 0 or -5": lambda r, shape: r.choice([-30.0, 30.0], shape),
}


def draw(
    seed: int, lengths: list[int], heads: int, correlation: float = 0.0, gate: str = "mixed"
) -> tuple[Array, Raw, Array]:
    """State, inputs and bounds of packed sequences. `correlation` is that of any two keys of a head."""
    r = np.random.default_rng(seed)
    shape = (sum(lengths), heads, K)
    normal = functools.partial(r.standard_normal, dtype=np.float32)
    k = np.sqrt(1 - correlation) * normal(shape) + np.sqrt(correlation) * normal((1, heads, K))
    q, v, f, b = normal(shape), normal(shape), GATES[gate](r, shape), normal(shape[:2])
    bf16 = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v, f, b))
    x = Raw(
        *bf16, A_log=jnp.asarray(r.random(heads), jnp.float32), dt_bias=jnp.asarray(r.random((heads, K)), jnp.float32)
    )
    cu_seqlens = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    return jnp.asarray(normal((len(lengths), heads, K, K))), x, cu_seqlens


@jax.jit
def recurrence(S_BHVK: Array, x: Raw, cu_seqlens: Array) -> tuple[Array, Array]:
    """Token by token in float32."""
    g = kda.log_decay(x.f, x.A_log, x.dt_bias, -5.0)
    inputs = kda.Inputs(x.q, x.k, x.v, g, jax.nn.sigmoid(x.b.astype(jnp.float32)))

    def one(S_BHVK: Array, token: tuple[Array, kda.Inputs]) -> tuple[Array, Array]:
        row, inputs = token
        S, o = kda.step(S_BHVK[row][None], jax.tree.map(lambda a: a[None], inputs))
        return S_BHVK.at[row].set(S[0]), o[0]

    rows = jnp.searchsorted(cu_seqlens[1:], jnp.arange(x.q.shape[0]), side="right")
    return lax.scan(one, S_BHVK, (rows, inputs))


def relative_error(got: Array, want: Array) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def errors(lengths: list[int], heads: int, interpret: bool, tuning: Tuning = DEFAULT, **case) -> dict[str, float]:
    """Of the outputs and of the worst sequence's state; a sequence of length 0 must keep its state exactly."""
    S, x, cu = draw(1, lengths, heads, **case)
    S_got, o = jax.jit(functools.partial(prefill, tuning=tuning, interpret=interpret))(S, x, cu)
    S_want, o_want = recurrence(S, x, cu)
    states = [relative_error(S_got[i], S_want[i]) for i in range(len(lengths))]
    assert all(bool((S_got[i] == S[i]).all()) for i, n in enumerate(lengths) if n == 0)
    return {"o": relative_error(o, o_want), "S": max(states)}


# -- time ----------------------------------------------------------------------------------------------------------

SHAPES = [(96, [8192]), (12, [8192]), (12, [32768]), (12, [1024] * 8)]
REPEATS = 6  # calls in one program
PREPARE = [Tuning(prepare_stages=s, tiles=t) for s, t in ((1, 1), (2, 4), (2, 8), (2, 16))]
SCAN = [Tuning(scan_stages=s, rows=r) for s, r in ((3, 64), (4, 64), (3, 16))]


def milliseconds(call: Callable, start, *fixed) -> float:
    """A call's time: REPEATS calls chained in one program, so that nothing is shared or dropped, and programs queued."""

    @jax.jit
    def program(x, *fixed):
        for _ in range(REPEATS):
            x, fixed = lax.optimization_barrier((x, fixed))
            x, rest = call(x, *fixed)
            x, _ = lax.optimization_barrier((x, rest))
        return x

    jax.block_until_ready(program(start, *fixed))
    runs = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready([program(start, *fixed) for _ in range(5)])
        runs.append((time.perf_counter() - began) / (5 * REPEATS) * 1e3)
    return round(float(np.median(runs)), 4)


def attempt(f: Callable, *args) -> float | str:
    try:
        return f(*args)
    except Exception as e:  # a variant that does not compile is a result too
        return f"{type(e).__name__}: {str(e)[:120]}"


def time_shape(heads: int, lengths: list[int]) -> dict:
    """Each kernel with each of its tunings, then both with the best ones."""
    S, x, cu = draw(2, lengths, heads)
    tiles = tiles_of(cu, x.q.shape[0])
    work = jax.jit(lambda x: prepare(x, tiles, -5.0, DEFAULT))(x)

    def prepare_call(tuning: Tuning, start: Array, x: Raw) -> tuple[Array, Work]:
        work = prepare(x, tiles._replace(start=start), -5.0, tuning)
        return start + (work.halves[0, 0, 0] > 0).astype(jnp.int32), work  # never: but the next call must wait

    def scan_call(tuning: Tuning, S: Array, work: Work) -> tuple[Array, Array]:
        return scan(work, x.v, cu, tiles.first, S, tuning)[::-1]

    def timed(call: Callable, tunings: list[Tuning], *args) -> list[tuple[float, Tuning]]:
        return [(attempt(milliseconds, functools.partial(call, t), *args), t) for t in tunings]

    parts = {"prepare": timed(prepare_call, PREPARE, tiles.start, x), "scan": timed(scan_call, SCAN, S, work)}
    del work
    (first, a), (second, b) = (
        min((p for p in part if isinstance(p[0], float)), key=lambda p: p[0]) for part in parts.values()
    )
    best = b._replace(prepare_warps=a.prepare_warps, prepare_stages=a.prepare_stages, tiles=a.tiles)
    own = {"prepare": ("prepare_warps", "prepare_stages", "tiles"), "scan": ("scan_warps", "scan_stages", "rows")}
    return {
        "H": heads, "lengths": lengths, "prepare_ms": first, "scan_ms": second, "tuning": best._asdict(),
        "ms": milliseconds(lambda S, x: prefill(S, x, cu, tuning=best), S, x),
        "variants": {k: [{n: getattr(t, n) for n in own[k]} | {"ms": ms} for ms, t in p] for k, p in parts.items()},
    }  # fmt: skip


def floors(heads: int, lengths: list[int]) -> dict[str, float]:
    """Milliseconds at 4.3 TB/s and 790 TFLOP/s, the copy and product rates of an H200."""
    tokens = heads * sum(lengths)
    states = 2 * 4 * heads * len(lengths) * K * K
    once = tokens * (5 * K + 1) * 2  # q, k, v, f, b, o
    between = tokens * (3 * K + 2 * CHUNK + K * 4 // CHUNK) * 2
    flops = tokens * 2 * (3 * K * K + 5 * CHUNK * K)
    return {
        "bytes": round((once + states) / 4.3e9, 3),
        "bytes_of_two_kernels": round((once + states + 2 * between) / 4.3e9, 3),
        "flops": round(flops / 790e9, 3),
    }


# -- peer ----------------------------------------------------------------------------------------------------------


def peer() -> None:
    """FLA's chunk_kda on the same shapes: median of 20 calls between two events, and of 20 replays of a CUDA graph."""
    import torch
    from fla.ops.kda import chunk_kda

    def median(f: Callable) -> float:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
        for begin, end in pairs:
            begin.record()
            f()
            end.record()
        torch.cuda.synchronize()
        return round(float(np.median([begin.elapsed_time(end) for begin, end in pairs])), 4)

    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for heads, lengths in SHAPES:
        T, B = sum(lengths), len(lengths)
        call = functools.partial(
            chunk_kda, q=normal(1, T, heads, K), k=normal(1, T, heads, K), v=normal(1, T, heads, K), g=normal(1, T, heads, K),
            beta=normal(1, T, heads), A_log=torch.rand(heads, device="cuda"), dt_bias=torch.rand(heads * K, device="cuda"),
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            safe_gate=True, initial_state=torch.randn(B, heads, K, K, device="cuda"), output_final_state=True,
            cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), device="cuda") if B > 1 else None,
        )  # fmt: skip
        row = {"H": heads, "lengths": lengths, "torch": torch.__version__, "graph_ms": None}
        with torch.no_grad():
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            row["ms"] = median(call)
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                row["graph_ms"] = median(graph.replay)
            except Exception:  # packed sequences ask the device for their lengths, which a graph cannot hold
                torch.cuda.synchronize()
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--only-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_peer:
        peer()
        return
    interpret = jax.default_backend() != "gpu"
    device = jax.devices()[0]
    record: dict = {
        "what": "kda_prefill_trial", "date": datetime.date.today().isoformat(), "device": device.device_kind,
        "platform_version": device.client.platform_version, "python": platform.python_version(), "jax": jax.__version__,
        "errors": [], "shapes": [], "peer": [],
    }  # fmt: skip
    lengths = [100, 64, 1, 0, 77]
    for correlation, gate in itertools.product((0.0, 0.5, 0.9), GATES):
        row = {
            "correlation": correlation,
            "gate": gate,
            **errors(lengths, 3, interpret, correlation=correlation, gate=gate),
        }
        record["errors"].append(row)
        print(json.dumps(row), flush=True)
    if interpret:  # no card: nothing to time
        return
    record["driver"] = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    record["long"] = {"lengths": [8192], "correlation": 0.5, **errors([8192], 2, False, correlation=0.5)}
    record["variants"] = {str(t): attempt(lambda t=t: errors(lengths, 3, False, t)) for t in PREPARE + SCAN}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-kda_prefill_trial.json"
    for shape in SHAPES:
        record["shapes"].append(time_shape(*shape) | {"floor_ms": floors(*shape)})
        print(json.dumps(record["shapes"][-1]), flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    if args.peer:
        command = [sys.executable, __file__, "--only-peer"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in filter(lambda line: line.startswith("{"), process.stdout):
                print(line, end="", flush=True)
                record["peer"].append(json.loads(line))
                path.write_text(json.dumps(record, indent=1) + "\n")
    print("variants", {k: v for k, v in record["variants"].items() if not isinstance(v, dict) or v["o"] > 6e-3})
    print("worst error", max(e["o"] for e in record["errors"]), "long", record["long"])
    for row, other in itertools.zip_longest(record["shapes"], record["peer"], fillvalue={}):
        columns = [row[k] for k in ("H", "lengths", "ms", "prepare_ms", "scan_ms", "floor_ms")]
        print(*columns, "peer", other.get("ms"), other.get("graph_ms"))


if __name__ == "__main__":
    main()
