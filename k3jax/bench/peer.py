"""What kernels are compared with: flash-linear-attention (FLA) in PyTorch, in a process of its own.

`python -m k3jax.bench.peer` answers lines {"op", "calls", "sets", sizes...} on stdin, one line each on stdout: {"us", "how"}
or {"error"}. As many calls with as many different arrays as ours, replayed from a CUDA graph; calls that no graph can hold
(some ask the GPU for lengths) are timed as they are, host time included: "eager".
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from k3jax.bench.cases import BOUND, D, K, V, W, slot_sets, turns_of

NEEDS = ("torch", "fla")
# What its call does where that is not what ours does.
NOTES = {
    "kda_prefill": "chunk_kda: the same",
    "kda_decode": "fused_recurrent_kda_fwd, in place by slot: the recurrence and its gates alone, no convolution, no gated norm",
    "attnres": "fused_attnres with its norm; the addition by PyTorch",
    "gated_norm": "rms_norm_gated: the same",
    "conv": "causal_conv1d of q, of k and of v; no histories",
}
REPLAYS = 21


def missing() -> list[str]:
    """Packages that it needs and that are not there."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


class Peer:
    """The process, started at once and ended with the block. It lives in the memory that JAX leaves: a quarter by default."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "k3jax.bench.peer"]
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is for us, and we end it.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.process.kill()
        self.process.communicate()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer; an "error" too if it has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else {"error": f"it ended with code {self.process.wait()}"}


# -- in the process ------------------------------------------------------------------------------------------------


def _normal(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype))


def _kda(lead: tuple[int, ...], H: int) -> dict[str, Any]:
    """Inputs of both forms of the recurrence."""
    x = {name: _normal(*lead, H, K) for name in ("q", "k", "g")}
    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    fixed = {"A_log": _normal(H, dtype="float32"), "dt_bias": _normal(H * K, dtype="float32"), "lower_bound": BOUND}
    return {**x, "v": _normal(*lead, H, V), "beta": _normal(*lead, H), **fixed, **flags}


def _starts(lengths: list[int]) -> Any:
    """Of packed rows; one alone needs none."""
    import torch

    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(ends, device="cuda") if len(lengths) > 1 else None


def kda_prefill(
    H: int, lengths: list[int], bound: float | None, precision: str, calls: int, sets: int
) -> list[Callable[[], Any]]:
    from fla.ops.kda import chunk_kda

    if precision != "default":
        raise ValueError(f"precision={precision!r}: the peer has 'default' alone")
    state, starts = _normal(len(lengths), H, K, V, dtype="float32"), _starts(lengths)
    more = {"initial_state": state, "output_final_state": True, "cu_seqlens": starts}
    gate = {"lower_bound": bound, "safe_gate": bound is not None}
    return [functools.partial(chunk_kda, **_kda((1, sum(lengths)), H) | gate | more)] * calls


def kda_decode(H: int, B: int, state: str, calls: int, sets: int) -> list[Callable[[], Any]]:
    import torch
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    x, pool = _kda((B, 1), H), _normal(sets * B, H, V, K, dtype=state)
    call = functools.partial(
        fused_recurrent_kda_fwd, **x, initial_state=pool, inplace_final_state=True, state_v_first=True,
        out=torch.empty_like(x["v"]),
    )  # fmt: skip
    slots = [torch.tensor(s, device="cuda") for s in slot_sets(B, sets)]
    return turns_of([functools.partial(call, ssm_state_indices=s) for s in slots], calls)


def attnres(T: int, R: int, pending: bool, calls: int, sets: int) -> list[Callable[[], Any]]:
    import torch
    from fla.ops.attnres import fused_attnres

    query, norm, gain = (_normal(D) for _ in range(3))
    running, added = _normal(T, D), _normal(T, D)

    def call(blocks: list[Any]) -> None:
        if pending:
            torch.add(running, added, out=running)
        fused_attnres(query, [*blocks, running], norm, output_rms_weight=gain)

    turns = [[_normal(T, D) for _ in range(R - 1)] for _ in range(sets)]
    return turns_of([functools.partial(call, blocks) for blocks in turns], calls)


def gated_norm(T: int, H: int, calls: int, sets: int) -> list[Callable[[], Any]]:
    from fla.modules.fused_norm_gate import rms_norm_gated

    o, gain = _normal(T * H, V), _normal(V, dtype="float32")
    gates = [_normal(T * H, V) for _ in range(sets)]
    return turns_of([functools.partial(rms_norm_gated, o, g, gain, None, activation="sigmoid") for g in gates], calls)


def conv(H: int, lengths: list[int], calls: int, sets: int) -> list[Callable[[], Any]]:
    from fla.modules.convolution import causal_conv1d

    starts = _starts(lengths)
    streams = [(_normal(1, sum(lengths), H * C), _normal(H * C, W, dtype="float32")) for C in (K, K, V)]

    def call() -> None:
        for x, taps in streams:
            causal_conv1d(x=x, weight=taps, activation="silu", cu_seqlens=starts)

    return [call] * calls


OPS = {f.__name__: f for f in (kda_prefill, kda_decode, attnres, gated_norm, conv)}


def _median_us(run: Callable[[], Any], calls: int) -> float:
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3 / calls, 3)


def _timed(calls: list[Callable[[], Any]]) -> dict[str, Any]:
    import torch

    def run() -> None:
        for call in calls:
            call()

    with torch.no_grad():
        run()  # compiles and tunes
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph.replay()
            return {"us": _median_us(graph.replay, len(calls)), "how": "graph"}
        except RuntimeError:
            torch.cuda.synchronize()
            return {"us": _median_us(run, len(calls)), "how": "eager"}


def _answer(op: str, **request: Any) -> dict[str, Any]:
    try:
        import torch

        torch.cuda.empty_cache()
        return _timed(OPS[op](**request))
    except Exception as error:  # what the peer cannot do is a result, and no reason to stop
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what others print goes elsewhere
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
