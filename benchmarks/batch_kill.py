"""Whether `k3jax batch` loses or repeats a line when it is killed: 10,000 lines, kill -9 ten times at random moments.

    python benchmarks/batch_kill.py [--model checkpoints/k3-tiny] [--lines 10000] [--kills 10] [--out benchmarks/results]

Most lines are OpenAI completions, a tenth are chats, a tenth plain prompts, all with a custom_id and all short. Each kill comes
up to two seconds after the output has reached a size drawn at random, so also while a program is being compiled or a file read
again. At the end every custom_id must have one record, every record must be whole, and the last run's exit code 0.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = "And God said unto Moses the LORD of all earth heaven water light day night man woman king Israel".split()


def line(number: int, rng: random.Random) -> dict[str, Any]:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
    custom_id, limit = f"line-{number}", {"max_tokens": rng.randint(1, 4)}
    if number % 10 == 0:
        return {"custom_id": custom_id, "prompt": prompt, **limit}
    url, body = "/v1/completions", {"prompt": prompt, **limit}
    if number % 10 == 1:
        messages = [{"role": "user", "content": prompt}]
        url, body = "/v1/chat/completions", {"messages": messages, "reasoning_effort": "none", **limit}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def killed(command: list[str], output: Path, grown: int, rng: random.Random) -> dict[str, float] | None:
    """Start, kill once the output has `grown` bytes and a moment has passed; None where it ended before."""
    began, jitter = time.time(), rng.uniform(0, 2)
    process = subprocess.Popen(command)
    while process.poll() is None and size(output) < grown:
        time.sleep(0.01)
    time.sleep(jitter)
    process.kill()
    if process.wait() != -9:
        return None
    data = output.read_bytes() if output.exists() else b""
    return {
        "after_s": round(time.time() - began, 2),
        "records": data.count(b"\n"),
        "torn_bytes": len(data) - 1 - data.rfind(b"\n"),
    }


def processor() -> str:
    for entry in Path("/proc/cpuinfo").read_text().splitlines():
        if entry.startswith("model name"):
            return entry.split(":", 1)[1].strip()
    return platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/k3-tiny")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the lines and of the moments; drawn where it is left out"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    rng, began = random.Random(seed), time.time()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        given = [line(number, rng) for number in range(args.lines)]
        source.write_text("".join(json.dumps(entry) + "\n" for entry in given))
        command = [sys.executable, "-m", "k3jax", "batch", "--model", args.model, "-i", str(source), "-o", str(output)]
        command += ["--rows", str(args.rows), "--tokens", "256", "--dtype", args.dtype]
        os.environ["JAX_PLATFORMS"] = "cpu"
        # About how large the output will be; a record has some 400 bytes.
        moments = sorted(rng.randrange(args.lines * 350) for _ in range(args.kills))
        kills = [killed(command, output, moment, rng) for moment in moments]
        code = subprocess.run(command).returncode
        summary = json.loads(output.with_name("out.jsonl.summary.json").read_text())
        data = output.read_bytes()
        records = [json.loads(entry) for entry in data.splitlines()]
        counts = collections.Counter(record["custom_id"] for record in records)
        texts = [r["text"] if "text" in r else r["response"]["body"]["choices"][0] for r in records if not r["error"]]
    once = data.endswith(b"\n") and counts == collections.Counter(entry["custom_id"] for entry in given)
    record = {
        "what": "batch_kill",
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "model": args.model,
        "rows": args.rows,
        "dtype": args.dtype,
        "seed": seed,
        "lines": args.lines,
        "kills": [kill for kill in kills if kill],
        "exit_code": code,
        "records": len(records),
        "custom_ids": len(counts),
        "most_records_of_one": max(counts.values(), default=0),
        "answered": len(texts),
        "each_custom_id_once": once,
        "seconds_in_all": round(time.time() - began, 1),
        "last_run": summary,
    }
    print(json.dumps(record, indent=1))
    if once and len(record["kills"]) == args.kills:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{record['date']}-batch_kill.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if once and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
