"""The command line: `k3jax generate | chat | batch | score | trace | convert | doctor | plan | bench`.

Text alone goes to stdout; an error is one line on stderr and exit code 2, an interrupt exit code 130.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

import k3jax
from k3jax.processes import Options
from k3jax.sampling import CHAT, SamplingParams

if TYPE_CHECKING:
    from jax.sharding import Mesh

Dtype = Literal["bfloat16", "float32"]
_Sampling = Annotated[SamplingParams, OmitArgPrefixes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    model: Path
    """A model directory."""
    dtype: Dtype | None = None
    """Of the weights in memory; the default keeps what is stored."""

    def load(self, experts: str = "decoded", mesh: Mesh | None = None, kernels: str = "auto") -> k3jax.LM:
        return k3jax.load(self.model, dtype=self.dtype, kernels=kernels, experts=experts, mesh=mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Divided(_Loaded):
    tp: int | None = None
    """Devices that share one copy of the model; by default 1, and in a job of several processes all of theirs."""
    ep: int | None = None
    """Of these, over how many whole experts are divided; by default all."""

    def load(self, experts: str = "decoded", mesh: Mesh | None = None, kernels: str = "auto") -> k3jax.LM:
        from k3jax.engine import follow

        return super().load(experts, mesh or follow.mesh(self.tp, self.ep, None), kernels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Served(_Divided):
    kernels: Literal["auto", "xla"] = "auto"
    """Of prompts and decoding: GPU kernels where they can run, or XLA alone."""

    def load(self, experts: str = "decoded", mesh: Mesh | None = None, kernels: str | None = None) -> k3jax.LM:
        return super().load(experts, mesh, kernels or self.kernels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(_Served):
    """Continue a prompt."""

    prompt: str
    """The text to continue (--prompt=-x for one that begins with a dash)."""
    sampling: _Sampling = SamplingParams()

    def run(self) -> None:
        with self.load() as lm:
            if self.sampling.n == 1:
                deltas = lm.stream(self.prompt, self.sampling)
                _say(self.prompt)
                for delta in deltas:
                    _say(delta.text)
                    if delta.completion is not None:
                        _refuse_error(delta.completion)
                        _say("\n")
                        _show_logprobs(lm, delta.completion)
            else:
                for number, completion in enumerate(lm.generate(self.prompt, self.sampling), start=1):
                    _note(f"-- sample {number} of {self.sampling.n}")
                    _say(f"{self.prompt}{completion.text}\n")
                    _refuse_error(completion)
                    _show_logprobs(lm, completion)


def _show_logprobs(lm: k3jax.LM, completion: k3jax.Completion) -> None:
    """Where they were asked for: a token a line, on stderr."""
    for ids, found in (
        (completion.prompt_token_ids, completion.prompt_logprobs),
        (completion.token_ids, completion.logprobs),
    ):
        for token, logprob, top in zip(ids, found.tokens, found.top, strict=True) if found else ():
            best = "  ".join(f"{lm.decode([i])!r} {p:.3f}" for i, p in top.items())
            own = "" if logprob is None else f"{logprob:.3f}"
            _note(f"{token:7} {own:>8} {lm.decode([token])!r:16} {best}".rstrip())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(_Served):
    """Talk with a model. Ctrl-C stops an answer; /reset forgets the conversation; /exit or Ctrl-D leaves."""

    system: str | None = None
    """A system message."""
    thinking: bool = True
    """Whether the model thinks before it answers; its thoughts go to stderr."""
    effort: str | None = None
    """How much it thinks: low, high or max."""
    sampling: _Sampling = CHAT

    def run(self) -> None:
        for field, plain in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
            if getattr(self.sampling, field) != plain:
                raise ValueError(f"{field}={getattr(self.sampling, field)}: allowed is {plain} in a chat")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history
        opening: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        with self.load() as lm:
            _note(f"{lm} - /reset forgets, /exit leaves, Ctrl-C stops an answer")
            messages = [*opening]
            for line in _lines():
                if line == "/reset":
                    messages = [*opening]
                    _note("forgotten")
                elif line == "/exit":
                    return
                elif line.startswith("/"):
                    _note(f"{line}: allowed are /reset and /exit")
                elif line:
                    asked = [*messages, {"role": "user", "content": line}]
                    try:
                        messages = [*asked, self._answer(lm, asked)]
                    except ValueError as error:  # a conversation that has become too long, say
                        if not sys.stdin.isatty():
                            raise
                        _note(f"{error}; /reset forgets the conversation")

    def _answer(self, lm: k3jax.LM, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's message, shown as it is made; where it is interrupted, what there is of it."""
        start, tokens, thinking, content = time.perf_counter(), 0, "", ""
        try:
            for piece in lm.stream_chat(messages, thinking=self.thinking, sampling=self.sampling, effort=self.effort):
                if isinstance(piece, k3jax.ChatCompletion):
                    tokens = len(piece.completion.token_ids)
                    _refuse_error(piece.completion)
                    continue
                if piece.thinking:
                    _whisper(piece.thinking)
                if piece.content and not content and thinking:
                    _note("")
                _say(piece.content)
                thinking, content = thinking + piece.thinking, content + piece.content
        except KeyboardInterrupt:
            _note("\ninterrupted")
        if content or not thinking:
            _say("\n")
        else:
            _note("")
        if tokens:
            seconds = time.perf_counter() - start
            _note(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, the prompt included")
        return {"role": "assistant", "content": content, "thinking": thinking}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(_Served):
    """Answer a file of requests, OpenAI Batch lines or {"prompt": ...}; killed at any moment, the same command goes on."""

    input: Annotated[Path, arg(aliases=["-i"])]
    """A JSONL file."""
    output: Annotated[Path, arg(aliases=["-o"])]
    """Where a record for each line is appended as it is finished; OUTPUT.state beside it says of which model."""
    rows: int = 64
    """Requests that run together."""
    tokens: int = 1024
    """Prompt tokens of a step."""
    replicas: int | Literal["auto"] = "auto"
    """Copies of the model, each on `tp` devices of its own; auto: wherever one fits, on a CPU 1."""
    job: Annotated[Options, OmitArgPrefixes] = Options()
    seed: int = 0
    """Lines without a seed get theirs from it."""
    summary: Path | None = None
    """Counts, seconds and figures of the engines, as JSON; OUTPUT.summary.json by default."""

    def run(self) -> int:
        from k3jax.engine import batch_file

        return batch_file.command(self.load, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(_Divided):
    """Print the bits per byte of a text file under a model."""

    file: Path
    """A UTF-8 text file."""
    window: int = 1024
    """Tokens in one pass."""
    stride: int = 512
    """Tokens between two windows: after the first, each judged token has at least window - stride tokens before it."""

    def run(self) -> None:
        if not self.file.is_file():
            raise ValueError(f"file={str(self.file)!r}: no such file")
        try:
            text = self.file.read_bytes().decode("utf-8")  # as it is: line ends count
        except UnicodeDecodeError as error:
            raise ValueError(f"file={str(self.file)!r}: allowed is UTF-8 text ({error})") from None
        with self.load() as lm:
            _say(f"{lm.bits_per_byte(text, window=self.window, stride=self.stride):.4f}\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(_Loaded):
    """Show one request step by step: what goes in, what the caches hold afterwards, what comes out."""

    prompt_ids: str | None = None
    """Token ids with commas between them: 0,1,2,3."""
    prompt: str | None = None
    """A text, in place of ids."""
    steps: int = 3
    """Steps: the prefill and the decode steps after it."""
    ledger: bool = False
    """Show as well what persists, what is transient and what is resident: of this model, and of K3 on 1 and on 8 ranks."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    seed: int | None = None
    """Of the draws at other temperatures."""

    def run(self) -> None:
        from k3jax.carry import ledger
        from k3jax.timeline import render, timeline

        if (self.prompt_ids is None) == (self.prompt is None):
            raise ValueError(f"prompt_ids={self.prompt_ids!r}, prompt={self.prompt!r}: allowed is one of the two")
        with self.load() as lm:
            ids = lm.encode(self.prompt) if self.prompt is not None else _ids(self.prompt_ids or "")
            sampling = SamplingParams(temperature=self.temperature, seed=self.seed)
            found = timeline(lm, ids, sampling, steps=self.steps)
            _say(render(found) + "\n")
            if self.ledger:
                full, tokens = k3jax.K3Config.k3(), len(ids)
                own = ledger(lm.config, tokens=tokens, dtype=str(lm.model.dtype))
                for title, entry in (
                    ("This model", own),
                    ("Kimi K3 on one rank", ledger(full, tokens=tokens, packed=True)),
                    ("Kimi K3, one rank of eight", ledger(full, tp=8, tokens=tokens, packed=True)),
                ):
                    _say(f"\n{title}\n\n{entry.table()}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert(_Loaded):
    """Write a model directory in another layout, dtype or with other experts."""

    out: Path
    """The new directory."""
    format: Literal["hf", "orbax"] = "hf"
    """The released layout (safetensors), or Orbax."""
    experts: Literal["bf16", "mxfp4"] | None = None
    """Of the released layout: routed experts in bfloat16 or in MXFP4; the default keeps what the directory has."""

    def run(self) -> None:
        if self.out.exists():
            raise FileExistsError(f"{self.out}: exists, and is not written over")
        from k3jax.io import hf, orbax

        released = self.model.is_dir() and not orbax.is_orbax(self.model)
        # Not decoded on the way: bit by bit what it was.
        keep = released and self.experts != "bf16" and hf.holds_mxfp4(self.model)
        with self.load("packed" if keep else "decoded") as lm:
            lm.save(self.out, self.format, self.experts)
        size = sum(file.stat().st_size for file in self.out.rglob("*") if file.is_file())
        _note(f"{self.out}: {size / 2**20:,.1f} MiB, format {self.format}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Print versions, devices, what each operation runs on and why, and how an engine's memory is split."""

    model: Path | None = None
    """A model directory; without one, of K3 itself."""
    rows: int = 64
    """Requests that an engine runs together."""
    memory: float | None = None
    """GiB for its slots and pages; by default a share of what is free."""

    def run(self) -> None:
        import jax

        from k3jax.engine.sizes import explained
        from k3jax.io import hf, orbax
        from k3jax.loading import cache_directory

        config = k3jax.K3Config.k3()
        if self.model is not None:
            config = (orbax if orbax.is_orbax(self.model) else hf).read_config(self.model)
        names = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "tiktoken", "jinja2")
        versions = [("python", platform.python_version()), ("k3jax", k3jax.__version__)]
        _rows("versions", versions + [(name, importlib.metadata.version(name)) for name in names])
        _rows("devices", [(str(device), f"{device.device_kind}{_memory(device)}") for device in jax.devices()])
        kernels = k3jax.Kernels.auto(config)
        _rows(f"operations of {self.model or 'Kimi K3'}", list(kernels.explain(config).items()))
        memory = None if self.memory is None else int(self.memory * 2**30)
        _rows("an engine's memory", list(explained(config, memory, self.rows).items()))
        _rows("compiled programs", [("kept in", str(cache_directory()))])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what fits on GPUs of one kind, none of which is needed: bytes by component, requests, bounds of time, advice."""

    model: Path | None = None
    """A model directory, of which config.json is read."""
    preset: Literal["k3", "kimi-linear-48b"] | None = None
    """A released model in its place; without both, K3."""
    gpu: str = "h200"
    """Of which kind."""
    count: int = 8
    """How many."""
    tp: int | None = None
    """GPUs that share one copy; by default all."""
    ep: int | None = None
    """Of these, over how many whole experts are divided; by default all."""
    rows: int = 32
    """Requests that decode together."""
    tokens: int | None = None
    """Of each of them, and of a prompt; by default 8192, or the context."""
    memory: float | None = None
    """GiB of one GPU that may be used; by default 0.92 of what it has."""
    json: bool = False
    """JSON in place of text."""

    def run(self) -> None:
        from k3jax.plan import command

        _say(command(**vars(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Time each kernel on a GPU, at Kimi K3's sizes: beside the least time its bytes and operations take, XLA, and a peer."""

    what: Positional[Literal["kernels"]]
    """What is timed."""
    only: str | None = None
    """Operations with commas between them; by default all."""
    xla: bool = False
    """Time XLA's form of each operation as well."""
    peer: bool = False
    """Time flash-linear-attention as well, where it and PyTorch are installed."""
    out: Path | None = None
    """A directory for the record, DATE-kernels.json."""

    def run(self) -> int:
        from k3jax.bench import command

        return command(self.only, self.xla, self.peer, self.out, lambda text: _say(text + "\n"))


def _memory(device: Any) -> str:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return ""
    return f", {stats['bytes_in_use'] / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB that JAX may use in use"


def _rows(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    _say(f"{title}\n" + "".join(f"  {name:{width}}  {value}\n" for name, value in rows))


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _whisper(text: str) -> None:
    """To stderr, and pale in a terminal."""
    print(f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lines() -> Iterator[str]:
    """What the user types, or the lines of stdin."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            _note("\n/exit leaves")
            continue
        if not line and not sys.stdin.isatty():
            return
        yield line.strip()


def _ids(text: str) -> list[int]:
    try:
        return [int(entry) for entry in text.split(",")]
    except ValueError:
        raise ValueError(f"prompt_ids={text!r}: allowed are integers with commas between them") from None


def _refuse_error(completion: k3jax.Completion) -> None:
    if completion.error:
        raise ValueError(completion.error)


Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Batch, subcommand("batch")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Trace, subcommand("trace")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Bench, subcommand("bench")]
)


def _parse(argv: list[str] | None) -> Any:
    """The command that the arguments name. Raises ValueError with what the parser says of them, in one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Command, args=argv, prog="k3jax", description="Kimi K3 in JAX.")  # type: ignore[arg-type]
    except SystemExit as end:
        if not end.code:
            raise  # help was asked for
        raise ValueError(_plain(said.getvalue())) from None


def _plain(panel: str) -> str:
    """The parser's message without its frame, its title, and what it says at length."""
    framed = panel.startswith("\u256d")  # the title is in the frame then, and else a section of its own
    lines = [line.strip("\u2502 ") for line in panel.splitlines() if not line.startswith(("\u256d", "\u2570"))]
    rules = re.split("^[\u2500-]{3,}$", "\n".join(lines), flags=re.MULTILINE)[0 if framed else 1 :]
    aside = ("For full help", "Available sub", "Argument help")
    sections = [" ".join(rule.split()) for rule in rules if not rule.strip().startswith(aside)]
    text = "; ".join(re.sub(r"^(Perhaps you meant: \S+).*", r"\1", section) for section in sections)
    return re.sub(r"Error parsing __\S+: ", "", text)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        print(k3jax.__version__)
        return 0
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "request ", RuntimeWarning)  # the error says it
            return _parse(argv).run() or 0
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RuntimeError) as error:
        print(f"k3jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("k3jax: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
