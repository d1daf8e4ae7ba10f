"""`k3jax bench kernels`: each kernel's time on a GPU beside its floor, XLA's own form of the operation, and a peer.

A time is that of one call among many in one program, each waiting for the one before, so that neither the host's part nor
a result that nobody reads is left out of account; programs are queued and waited for once; the median of five. What a call
of a model would find in memory it finds there: other calls touch 200 MB before one comes back to the same arrays. What
depends on the step alone (where rows begin) is computed once a program, as in a model's step. The floor is the longer of
the bytes at the copy rate and the operations at the product rate that were measured on an H200.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from k3jax.bench import peer as peers
from k3jax.bench.cases import CASES, Call, Case, turns_of
from k3jax.pallas import cannot_compile
from k3jax.version import __version__

BANDWIDTH = 4.3e12  # bytes/s of a copy, measured on an H200
PRODUCTS = 790e12  # FLOP/s of bfloat16 products, measured on an H200
QUEUED_US = 8e3  # of work at least between two waits
REPEATS = 5


class Floor(NamedTuple):
    """No call can be faster, on an H200. Microseconds."""

    us: float
    by: str  # "bytes" or "FLOPs"
    handed_us: float  # the same with what its kernels hand each other


def floor(case: Case) -> Floor:
    moved, computed = case.bytes / BANDWIDTH * 1e6, case.flops / PRODUCTS * 1e6
    handed = moved + case.handed / BANDWIDTH * 1e6
    return Floor(
        round(max(moved, computed), 3), "bytes" if moved >= computed else "FLOPs", round(max(handed, computed), 3)
    )


def microseconds(case: Case, call: Call, calls: int) -> float:
    """Time of a call in a program of so many, or a few more; sets beyond them are left out."""
    carry, args, sets = case.make()
    sets = sets[:calls]
    program, calls = case.chained(call, calls), len(turns_of(sets, calls))

    def run(carry: Any, programs: int) -> tuple[Any, float]:
        began, given = time.perf_counter(), carry
        for _ in range(programs):
            given = program(carry, args, sets)
            carry = given if case.in_place else carry
        jax.block_until_ready(given)
        return carry, (time.perf_counter() - began) / (programs * calls) * 1e6

    carry, _ = run(carry, 2)  # compiles
    carry, guess = run(carry, 2)
    programs, found = max(2, int(QUEUED_US / (guess * calls))), []
    for _ in range(REPEATS):
        carry, us = run(carry, programs)
        found.append(us)
    return statistics.median(found)


def measure(case: Case, xla: bool, peer: peers.Peer | None) -> dict[str, Any]:
    """A row of the record. What fails is named under "errors", and its time is None."""
    least, errors = floor(case), {}

    def attempt(name: str, call: Call, calls: int) -> float | None:
        try:
            return round(microseconds(case, call, calls), 3)
        except Exception as error:  # what does not compile or fit is a result, and no reason to stop
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return None

    us = attempt("us", case.kernel, max(case.calls, case.sets))
    row: dict[str, Any] = {
        "op": case.op, **case.sizes, "bytes": case.bytes, "flops": case.flops, "floor_us": least.us, "floor_by": least.by,
        "handed_bytes": case.handed, "floor_handed_us": least.handed_us, "us": us,
        "ratio": us and round(us / least.us, 3),
    }  # fmt: skip
    if xla:
        row["xla_us"] = attempt("xla_us", case.plain, case.plain_calls)
    if peer is not None and case.peered and case.op in peers.OPS:
        answer = peer.ask(op=case.op, calls=max(case.calls, case.sets), sets=case.sets, **case.sizes)
        row |= {"peer_us": answer.get("us"), "peer_how": answer.get("how")}
        errors |= {"peer_us": answer["error"]} if "error" in answer else {}
    return row | ({"errors": errors} if errors else {})


# -- what is printed ---------------------------------------------------------------------------------------------------

COLUMNS = (
    f"{'op':11} {'shape':22} {'MB':>8} {'GFLOP':>8} {'floor us':>9} {'us':>8} {'ratio':>6} {'XLA us':>8} {'peer us':>9}"
)
FOOTNOTES = """\
floor: bytes at 4.3 TB/s or FLOPs at 790 TFLOP/s, an H200's; * with what the operation's kernels hand each other as well
XLA: few calls a program, so arrays of small shapes stay in the L2 cache; attnres of T=1 does so in all columns"""


def line(case: Case, row: dict[str, Any]) -> str:
    """A row for people; of a peer that was timed with the host's part, the time with an e."""

    def number(name: str, form: str = "{:.4g}") -> str:
        value = row.get(name)
        return "failed" if name in row.get("errors", {}) else "-" if value is None else form.format(value)

    found = (
        f"{case.op:11} {case.shape:22} {case.bytes / 1e6:8.4g} {case.flops / 1e9:8.3g} {number('floor_us'):>9} {number('us'):>8} "
        f"{number('ratio', '{:.2f}'):>6} {number('xla_us'):>8} {number('peer_us') + 'e' * (row.get('peer_how') == 'eager'):>9}"
    )
    if case.handed:
        found += f"\n{'':52}{number('floor_handed_us') + '*':>10}"
    return found


