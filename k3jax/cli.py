"""The command line: `k3jax generate | score`. Text alone goes to stdout; an error is one line on stderr and exit code 2."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a prompt."""

    model: Path
    """A model directory."""
    prompt: str
    """The text to continue (--prompt=-x for one that begins with a dash)."""
    max_tokens: int = 64
    """New tokens at most."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    seed: int | None = None
    """Without one, runs differ."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of the weights in memory; the default keeps what is stored."""

    def run(self) -> None:
        import k3jax

        sampling = k3jax.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )
        with k3jax.load(self.model, dtype=self.dtype) as lm:
            [completion] = lm.generate(self.prompt, sampling)
        print(self.prompt + (completion.text or ""))
        if completion.error:
            raise ValueError(completion.error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Print the bits per byte of a text file under a model."""

    model: Path
    """A model directory."""
    file: Path
    """A UTF-8 text file."""
    window: int = 1024
    """Tokens in one pass."""
    stride: int = 512
    """Tokens between two windows: after the first, each judged token has at least window - stride tokens before it."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of the weights in memory; the default keeps what is stored."""

    def run(self) -> None:
        import k3jax

        try:
            text = self.file.read_bytes().decode("utf-8")  # as it is: line ends count
        except UnicodeDecodeError as error:
            raise ValueError(f"file={str(self.file)!r}: allowed is UTF-8 text ({error})") from None
        with k3jax.load(self.model, dtype=self.dtype) as lm:
            print(f"{lm.bits_per_byte(text, window=self.window, stride=self.stride):.4f}")


Command = Annotated[Generate, tyro.conf.subcommand("generate")] | Annotated[Score, tyro.conf.subcommand("score")]


def _parse(argv: list[str] | None) -> Generate | Score:
    """The command that the arguments name. Raises ValueError with what the parser says of them, in one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Command, args=argv, prog="k3jax", description="Kimi K3 in JAX.")  # type: ignore[arg-type]
    except SystemExit as end:
        if not end.code:
            raise  # help was asked for
        words = re.sub(r"[\u2500-\u257f]", " ", said.getvalue()).split()  # the frame around the message
        raise ValueError(" ".join(words)) from None


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        _parse(argv).run()
    except (ValueError, OSError) as error:
        print(f"k3jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("k3jax: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
