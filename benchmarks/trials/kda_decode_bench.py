"""The KDA decode kernels beside this file against the recurrence, and their time on one GPU.

    python benchmarks/trials/kda_decode_bench.py [--out benchmarks/results] [--peer]

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array
from kda_decode import Gates, Layer, Rows, Tuning, layer_step, step

from k3jax.batch import NOWHERE
from k3jax.ops import conv, kda
from k3jax.ops.linear import gated_rms_norm

BOUND, EPS, WIDTH = -5.0, 1e-5, 4
GATES = {  # f of each channel: sigmoid(+-30) is 1 and 0
    "mixed": lambda r, shape: 3 * r.standard_normal(shape),
    "0": lambda r, shape: np.full(shape, -30.0),
    "-5": lambda r, shape: np.full(shape, 30.0),
    "0 or -5": lambda r, shape: r.choice([-30.0, 30.0], shape),
}


class Pools(NamedTuple):
    conv: Array
    S: Array


class Inputs(NamedTuple):
    x: Layer
    gates: Gates
    qkv: tuple[Array, ...]  # x.qkv apart, for `step`


def draw(
    seed: int, B: int, H: int, K: int, V: int, dtype: str, keys: np.ndarray | float = 0.0, correlation: float = 0.0,
    gate: str = "mixed",
) -> Inputs:  # fmt: skip
    """One step's inputs. `correlation` is that of a row's keys from step to step, `keys` what they have in common."""
    r = np.random.default_rng(seed)
    normal = functools.partial(r.standard_normal, dtype=np.float32)
    qkv = normal((B, H, 2 * K + V))
    qkv[..., K : 2 * K] = np.sqrt(1 - correlation) * qkv[..., K : 2 * K] + np.sqrt(correlation) * keys
    arrays = qkv, normal((B, H, V)), GATES[gate](r, (B, H, K)), normal((B, H))
    qkv, out_gate, f, b = (jnp.asarray(a, dtype) for a in arrays)
    fixed = np.random.default_rng(7)  # parameters stay from step to step
    arrays = fixed.normal(size=(WIDTH, H, 2 * K + V)), 1 + fixed.random(V), fixed.random(H), fixed.random((H, K))
    taps, norm, A_log, dt_bias = (jnp.asarray(a, jnp.float32) for a in arrays)
    return Inputs(Layer(qkv, taps, out_gate, norm), Gates(f, b, A_log, dt_bias), tuple(jnp.split(qkv, [K, 2 * K], -1)))


# -- what the kernels are held to ----------------------------------------------------------------------------------


def recurrence(pools: Pools, x: Inputs, rows: Rows, whole: bool) -> tuple[Pools, Array]:
    """The plain operations in float32, their roundings between included."""

    def past(pool: Array) -> Array:
        begun = (rows.num_computed > 0).reshape(-1, *(1,) * (pool.ndim - 1))
        return jnp.where(begun, pool.at[rows.slots].get(mode="fill", fill_value=0), 0)

    q, k, v = x.qkv
    if whole:
        qkv, history = conv.step(x.x.qkv, jnp.moveaxis(x.x.taps, 0, -1), past(pools.conv))
        q, k, v = jnp.split(qkv, [k.shape[-1], 2 * k.shape[-1]], axis=-1)
        pools = pools._replace(conv=pools.conv.at[rows.slots].set(history, mode="drop"))
    g = kda.log_decay(x.gates.f, x.gates.A_log, x.gates.dt_bias, BOUND)
    S, o = kda.step(past(pools.S), kda.Inputs(q, k, v, g, jax.nn.sigmoid(x.gates.b.astype(jnp.float32))))
    o = o.astype(v.dtype)
    if whole:
        o = gated_rms_norm(o, x.x.out_gate, x.x.norm, EPS)
    return pools._replace(S=pools.S.at[rows.slots].set(S, mode="drop")), o


def float64(pools: Pools, x: Inputs, rows: Rows, whole: bool) -> tuple[Pools, np.ndarray]:
    """The equations in NumPy, row by row, rounded to the inputs' dtype where they are handed on."""
    dtype = x.x.qkv.dtype
    x, gates, _ = jax.tree.map(lambda a: np.asarray(a, np.float64), x)
    rows = jax.tree.map(np.asarray, rows)
    history, S = (np.array(a, np.float64) for a in pools)
    outputs = []

    def rounded(a: np.ndarray) -> np.ndarray:
        return a.astype(dtype).astype(np.float64)

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    for row, (slot, computed) in enumerate(zip(*rows, strict=True)):
        held, begun = slot < len(S), slot < len(S) and computed > 0
        past = history[slot] if begun else np.zeros(history.shape[1:])
        M = S[slot] if begun else np.zeros(S.shape[1:])
        qkv, K = x.qkv[row], M.shape[-1]
        if whole:
            window = np.concatenate([past, qkv[None]])
            y = (x.taps * window).sum(0)
            qkv, past = rounded(y * sigmoid(y)), window[1:]
        q, k, v = np.split(qkv, [K, 2 * K], axis=-1)
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        g = BOUND * sigmoid(np.exp(gates.A_log)[:, None] * (gates.f[row] + gates.dt_bias))
        M = M * np.exp(g)[:, None]
        u = sigmoid(gates.b[row])[:, None] * (v - np.einsum("hvk,hk->hv", M, k))
        M = M + u[..., None] * k[:, None]
        o = rounded(np.einsum("hvk,hk->hv", M, q) * K**-0.5)
        if whole:
            o = rounded(o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * x.norm * sigmoid(x.out_gate[row]))
        outputs.append(o)
        if held:
            S[slot], history[slot] = M, past if whole else history[slot]
    return Pools(history, S), np.stack(outputs)


