"""k3jax: Kimi K3 in JAX. The public page; each name is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from k3jax.version import __version__

if TYPE_CHECKING:
    from k3jax.answers import ChatCompletion, Completion, Delta, Logprobs, Score
    from k3jax.batch import Batch
    from k3jax.carry import Carry, Conversation
    from k3jax.config import ConfigError, K3Config
    from k3jax.io.chat import ChatDelta, ChatError, ToolCall
    from k3jax.io.safetensors import CheckpointError
    from k3jax.io.tokenizer import TokenizerError
    from k3jax.kernels import Kernels
    from k3jax.lm import LM
    from k3jax.loading import load
    from k3jax.probe import Probe
    from k3jax.sampling import SamplingParams
    from k3jax.sharding import make_mesh

_HOME = {
    "load": "loading", "make_mesh": "sharding", "LM": "lm",
    "Completion": "answers", "Delta": "answers", "ChatCompletion": "answers", "Score": "answers", "Logprobs": "answers",
    "ChatDelta": "io.chat", "ChatError": "io.chat", "ToolCall": "io.chat", "Conversation": "carry",
    "SamplingParams": "sampling",
    "K3Config": "config", "ConfigError": "config",
    "CheckpointError": "io.safetensors", "TokenizerError": "io.tokenizer",
    "Carry": "carry", "Batch": "batch", "Kernels": "kernels", "Probe": "probe",
}  # fmt: skip

__all__ = [
    "LM", "Batch", "Carry", "ChatCompletion", "ChatDelta", "ChatError", "CheckpointError", "Completion", "ConfigError",
    "Conversation", "Delta", "K3Config", "Kernels", "Logprobs", "Probe", "SamplingParams", "Score", "TokenizerError",
    "ToolCall", "__version__", "load", "make_mesh",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"k3jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
