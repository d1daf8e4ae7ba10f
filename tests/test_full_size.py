"""The whole of K3 lowered and compiled for eight devices that hold none of it."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_steps_of_93_layers_compile_within_what_the_plan_says():
    """A decode step of 64 rows and a prefill of 8,192 tokens: what a device is given is what the plan says, to the byte;
    pools are updated where they are; nothing is gathered but the ranks' candidates."""
    command = [sys.executable, ROOT / "benchmarks" / "full_size.py", "--ranks", "8"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1500)
    assert run.returncode == 0, run.stderr[-2000:]
    programs = {p["program"]: p for p in map(json.loads, run.stdout.splitlines())}
    assert set(programs) == {"decode", "prefill"}
    for program in programs.values():
        planned = program["planned"]
        assert program["argument_bytes"] == planned["sum"] > 200e9
        assert program["alias_bytes"] == planned["state"]
        gathered = [name for name in program["collectives"] if not name.startswith("all-reduce")]
        sizes = [math.prod(map(int, re.search(r"\[([\d,]+)\]", name)[1].split(","))) for name in gathered]
        assert gathered and max(sizes) <= 8 * 64
    sums = sum(n for name, n in programs["decode"]["collectives"].items() if "7168" in name)
    assert sums == 1 + 93 + 1 + 92  # embedding, attentions, the dense layer, mixtures: both of their sums in one
    # Of a CPU, which widens bfloat16 matrices before a product; XLA's plan for an H200 has 0.4 GB.
    assert programs["decode"]["temp_bytes"] < 2.1e9
