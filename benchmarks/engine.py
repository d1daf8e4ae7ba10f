"""What many requests at once bring on this processor: throughput by concurrency, programs compiled, time of the host.

    python benchmarks/engine.py [--model checkpoints/k3-tiny] [--out benchmarks/results]

Throughput: prompts of 32 to 128 tokens, answers of 16 to 64, four requests a row and no prefix in common; every round is the
same work in an engine that has compiled its programs, and the best of the rounds counts. Steps: one decode step, and one that
computes 128 prompt tokens beside the decodes, by rows. Compiles: requests of any size, against the programs that the engine
lists. Host: with programs that answer at once, from a step's results to the next launch; all 64 rows decode a token a step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax import LM, SamplingParams, generate, load
from k3jax.engine.batching import Buckets, Row
from k3jax.engine.engine import Engine
from k3jax.engine.runner import Runner
from k3jax.generate import DECODE, Found
from k3jax.sampling import Sampled

CONCURRENT = (1, 4, 16, 64)
PAGE = 64
PROMPT, ANSWER = 128, 64  # tokens at most
LONGEST = -(-(PROMPT + ANSWER) // PAGE)  # pages of a request


def engine(lm: LM, rows: int) -> Engine:
    """One that holds `rows` of the requests measured here, with programs of just these sizes: three."""
    buckets, pages = Buckets((rows,), (PROMPT,), (LONGEST,)), rows * LONGEST
    return Engine(
        lm, rows=rows, tokens=PROMPT, page=PAGE, pages=pages, snapshots=0, prefix_cache=False, buckets=buckets
    )


def work(requests: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """The same requests every time."""
    rng = random.Random(1)
    return [
        (
            [rng.randrange(vocabulary) for _ in range(rng.randint(PROMPT // 4, PROMPT))],
            SamplingParams(max_tokens=rng.randint(ANSWER // 4, ANSWER), temperature=1, seed=i, ignore_eos=True),
        )
        for i in range(requests)
    ]


def throughput(lm: LM, rounds: int) -> list[dict[str, Any]]:
    """Generated tokens a second by rows. Rounds of the sizes alternate, so that a busy moment hits all of them."""
    engines = {rows: engine(lm, rows) for rows in CONCURRENT}
    seconds: dict[int, list[float]] = {rows: [] for rows in CONCURRENT}
    made = {}
    for number in range(1 + rounds):
        for rows, e in engines.items():
            before, began = e.stats().tokens, time.perf_counter()
            for prompt, params in work(max(16, 4 * rows), lm.config.vocab_size):
                e.add_request(prompt, params)
            for _ in e.run():
                pass
            made[rows] = e.stats().tokens - before
            if number:  # the first compiles
                seconds[rows].append(time.perf_counter() - began)
    found = []
    for rows in CONCURRENT:
        rates = sorted(made[rows] / s for s in seconds[rows])
        found.append(dict(concurrent=rows, tokens_per_s=round(rates[-1], 1), slowest_round=round(rates[0], 1)))
    for row in found:
        row["ratio"] = round(row["tokens_per_s"] / found[0]["tokens_per_s"], 2)
    return found


def median_ms(run: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times + 2):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return round(1e3 * float(np.median(seconds[2:])), 3)


def steps(lm: LM) -> list[dict[str, Any]]:
    """Milliseconds of a step by rows, packing included, each row with 100 tokens behind it."""
    found = []
    for rows in CONCURRENT:
        e = engine(lm, rows)
        runner, sampling = e.runner, e.runner.state.sampling
        runner.state = runner.state._replace(sampling=sampling._replace(max_tokens=sampling.max_tokens + 10**6))
        pages = [list(range(i * LONGEST, (i + 1) * LONGEST)) for i in range(rows)]
        decodes = [Row([5], 100, i, pages[i]) for i in range(rows)]
        mixed = [*decodes[:-1], Row([7] * PROMPT, 0, rows - 1, pages[-1])]

        def timed(batch: list[Row], count: int, runner: Runner = runner) -> float:
            def run() -> None:
                carry = runner.state.carry
                assert carry is not None
                lengths = jnp.full_like(carry.lengths, 100)  # the same work every time
                runner.state = runner.state._replace(carry=carry._replace(lengths=lengths))
                runner.run(batch, steps=count)

            return median_ms(run, 10)

        one, many, both = timed(decodes, 1), timed(decodes, DECODE) / DECODE, timed(mixed, 1)
        found.append(dict(rows=rows, decode_ms=one, decode_in_loop_ms=round(many, 3), mixed_ms=both))
        e.close()
    return found


def compiles(lm: LM, requests: int) -> dict[str, Any]:
    """Programs of `requests` requests of any size, in an engine of small buckets."""
    rng, vocabulary = random.Random(2), lm.config.vocab_size
    e = Engine(lm, rows=16, tokens=256, page=16, pages=160, buckets=Buckets((1, 16), (32, 256), (4, 16)))
    left = requests
    while left or e.has_work:
        for _ in range(min(left, rng.randrange(4))):
            prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 200))]
            e.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 24), temperature=rng.choice((0, 1))))
            left -= 1
        e.step()
    programs = sum(program._cache_size() for program in (generate.step, generate.decode))  # type: ignore[attr-defined]
    stats, listed = e.stats(), len(e.programs())
    e.close()
    # Beside them: programs that put requests into slots, copy memory and make small arrays.
    return dict(requests=stats.requests, listed=listed, compiled=programs, all_programs=stats.compiles)


@contextmanager
def stubbed() -> Iterator[dict[str, float]]:
    """generate's programs answer at once, from arrays that are ready; the times at which they are called and have answered."""
    real = {name: getattr(generate, name) for name in ("step", "decode", "place", "copy")}
    times = dict(ready=0.0, launched=0.0)

    def answer(rows: int, sampled: np.ndarray, decode: bool) -> Found:
        tokens = np.where(sampled, 300, -1).astype(np.int32)
        if decode:
            tokens = np.concatenate([tokens[None], np.full((DECODE - 1, rows), -1, np.int32)])
        return Found(Sampled(tokens), np.zeros(rows, bool), np.full(rows, -1, np.int32))  # type: ignore[arg-type]

    def step(model: Any, state: Any, batch: Any, sampled: np.ndarray, *_: Any) -> tuple[Any, Found]:
        times["launched"] = time.perf_counter()
        found = answer(len(sampled), sampled, False)
        times["ready"] = time.perf_counter()
        return state, found

    def decode(model: Any, state: Any, slots: np.ndarray, *_: Any) -> tuple[Any, Found]:
        times["launched"] = time.perf_counter()
        found = answer(len(slots), slots < 2**30, True)
        times["ready"] = time.perf_counter()
        return state, found

    try:
        generate.step, generate.decode = step, decode  # type: ignore[assignment]
        generate.place = generate.copy = lambda state, *_, **__: state  # type: ignore[assignment]
        yield times
    finally:
        for name, program in real.items():
            setattr(generate, name, program)