def kernel(pools: Pools, x: Inputs, rows: Rows, whole: bool, tuning: Tuning, interpret: bool) -> tuple[Pools, Array]:
    if whole:
        *pools, o = layer_step(*pools, x.x, x.gates, rows, EPS, BOUND, tuning, interpret)
        return Pools(*pools), o
    S, o = step(pools.S, *x.qkv, x.gates, rows, BOUND, tuning, interpret)
    return pools._replace(S=S), o


def relative(got: Array, want: Array) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(f"{np.linalg.norm(a - b) / np.linalg.norm(b):.2e}")


@functools.cache
def jitted(f: Callable, **fixed) -> Callable:
    """Without the option XLA, which interprets as well, leaves out roundings between two float32 operations."""
    return jax.jit(functools.partial(f, **fixed), compiler_options={"xla_allow_excess_precision": False})


def errors(
    tuning: Tuning, whole: bool, interpret: bool, dtype: str, K: int = 128, V: int = 128, steps: int = 4, **case
) -> dict[str, float]:
    """Relative errors of outputs and states over a few steps against both references.

    Seven rows in eleven slots, all of which hold NaN but the past of those rows that have one. Row 1 begins; row 2 owns no
    slot. Nothing may appear in a slot that no row owns, nor change there.
    """
    B, H, slots = 7, 3, 11
    r = np.random.default_rng(3)
    places = r.permutation(slots)[:B].astype(np.int32)
    computed = np.full(B, 5, np.int32)
    places[2], computed[1] = NOWHERE, 0
    owned, begun = np.delete(places, 2), np.delete(places, [1, 2])
    history, S = np.full((slots, WIDTH - 1, H, 2 * K + V), np.nan), np.full((slots, H, V, K), np.nan)
    for pool in (history, S):
        pool[begun] = r.standard_normal((len(begun), *pool.shape[1:]))
    pools = Pools(jnp.asarray(history, dtype), jnp.asarray(S, jnp.float32))
    keys = r.standard_normal((B, H, K), dtype=np.float32)
    run = jitted(kernel, whole=whole, tuning=tuning, interpret=interpret)
    plain = jitted(recurrence, whole=whole)
    found, mine, theirs, truth = {}, pools, pools, pools
    for t in range(steps):
        x, rows = draw(10 + t, B, H, K, V, dtype, keys, **case), Rows(jnp.asarray(places), jnp.asarray(computed))
        (mine, o), (theirs, o_theirs) = (f(p, x, rows) for f, p in ((run, mine), (plain, theirs)))
        truth, o_truth = float64(truth, x, rows, whole)
        for name, a, b in (
            ("o", o, o_theirs), ("S", mine.S[owned], theirs.S[owned]),
            ("o, float64", o, o_truth), ("S, float64", mine.S[owned], truth.S[owned]),
        ):  # fmt: skip
            found.setdefault(name, []).append(relative(a, b))
        assert not whole or bool((mine.conv[owned] == theirs.conv[owned]).all())
        computed = computed + 1
    others = np.setdiff1d(np.arange(slots), owned)
    for before, after in zip(pools, mine, strict=True):
        assert np.asarray(before)[others].tobytes() == np.asarray(after)[others].tobytes()
    return {name: float(np.max(values)) for name, values in found.items()}  # NaN stays NaN


