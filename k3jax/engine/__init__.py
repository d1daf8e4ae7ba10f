"""Many requests at once: the engine and what it is made of."""

from k3jax.engine.batching import Buckets
from k3jax.engine.engine import Engine
from k3jax.engine.live import Output
from k3jax.engine.stats import Stats

__all__ = ["Buckets", "Engine", "Output", "Stats"]