def host(lm: LM, rows: int = 64, count: int = 400) -> dict[str, Any]:
    """Milliseconds from a step's results to the next launch: reading tokens, text, bookkeeping, packing.

    Of decode steps, which look at one token a row, and of the steps at which prompts of 100 tokens begin and end.
    """
    prompts = [prompt for prompt, _ in work(rows, lm.config.vocab_size)]
    for _ in range(2):  # the first compiles what makes the arrays of new requests, and does not count
        e = Engine(lm, rows=rows, tokens=256, page=PAGE, pages=rows * 16, snapshots=rows, look=1)
        gaps: dict[str, list[float]] = {"decode": [], "with_prompts": []}
        with stubbed() as times:
            for prompt in prompts:
                e.add_request(prompt, SamplingParams(max_tokens=count + rows, ignore_eos=True))
            for _ in range(count):
                ready, beginning = times["ready"], bool(e.scheduler.waiting)
                beginning |= any(not job.is_decode for job in e.scheduler.running)
                e.step()
                if ready:
                    gaps["with_prompts" if beginning else "decode"].append(1e3 * (times["launched"] - ready))
        e.close()
    return {
        name: dict(
            steps=len(found),
            median_ms=round(float(np.median(found)), 3),
            p99_ms=round(float(np.percentile(found, 99)), 3),
        )
        for name, found in gaps.items()
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row, one column a field."""
    lines = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/k3-tiny")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=500, help="of the count of compiled programs")
    args = parser.parse_args()
    import flax
    import jax

    record: dict[str, Any] = {
        "what": "engine",
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),  # of others: above 1 the figures are noisy
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "dtype": "float32",
    }
    with load(args.model, dtype="float32") as lm:
        # The count comes first, since programs are counted for the whole process.
        record["compiles"] = compiles(lm, args.requests)
        print(table([record["compiles"]]), flush=True)
        record["host_at_64_rows"] = host(lm)
        print(table([dict(host=name, **found) for name, found in record["host_at_64_rows"].items()]), flush=True)
        record["throughput"] = throughput(lm, args.rounds)
        print(table(record["throughput"]), flush=True)
        record["steps"] = steps(lm)
        print(table(record["steps"]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{record['date']}-engine.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
