"""A file of requests through a model, safely: what was killed at any moment goes on where it was.

    lines of the input -> requests in flight, at most AHEAD * rows a replica -> records, one appended a finished line

A record is appended by one write to a file that only appends, so that all but a torn last line of it is whole; its id tells
which line of which content it answers. To go on is to cut off the torn line and to leave out the lines that have a record. What
the records cannot tell, of which weights and seed they are, stands in OUTPUT.state. Records are in the order of their ends.

Each replica is a thread with an engine of its own. They take from one input and append to one output, both behind a lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from k3jax import inputs, processes
from k3jax.engine import follow
from k3jax.engine.openai import Call, Line, failure, identity
from k3jax.engine.replicas import Replica, replicate
from k3jax.lm import LM
from k3jax.version import __version__

SYNC = 10.0  # seconds; a power cut loses at most the records of so long, a killed process none
LOOK = 0.2  # seconds between two looks at the replicas


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is."""

    lines: int  # of the input that are not blank
    succeeded: int  # records in the output, those of earlier runs included
    failed: int  # error records, likewise
    earlier: int  # of those that succeeded, in earlier runs
    prompt_tokens: int  # of the records that succeeded
    completion_tokens: int
    generated: int  # tokens of this run, of unfinished lines too
    seconds: float  # of this run, without loading

    @property
    def done(self) -> int:
        return self.succeeded + self.failed

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At this run's pace; None before its first answer. Lines that cannot be answered take no time."""
        made = self.succeeded - self.earlier
        return (self.lines - self.done) * self.seconds / made if made else None

    def __str__(self) -> str:
        left = self.seconds_left
        eta = "?" if left is None else f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"
        errors = f"{self.failed} error{'' if self.failed == 1 else 's'}"
        return f"{self.done} of {self.lines} lines, {errors}, {self.tokens_per_s:,.1f} tokens/s, ETA {eta}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended. engines: Engine.stats() of each replica that had something to do."""

    progress: Progress
    engines: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether every line of the input was answered."""
        return self.progress.succeeded == self.progress.lines

    def to_json(self) -> dict[str, Any]:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
        return {
            **dataclasses.asdict(self.progress),
            "tokens_per_s": round(self.progress.tokens_per_s, 3),
            "engines": self.engines,
            "versions": {"python": platform.python_version(), "k3jax": __version__, **versions},
        }


def check(input: Path, output: Path, summary: Path | None) -> Path:
    """That the files can be what they are to be; returns where the summary goes. Raises ValueError."""
    summary = _beside(output, ".summary.json") if summary is None else summary
    if not input.is_file():
        raise ValueError(f"input={str(input)!r}: allowed is a file on disk, which can be read twice")
    for field, path in (("output", output), ("summary", summary)):
        if os.path.lexists(path) and not path.is_file():
            raise ValueError(f"{field}={str(path)!r}: allowed is a file on disk")
        if not path.parent.is_dir():
            raise ValueError(f"{field}={str(path)!r}: no such directory; allowed is a file in one that exists")
    if len({path.resolve() for path in (input, output, summary, _beside(output, ".state"))}) < 4:
        raise ValueError(f"output={str(output)!r}: allowed are input, output and summary that are different files")
    return summary


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def run(
    lms: LM | Sequence[LM],
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    rows: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
    summary: str | os.PathLike[str] | None = None,
) -> Summary:
    """Answer the lines of `input` that have no record in `output`, appending one for each.

    lms: one model, or copies of it on several devices (replicas.replicate). rows, tokens: of each Engine. seed: lines without one
    of their own get theirs from it. report: called some times a second. summary: where the summary goes, also after an
    interrupt; OUTPUT.summary.json by default.
    A line that cannot be answered gets an error record. Raises ValueError where the output belongs to another input, model or
    seed, or another process is writing it; what a replica raises ends the run, as KeyboardInterrupt does: the records of what
    is finished are there, and the same call goes on. About 200 bytes of memory a line are held.
    """
    lms = [lms] if isinstance(lms, LM) else list(lms)
    source, target = inputs.path("input", input), inputs.path("output", output)
    if not lms or lms[0].tokenizer is None:
        raise ValueError("model without tokenizer files (tiktoken.model), or none: allowed are models with a tokenizer")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed={seed!r}: allowed is an integer of 0 or more")
    told = check(source, target, None if summary is None else inputs.path("summary", summary))
    state = {"weights": follow.fingerprint(lms[0]), "dtype": str(lms[0].model.dtype), "seed": seed}
    name = str(lms[0].directory.name if lms[0].directory else "k3jax")
    call = functools.partial(Call.of, context=lms[0].config.max_position_embeddings, model=name, seed=seed)
    with _Records(target, state) as records:
        records.resume(source)
        lines = _Lines(source, records, call)
        replicas = [Replica(lm, lines.take, records.append, rows=rows, tokens=tokens) for lm in lms]
        began = time.monotonic()

        def progress() -> Progress:
            made, seconds = sum(replica.generated for replica in replicas), time.monotonic() - began
            return dataclasses.replace(records.progress, generated=made, seconds=seconds)

        try:
            for replica in replicas:
                replica.start()
            while (left := [r for r in replicas if not r.ended.is_set()]) and not any(r.error for r in replicas):
                report(progress())
                left[0].ended.wait(LOOK)
        finally:
            for replica in replicas:
                replica.stop()
            for replica in replicas:
                replica.wait()
            report(progress())
            found = Summary(progress(), [replica.stats for replica in replicas if replica.stats])
            told.write_text(json.dumps(found.to_json(), indent=1) + "\n", "utf-8")
    for error in (replica.error for replica in replicas if replica.error):
        raise error
    return found


# -- the two files -----------------------------------------------------------------------------------------------


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and bytes of each line that is not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


class _Lines:
    """The lines that have no record yet, as calls. Threads may share it."""

    def __init__(self, path: Path, records: _Records, call: Callable[[Line], Call]) -> None:
        self._raw, self._records, self._call = _raw_lines(path), records, call
        self._lock, self._seen = threading.Lock(), set[str]()

    def take(self) -> Call | None:
        """The next call, None at the end; lines that are none get their record here."""
        with self._lock:
            for number, raw in self._raw:
                line = Line.read(number, raw)
                twice = line.custom_id in self._seen
                if line.custom_id is not None:
                    self._seen.add(line.custom_id)
                if line.id in self._records.done:
                    continue
                try:
                    if twice:
                        raise ValueError(f"custom_id={line.custom_id!r}: allowed is one that no line before has")
                    return self._call(line)
                except ValueError as error:
                    self._records.append(failure(line, "invalid_request", str(error)))
        return None


class _Records:
    """The output. Threads may share it; a lock on the file keeps other processes out."""

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self.path, self._state, self._lock = path, state, threading.Lock()
        self.done: set[str] = set()  # ids of records that earlier runs left
        self.progress = Progress(0, 0, 0, 0, 0, 0, 0, 0.0)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._file).st_size
        self._synced = time.monotonic()

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1  # a second interrupt may leave a thread that has a last record: not into another file

    def resume(self, source: Path) -> None:
        """Find what is done. Nothing is changed before it is sure that the records are of this input, model and seed."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"output={str(self.path)!r}: another process is writing it") from None
        self._size = os.fstat(self._file).st_size  # another process may have ended since it was opened
        beside = _beside(self.path, ".state")
        whole = 0
        if self._size:
            self._compare(beside)
            whole = self._scan()
        lines = answered = 0
        for number, raw in _raw_lines(source):
            lines += 1
            answered += bool(self.done) and identity(number, raw) in self.done
        if answered < len(self.done):
            raise ValueError(
                f"output={str(self.path)!r}: {len(self.done) - answered} of its {len(self.done)} records answer no line of "
                f"{source}: allowed is a new file, or the output of this input"
            )
        if not self._size:
            with beside.open("w", encoding="utf-8") as file:
                file.write(json.dumps(self._state) + "\n")
                file.flush()
                os.fsync(file.fileno())  # no record is there without it
        os.ftruncate(self._file, whole)
        self._size = whole
        self.progress = dataclasses.replace(self.progress, lines=lines, earlier=self.progress.succeeded)

    def _compare(self, beside: Path) -> None:
        try:
            state = dict(json.loads(beside.read_text("utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            raise ValueError(
                f"output={str(self.path)!r}: exists, and no {beside.name} says of which model: allowed is a new file"
            ) from None
        for key, value in self._state.items():
            if state.get(key) != value:
                raise ValueError(
                    f"output={str(self.path)!r}: its records are of {key} {state.get(key)}, not {value}: allowed is a new file"
                )

    def _scan(self) -> int:
        """Take in the records that are there; returns where the last whole one ends."""
        whole = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                try:
                    record = json.loads(raw)
                    name = str(record["id"])
                    self._count(record)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    raise ValueError(f"output={str(self.path)!r}: line {number} is no record of a batch") from None
                if name in self.done:
                    raise ValueError(f"output={str(self.path)!r}: line {number} is there twice: {name}")
                self.done.add(name)
                whole += len(raw)
        return whole

    def append(self, record: dict[str, Any]) -> None:
        """One whole line. Where the disk is full, what there is of it is taken back."""
        # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                if time.monotonic() - self._synced > SYNC:
                    os.fsync(self._file)
                    self._synced = time.monotonic()
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
            self._size += len(data)
            self._count(record)

    def _count(self, record: dict[str, Any]) -> None:
        was = self.progress
        if record["error"] is not None:
            self.progress = dataclasses.replace(was, failed=was.failed + 1)
            return
        usage = record["usage"] if "usage" in record else record["response"]["body"]["usage"]
        self.progress = dataclasses.replace(
            was,
            succeeded=was.succeeded + 1,
            prompt_tokens=was.prompt_tokens + usage["prompt_tokens"],
            completion_tokens=was.completion_tokens + usage["completion_tokens"],
        )


# -- the command -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shown(every: float = 10.0) -> Iterator[Callable[[Progress], None]]:
    """What shows progress on stderr: a bar in a terminal, elsewhere a line each `every` seconds."""
    if not sys.stderr.isatty():
        said = time.monotonic()

        def line(progress: Progress) -> None:
            nonlocal said
            if time.monotonic() - said >= every:
                said = time.monotonic()
                print(progress, file=sys.stderr, flush=True)

        yield line
        return
    from rich import progress as rich
    from rich.console import Console

    columns = rich.BarColumn(), rich.TextColumn("{task.description}")
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")
        yield lambda p: bar.update(task, description=str(p), completed=p.done, total=max(p.lines, 1))


def command(
    load: Callable[..., LM],
    model: Path,
    dtype: str | None,
    input: Path,
    output: Path,
    *,
    rows: int,
    tokens: int,
    replicas: int | str,
    seed: int,
    summary: Path | None,
    tp: int | None,
    ep: int | None,
    kernels: str,
    job: processes.Options,
) -> int:
    """`k3jax batch`: the exit code, 0 where every line was answered and 1 where some have error records.

    In a job of several processes the first one does all this, and the others what it tells them; the exit code is its own in all.
    """
    if not job.process:
        check(input, output, summary)  # before a model is loaded
    with contextlib.ExitStack() as stack:
        resume = shlex.join(["k3jax", *sys.argv[1:]])
        group = stack.enter_context(processes.start(**vars(job), resume=resume))
        mesh = follow.mesh(tp, ep, group)
        if group and mesh:
            follow.agree(group, model, dtype, kernels, mesh)
        lm = stack.enter_context(load(mesh=mesh))
        if group and not group.leads:
            return follow.follow(lm, group)
        lms = replicate(lm, replicas)
        for copy in lms[1:]:
            stack.enter_context(copy)
        report = stack.enter_context(shown())
        try:
            found = run(lms, input, output, rows=rows, tokens=tokens, seed=seed, report=report, summary=summary)
        except KeyboardInterrupt:
            print(f"{output}: what is finished is there; the same command goes on from it", file=sys.stderr)
            raise
        code = 0 if found.ok else 1
        if group:
            group.code = code
    print(f"{output}: {found.progress}", file=sys.stderr)
    return code