# -- time ----------------------------------------------------------------------------------------------------------

K = V = 128
SHAPES = [(12, 1), (12, 8), (12, 32), (12, 64), (12, 128), (12, 256), (96, 1), (96, 8), (96, 32), (96, 128)]
CALLS = 32  # at least, in one program
COLD_BYTES = 4e8  # of states that other calls touch before a call meets the same slots again: the L2 cache holds 6e7
STEP = [
    Tuning(*t) for t in ((8, 1), (16, 1), (8, 2), (16, 2), (16, 4), (32, 4), (64, 8), (8, 1, 4), (16, 2, 2), (32, 4, 4))
]
LAYER = [Tuning(rows, warps, V // rows) for rows, warps in ((8, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8))]
XLA_SHAPES, XLA_CALLS = [(12, 1), (12, 32), (12, 256), (96, 128)], 4  # a program of few calls, for it compiles slowly


def state_bytes(heads: int, batch: int) -> int:
    """Read and written."""
    return 2 * 4 * heads * batch * K * V


def slot_sets(heads: int, batch: int) -> list[np.ndarray]:
    """Disjoint sets of slots in random order, so many that their states pass through the cache before the first comes back."""
    count = max(2, int(np.ceil(2 * COLD_BYTES / state_bytes(heads, batch))))
    return list(np.random.default_rng(5).permutation(count * batch).astype(np.int32).reshape(count, batch))


def turns_of(sets: list, calls: int = CALLS) -> list:
    """All sets, and again until there are enough calls."""
    return sets * -(-calls // len(sets))


def microseconds(call: Callable, pools: Pools, args: object, turns: list[Array]) -> float:
    """Time of a call: one program calls once for each set of slots, each call waiting for the one before through the pools.
    Programs are queued, the host waits once."""

    def calls(pools: Pools, args: object, turns: list[Array]) -> Pools:
        return functools.reduce(lambda pools, slots: call(pools, args, slots)[0], turns, pools)

    program = jax.jit(calls, donate_argnums=0)

    def run(pools: Pools, programs: int) -> tuple[Pools, float]:
        began = time.perf_counter()
        for _ in range(programs):
            pools = program(pools, args, turns)
        jax.block_until_ready(pools)
        return pools, (time.perf_counter() - began) / (programs * len(turns)) * 1e6

    pools, guess = run(run(pools, 2)[0], 2)
    programs, times = max(2, int(12e3 / (guess * len(turns)))), []
    for _ in range(5):
        pools, us = run(pools, programs)
        times.append(us)
    return round(float(np.median(times)), 2)


def attempt(f: Callable, *args) -> float | str:
    try:
        return f(*args)
    except Exception as e:  # a variant that does not compile is a result too
        return f"{type(e).__name__}: {str(e)[:120]}"


def pools_of(heads: int, slots: int, whole: bool) -> Pools:
    key = jax.random.key(0)
    history = jax.random.normal(key, (slots if whole else 1, WIDTH - 1, heads, 2 * K + V), jnp.bfloat16)
    return Pools(history, jax.random.normal(key, (slots, heads, V, K), jnp.float32))


def time_shape(heads: int, batch: int, whole: bool, tunings: list[Tuning]) -> dict:
    """All tunings with states from memory, the best one with the same slots again and again, and at some shapes the plain
    operations, without the outputs: nothing reads them, so XLA leaves them out."""
    sets = [jnp.asarray(s) for s in slot_sets(heads, batch)]
    x, computed = draw(2, batch, heads, K, V, "bfloat16"), jnp.full(batch, 9, jnp.int32)

    def measure(call: Callable, turns: list[Array]) -> float | str:
        @jax.jit  # traced once for all calls of a program
        def one(pools: Pools, x: Inputs, slots: Array) -> tuple[Pools, Array]:
            return call(pools, x, Rows(slots, computed), whole)

        return attempt(microseconds, one, pools_of(heads, batch * len(sets), whole), x, turns)

    calls = {t: functools.partial(kernel, tuning=t, interpret=False) for t in tunings}
    variants = [(measure(call, turns_of(sets)), t) for t, call in calls.items()]
    us, best = min((v for v in variants if isinstance(v[0], float)), key=lambda v: v[0])
    row = {
        "H": heads, "B": batch, "us": us, "floor_us": floor(heads, batch, whole), "tuning": best._asdict(),
        "same_slots_us": measure(calls[best], turns_of(sets[:1])), "TB/s of state": round(state_bytes(heads, batch) / us / 1e6, 2),
        "variants": [{**t._asdict(), "us": us} for us, t in variants],
    }  # fmt: skip
    if (heads, batch) in XLA_SHAPES:
        row["xla_us"] = measure(recurrence, turns_of(sets, XLA_CALLS)[:XLA_CALLS])
    return row


def floor(heads: int, batch: int, whole: bool) -> float:
    """Microseconds at 4.3 TB/s, the copy rate of an H200: the state, and the bytes a token brings and takes."""
    token = 2 * (3 * K + 2 * V + 1)  # q, k, v, f, o, b
    if whole:
        token += 2 * V + 2 * 2 * (WIDTH - 1) * (2 * K + V)
    return round((state_bytes(heads, batch) + heads * batch * token) / 4.3e6, 2)


def scaling(nbytes: int) -> dict[str, float]:
    """XLA's own scaling of an array in place, read and written: what a kernel of this size could reach."""

    def call(pools: Pools, _: object, factor: Array) -> tuple[Pools, Array]:
        return pools._replace(S=lax.optimization_barrier(pools.S * factor)), factor

    pools = Pools(jnp.ones(1), jnp.ones((nbytes // 4 // K, K)))
    us = microseconds(call, pools, 0, list(jnp.linspace(0.9, 0.99, CALLS)))
    return {"bytes": nbytes, "us": us, "TB/s": round(2 * nbytes / us / 1e6, 3)}


# -- peer ----------------------------------------------------------------------------------------------------------


def peer() -> None:
    """FLA's recurrent kernel: as many calls as ours in a CUDA graph, median of 20 replays, in microseconds a call.

    Twice: the public function, which writes the state elsewhere; and the function under it with the state in place, [V, K]
    and by slot, which is what ours does. Every call has other states, as ours.
    """
    import torch
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda, fused_recurrent_kda_fwd

    def graph_us(calls: list[Callable]) -> float:
        with torch.no_grad():
            calls[0]()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(21)]
            for begin, end in pairs:
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
        return round(float(np.median([begin.elapsed_time(end) for begin, end in pairs[1:]])) * 1e3 / len(calls), 2)

    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    for heads, B in SHAPES:
        q, k, v, g = (normal(B, 1, heads, K) for _ in range(4))
        A_log, dt_bias = torch.rand(heads, device="cuda"), torch.rand(heads * K, device="cuda")
        x = dict(q=q, k=k, v=v, g=g, beta=normal(B, 1, heads), A_log=A_log, dt_bias=dt_bias, lower_bound=BOUND, **flags)
        sets = slot_sets(heads, B)
        pool = torch.randn(len(sets) * B, heads, V, K, device="cuda")
        slots = [torch.tensor(s, device="cuda") for s in sets]
        public = functools.partial(fused_recurrent_kda, **x, output_final_state=True)
        in_place = functools.partial(
            fused_recurrent_kda_fwd, **x, initial_state=pool, inplace_final_state=True, state_v_first=True, out=torch.empty_like(v)
        )  # fmt: skip
        row = {
            "H": heads, "B": B, "torch": torch.__version__,
            "us": attempt(graph_us, [functools.partial(public, initial_state=p) for p in turns_of(list(pool.split(B)))]),
            "in_place_us": attempt(graph_us, [functools.partial(in_place, ssm_state_indices=s) for s in turns_of(slots)]),
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    interpret = jax.default_backend() != "gpu"
    device = jax.devices()[0]
    record: dict = {
        "what": "kda_decode_trial", "date": datetime.date.today().isoformat(), "device": device.device_kind,
        "platform_version": device.client.platform_version, "python": platform.python_version(), "jax": jax.__version__,
        "errors": [], "step": [], "layer_step": [], "peer": [],
    }  # fmt: skip
    size, tunings = {}, {"step": STEP, "layer_step": LAYER}
    if interpret:
        size = dict(K=16, V=32)
        tunings = {"step": [Tuning(8, 4), Tuning(8, 1, 2)], "layer_step": [Tuning(32, 4), Tuning(8, 2, 4)]}
    for name, tried in tunings.items():
        cases = [(tried[0], *case) for case in itertools.product(GATES, (0.0, 0.9), ("float32", "bfloat16"))]
        for tuning, gate, correlation, dtype in cases + [(t, "mixed", 0.5, "float32") for t in tried[1:]]:
            case = dict(gate=gate, correlation=correlation, dtype=dtype)
            found = errors(tuning, name == "layer_step", interpret, **case, **size)
            record["errors"].append({"kernel": name, "tuning": tuning._asdict(), **case, **found})
            print(json.dumps(record["errors"][-1]), flush=True)
    if interpret:  # no card: nothing to time
        return
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    record["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    record["scaling"] = [scaling(state_bytes(*shape) // 2) for shape in ((12, 256), (96, 128))]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-kda_decode_trial.json"

    def keep(name: str, row: dict) -> None:
        record[name].append(row)
        path.write_text(json.dumps(record, indent=1) + "\n")

    for shape, (name, tried) in itertools.product(SHAPES, tunings.items()):
        keep(name, time_shape(*shape, name == "layer_step", tried))
        print(name, json.dumps(record[name][-1]), flush=True)
    if args.peer:
        command = [sys.executable, __file__, "--only-peer"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in filter(lambda line: line.startswith("{"), process.stdout):
                keep("peer", json.loads(line))
    for one, layer, other in itertools.zip_longest(record["step"], record["layer_step"], record["peer"], fillvalue={}):
        columns = [r.get(k) for r in (one, layer) for k in ("us", "floor_us", "same_slots_us", "xla_us", "tuning")]
        print(one["H"], one["B"], *columns, "peer", other.get("us"), other.get("in_place_us"))


if __name__ == "__main__":
    peer() if sys.argv[1:] == ["--only-peer"] else main()
