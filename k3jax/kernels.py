"""Kernels: which implementation each operation uses, chosen once and explicitly."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Literal, get_args, get_type_hints

import jax

from k3jax.config import K3Config
from k3jax.pallas import compiles

# Up to this many experts all of them run on every token: faster than sorting tokens by expert, and simple to differentiate.
_DENSE_EXPERTS = 32
_GPU_KERNELS = ("kda", "attnres")  # the fields that may be "pallas"


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One implementation an operation. Hashable: part of the static context of a step.

    kda: prompts by "chunk" (matrix products within 64 tokens), by "scan" (token by token, the definition), both in XLA; or
    "pallas", GPU kernels for prompts and decoding, with convolution and gated norm inside.
    moe: "dense" (every expert on every token) or "grouped" (tokens sorted by expert; only chosen experts are read), in XLA.
    attnres: "xla", or "pallas": the residual add, the mixture and the norm after it in one GPU kernel.
    precision: of products of bfloat16 inputs in the GPU kernels, "default" or "high" (TF32 operands, slower). With float32
    inputs they are float32's.
    interpret: GPU kernels run in Pallas' interpreter, on any device: slow, for tests.

    A pass without a carry (scoring, training) and one that is probed inside an operation run its XLA form: kernels have no
    gradient and show nothing of what is inside them.
    """

    kda: Literal["chunk", "scan", "pallas"] = "chunk"
    moe: Literal["dense", "grouped"] = "grouped"
    attnres: Literal["xla", "pallas"] = "xla"
    precision: Literal["default", "high"] = "default"
    interpret: bool = False

    def __post_init__(self) -> None:
        for op, choice in get_type_hints(type(self)).items():
            allowed = get_args(choice) or (True, False)
            if getattr(self, op) not in allowed:
                raise ValueError(f"kernels.{op}={getattr(self, op)!r}: allowed are {', '.join(map(repr, allowed))}")

    @classmethod
    def auto(cls, config: K3Config, platform: str | None = None) -> Kernels:
        """The fastest implementation that this package has for the model on devices of this platform, jax's own if None.

        On a GPU, kernels that cannot run are dropped, and one line on the standard error says which and why.
        """
        plain = cls(moe="dense" if config.num_experts <= _DENSE_EXPERTS else "grouped")
        if not _is_gpu(platform):
            return plain
        refused = {op: refuse(op, config, platform) for op in _GPU_KERNELS}
        if dropped := {op: reason for op, reason in refused.items() if reason}:
            _say_once(f"k3jax: no GPU kernels for {'; '.join(f'{op} ({why})' for op, why in dropped.items())}")
        return dataclasses.replace(plain, **{op: "pallas" for op, reason in refused.items() if not reason})

    @classmethod
    def resolve(cls, kernels: Kernels | str, config: K3Config, platform: str | None = None) -> Kernels:
        """What `load(kernels=...)` takes: "auto" or an explicit choice. ValueError for kernels that cannot run."""
        if isinstance(kernels, Kernels):
            for op in _GPU_KERNELS:
                if getattr(kernels, op) == "pallas" and (reason := refuse(op, config, platform, kernels.interpret)):
                    raise ValueError(f"kernels.{op}='pallas': {reason}")
            return kernels
        if kernels == "auto":
            return cls.auto(config, platform)
        raise ValueError(f"kernels={kernels!r}: allowed are 'auto' or a Kernels(...)")

    def explain(self, config: K3Config) -> dict[str, str]:
        """What each operation of a model runs on, and why."""
        few = f"{config.num_experts} experts, {_DENSE_EXPERTS} or fewer"
        many = f"{config.num_experts} experts, more than {_DENSE_EXPERTS}"
        why = "asked for" if self.moe != self.auto(config).moe else few if self.moe == "dense" else many
        moe = {"dense": "every expert on every token", "grouped": "tokens sorted by expert, chosen experts alone"}[
            self.moe
        ]
        only = "the only form so far"
        return {
            **self._explain_kda(config),
            "MLA prefill": f"XLA: keys and values expanded from the latents; {only}",
            "MLA decode": f"XLA: absorbed, on the latents themselves; {only}",
            "attention residuals": self._explain_attnres(config),
            "mixture of experts": f"XLA: {moe} ({why})",
        }

    def _explain_kda(self, config: K3Config) -> dict[str, str]:
        if self.kda == "pallas":
            return {
                "KDA prefill": f"Pallas: chunks of 32 tokens, then the state through them; precision {self.precision}",
                "KDA decode": "Pallas: convolution, recurrence and gated norm, in place",
                "short convolution": "Pallas, histories in place",
            }
        kda = {
            "chunk": "chunks of 64 tokens as matrix products, the faster form for prompts",
            "scan": "token by token, the definition: asked for",
        }[self.kda]
        why = f"no GPU kernels: {refuse('kda', config) or 'not asked for'}"
        return {
            "KDA prefill": f"XLA: {kda}; {why}",
            "KDA decode": f"XLA: one step of the recurrence; {why}",
            "short convolution": f"XLA; {why}",
        }

    def _explain_attnres(self, config: K3Config) -> str:
        if self.attnres == "pallas":
            return "Pallas: residual add, mixture and norm in one"
        return f"XLA; no GPU kernel: {refuse('attnres', config) or 'not asked for'}"


def refuse(op: str, config: K3Config, platform: str | None = None, interpret: bool = False) -> str | None:
    """Why the GPU kernels of an operation cannot run this model, or None."""
    if not interpret:
        if not _is_gpu(platform):
            return f"platform={platform or jax.default_backend()!r}: allowed is a GPU"
        if reason := compiles():
            return reason
    if op == "attnres":
        return None if config.attn_res_block_size else "attn_res_block_size=None: the model has no attention residuals"
    size, bound = config.kda_head_dim, config.gate_lower_bound
    if size < 16 or size & (size - 1):
        return f"kda_head_dim={size}: allowed are powers of two from 16"
    if bound is not None and not -5.4 <= bound < 0:
        return f"gate_lower_bound={bound}: allowed are -5.4 to 0, or none"
    return None


def _is_gpu(platform: str | None) -> bool:
    return (platform or jax.default_backend()) in ("gpu", "cuda", "rocm")


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)
