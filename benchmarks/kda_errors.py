"""Relative errors of KDA prefill on a GPU against the recurrence in float64, ours beside FLA's on the same inputs.

One row of a thousand tokens with a state before it, two heads of 128 channels, inputs of bfloat16; the worse of outputs and
last state. "default", "high" and "highest" are the Triton form, which so few heads get, by its precision; "mosaic", the form in
Mosaic GPU, takes no gate without a bound. "fla" needs torch and fla, and tunes for minutes.

python benchmarks/kda_errors.py [--forms default,mosaic,high,highest,fla] [--bound {-5,none,both}] [--out DIR]
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.bench import driver, peer
from k3jax.pallas import cannot_compile
from k3jax.pallas import kda_prefill as kda

T, H, K = 1000, 2, 128
PREFILL = jax.jit(kda.prefill, static_argnames=("lower_bound", "precision", "tuning"))  # compiled once for all inputs
CORRELATIONS = (0.0, 0.5, 0.9, 1.0)
GATES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {  # f of a gate -5 sigmoid(f)
    "mixed": lambda r, shape: 3 * r.standard_normal(shape),
    "0": lambda r, shape: np.full(shape, -200.0),
    "-2.5": lambda r, shape: np.zeros(shape),
    "-5": lambda r, shape: np.full(shape, 200.0),
    "tokens at 0 or -5": lambda r, shape: np.broadcast_to(r.choice([-200.0, 200.0], (shape[0], 1, 1)), shape),
}
Inputs = dict[str, np.ndarray]


def draw(correlation: float, gate: str) -> Inputs:
    r = np.random.default_rng(0)
    shape = (T, H, K)
    k = np.sqrt(1 - correlation) * r.standard_normal(shape) + np.sqrt(correlation) * r.standard_normal((1, H, K))
    q, v = r.standard_normal((2, *shape))
    x = {"q": q, "k": k, "v": v, "f": GATES[gate](r, shape), "b": r.standard_normal((T, H)) + 2}
    rounded: Inputs = {name: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for name, a in x.items()}
    return rounded | {"S": r.standard_normal((H, K, K)).astype(np.float32).astype(np.float64)}


def recurrence(x: Inputs, bound: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and the state after them; A_log and dt_bias are 0."""
    g = -np.logaddexp(0, x["f"]) if bound is None else bound / (1 + np.exp(-x["f"]))
    beta = 1 / (1 + np.exp(-x["b"]))
    q, k = (x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + 1e-6) for n in ("q", "k"))
    S, o = x["S"], np.zeros(x["v"].shape)
    for t in range(T):
        S = S * np.exp(g[t])[:, None]
        u = beta[t][:, None] * (x["v"][t] - np.einsum("hvk,hk->hv", S, k[t]))
        S = S + u[..., None] * k[t][:, None]
        o[t] = np.einsum("hvk,hk->hv", S, q[t]) * K**-0.5
    return o, S


def ours(
    x: Inputs, bound: float | None, precision: kda.Precision = "default", tuning: kda.Mosaic | None = None
) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, f, b = (jnp.asarray(x[n], jnp.bfloat16) for n in ("q", "k", "v", "f", "b"))
    raw = kda.Raw(q, k, v, f, b, A_log=jnp.zeros(H), dt_bias=jnp.zeros((H, K)))
    rows = kda.Rows(*(jnp.asarray(a, jnp.int32) for a in ([0, T], [0], [1])))
    S, o = PREFILL(jnp.asarray(x["S"][None], jnp.float32), raw, rows, bound, precision=precision, tuning=tuning)
    return np.asarray(o, np.float64), np.asarray(S[0], np.float64)


