"""Kernels: which implementation each operation uses, chosen once and explicitly."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args, get_type_hints

from k3jax.config import K3Config

# Up to this many experts all of them run on every token: faster than sorting tokens by expert, and simple to differentiate.
_DENSE_EXPERTS = 32


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One implementation an operation, all in XLA so far. Hashable: part of the static context of a step.

    kda: prefill by "chunk" (matrix products within 64 tokens) or "scan" (token by token, the definition).
    moe: "dense" (every expert on every token) or "grouped" (tokens sorted by expert; only chosen experts are read).
    """

    kda: Literal["chunk", "scan"] = "chunk"
    moe: Literal["dense", "grouped"] = "grouped"

    def __post_init__(self) -> None:
        for op, choice in get_type_hints(type(self)).items():
            allowed = get_args(choice)
            if getattr(self, op) not in allowed:
                raise ValueError(f"kernels.{op}={getattr(self, op)!r}: allowed are {', '.join(map(repr, allowed))}")

    @classmethod
    def auto(cls, config: K3Config) -> Kernels:
        """The fastest implementation that this package has for the model."""
        return cls(kda="chunk", moe="dense" if config.num_experts <= _DENSE_EXPERTS else "grouped")

    @classmethod
    def resolve(cls, kernels: Kernels | str, config: K3Config) -> Kernels:
        """What `load(kernels=...)` takes: "auto" or an explicit choice."""
        if isinstance(kernels, Kernels):
            return kernels
        if kernels == "auto":
            return cls.auto(config)
        raise ValueError(f"kernels={kernels!r}: allowed are 'auto' or a Kernels(...)")

    def explain(self, config: K3Config) -> dict[str, str]:
        """What each operation of a model runs on, and why."""
        kda = {
            "chunk": "chunks of 64 tokens as matrix products, the faster form for prompts",
            "scan": "token by token, the definition: asked for",
        }[self.kda]
        few = f"{config.num_experts} experts, {_DENSE_EXPERTS} or fewer"
        many = f"{config.num_experts} experts, more than {_DENSE_EXPERTS}"
        why = "asked for" if self.moe != self.auto(config).moe else few if self.moe == "dense" else many
        moe = {"dense": "every expert on every token", "grouped": "tokens sorted by expert, chosen experts alone"}[
            self.moe
        ]
        only = "the only form so far"
        return {
            "KDA prefill": f"XLA: {kda}",
            "KDA decode": f"XLA: one step of the recurrence; {only}",
            "short convolution": f"XLA; {only}",
            "MLA prefill": f"XLA: keys and values expanded from the latents; {only}",
            "MLA decode": f"XLA: absorbed, on the latents themselves; {only}",
            "attention residuals": f"XLA; {only}",
            "mixture of experts": f"XLA: {moe} ({why})",
        }
