"""k3jax: Kimi K3 in JAX. The public page; each name is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from k3jax.batch import Batch
    from k3jax.carry import Carry
    from k3jax.config import ConfigError, K3Config
    from k3jax.io.safetensors import CheckpointError
    from k3jax.io.tokenizer import TokenizerError
    from k3jax.kernels import Kernels
    from k3jax.lm import LM, Completion, load
    from k3jax.probe import Probe
    from k3jax.sampling import SamplingParams

_HOME = {
    "load": "lm", "LM": "lm", "Completion": "lm",
    "SamplingParams": "sampling",
    "K3Config": "config", "ConfigError": "config",
    "CheckpointError": "io.safetensors", "TokenizerError": "io.tokenizer",
    "Carry": "carry", "Batch": "batch", "Kernels": "kernels", "Probe": "probe",
}  # fmt: skip

__all__ = [
    "LM", "Batch", "Carry", "CheckpointError", "Completion", "ConfigError", "K3Config", "Kernels", "Probe", "SamplingParams",
    "TokenizerError", "__version__", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"k3jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