def fla(x: Inputs, bound: float | None) -> tuple[np.ndarray, np.ndarray]:
    import torch
    from fla.ops.kda import chunk_kda

    def low(a: np.ndarray) -> Any:
        return torch.tensor(a[None], dtype=torch.bfloat16, device="cuda")

    def single(a: np.ndarray) -> Any:
        return torch.tensor(np.ascontiguousarray(a), dtype=torch.float32, device="cuda")

    flags = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    o, S = chunk_kda(
        *(low(x[n]) for n in ("q", "k", "v")), g=low(x["f"]), beta=low(x["b"]), A_log=single(np.zeros(H)),
        dt_bias=single(np.zeros(H * K)), initial_state=single(np.swapaxes(x["S"], 1, 2)[None]), output_final_state=True,
        safe_gate=bound is not None, lower_bound=bound, **flags,
    )  # fmt: skip
    return o[0].double().cpu().numpy(), np.swapaxes(S[0].double().cpu().numpy(), 1, 2)


def worst(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> float:
    """NaN stays NaN."""
    return float(np.max([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)]))


FORMS: dict[str, Callable[..., Any]] = {
    "default": ours, "mosaic": functools.partial(ours, tuning=kda.Mosaic()),
    "high": functools.partial(ours, precision="high"), "highest": functools.partial(ours, precision="highest"), "fla": fla,
}  # fmt: skip
BOUNDS: dict[str, tuple[float | None, ...]] = {"-5": (-5.0,), "none": (None,), "both": (-5.0, None)}


def measure(form: str, x: Inputs, bound: float | None, want: tuple[np.ndarray, ...]) -> float | str | None:
    """The error; what failed; or None where the form is of other gates."""
    if form == "mosaic" and bound is None:
        return None
    try:
        error = worst(FORMS[form](x, bound), want)
        return error if np.isfinite(error) else f"{error}"
    except Exception as error:  # what one cannot do is a result, and no reason to stop
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def refuse(forms: list[str], path: Path | None) -> str | None:
    """Why nothing can be measured, or None."""
    for form in forms:
        if form not in FORMS:
            return f"forms={form!r}: allowed are {', '.join(FORMS)}, with commas between them"
    if "fla" in forms and (missing := peer.missing()):
        return f"forms='fla': allowed where {' and '.join(missing)} can be imported"
    if path and path.parent.is_file():
        return f"out={str(path.parent)!r}: allowed is a directory"
    if path and path.exists():
        return f"out={str(path.parent)!r}: allowed is a directory without {path.name}, which is not written over"
    if (backend := jax.default_backend()) != "gpu":
        return f"backend={backend!r}: allowed is 'gpu'"
    return cannot_compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="default,mosaic,high,highest", help="with commas between them; also fla")
    parser.add_argument("--bound", choices=BOUNDS, default="both", help="of the gate")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    forms, date = list(dict.fromkeys(args.forms.split(","))), f"{datetime.date.today()}"
    path = args.out and args.out / f"{date}-kda_errors.json"
    if reason := refuse(forms, path):
        raise SystemExit(reason)
    packages = ["jax", *(["torch", "triton", "fla-core"] if "fla" in forms else [])]
    record: dict[str, Any] = {
        "what": "kda_errors", "date": date, "device": jax.devices()[0].device_kind,
        "driver": driver(), "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "options": {"forms": forms, "bound": args.bound}, "rows": [],
    }  # fmt: skip
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'bound':>6} {'correlation':>11} {'gate':20}", *(f"{name:>9}" for name in forms))
    for bound, correlation, gate in itertools.product(BOUNDS[args.bound], CORRELATIONS, GATES):
        x = draw(correlation, gate)
        want, row = recurrence(x, bound), {"bound": bound, "correlation": correlation, "gate": gate}
        found = {form: measure(form, x, bound, want) for form in forms}
        record["rows"].append(row | found)
        shown = ("-" if e is None else "failed" if isinstance(e, str) else f"{e:.1e}" for e in found.values())
        print(f"{bound!s:>6} {correlation:11} {gate:20}", *(f"{text:>9}" for text in shown), flush=True)
        if path:
            path.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(isinstance(row[form], str) for row in record["rows"] for form in forms))


if __name__ == "__main__":
    sys.exit(main())