def footnotes(ops: Sequence[str], peer: bool) -> str:
    if not peer:
        return FOOTNOTES
    notes = [f"  {op}: {note}" for op, note in peers.NOTES.items() if op in ops]
    return "\n".join([FOOTNOTES, "peer (e: eager, the host's time included; else from a CUDA graph):", *notes])


# -- the command -------------------------------------------------------------------------------------------------------


def chosen(only: str | None) -> list[Case]:
    """The cases of the operations named. Raises ValueError for a name that none has."""
    ops = list(dict.fromkeys(case.op for case in CASES))
    wanted = ops if only is None else only.split(",")
    for op in wanted:
        if op not in ops:
            raise ValueError(f"only={op!r}: allowed are {', '.join(ops)}, with commas between them")
    return [case for case in CASES if case.op in wanted]


def driver() -> str | None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return None


def _versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "k3jax": __version__}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def command(only: str | None, xla: bool, peer: bool, out: Path | None, say: Callable[[str], None] = print) -> int:
    """What `k3jax bench kernels` does; the exit code, 1 where something failed. The record grows row by row.

    Raises ValueError without a GPU, where kernels do not compile, for unknown operations, and for a peer that is not installed.
    """
    cases = chosen(only)
    if (backend := jax.default_backend()) != "gpu":
        raise ValueError(f"backend={backend!r}: allowed is 'gpu'; the time of an interpreted kernel says nothing")
    if reason := cannot_compile():
        raise ValueError(reason)
    if peer and (missing := peers.missing()):
        raise ValueError(f"peer=True: allowed where {' and '.join(missing)} can be imported")
    path = out and out / f"{datetime.date.today()}-kernels.json"
    if path and path.exists():
        raise ValueError(f"out={str(out)!r}: allowed is a directory without {path.name}, which is not written over")
    device, failed = jax.devices()[0], False
    packages = ("jax", "jaxlib", *(("torch", "triton", "flash-linear-attention", "fla-core") if peer else ()))
    record: dict[str, Any] = {
        "what": "kernels", "date": f"{datetime.date.today()}", "device": device.device_kind, "driver": driver(),
        "platform_version": device.client.platform_version, **_versions(*packages),
        "options": {"only": only, "xla": xla, "peer": peer}, "rows": [],
    }  # fmt: skip
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    say(COLUMNS)
    with peers.Peer() if peer else contextlib.nullcontext() as process:
        for case in cases:
            row = measure(case, xla, process)
            record["rows"].append(row)
            if path is not None:
                _write(path, record)
            say(line(case, row))
            for name, error in row.get("errors", {}).items():
                failed = True
                say(f"{'':11} {name}: {error}")
    say(footnotes([case.op for case in cases], peer))
    return int(failed)


def _write(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
