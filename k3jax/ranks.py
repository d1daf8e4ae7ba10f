"""Ranks: the devices that compute one step together, each on its part, and the few things that they tell each other.

A rank's arrays hold its share of the heads, experts, hidden units and tokens of the vocabulary, and its code reads sizes
from them. On one device nothing is shared and every method gives back what it got.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

T = TypeVar("T")

EXPERTS = "ep"  # the mesh axis over which whole experts are divided
RANKS = (EXPERTS, "tp")  # those of the devices that share one copy of the model


@dataclasses.dataclass(frozen=True)
class Ranks:
    """divided: whether there are several, and this code runs inside `shard_map`."""

    divided: bool = False

    @property
    def count(self) -> int:
        return jax.lax.axis_size(RANKS) if self.divided else 1

    def sum(self, partial: T) -> T:
        """The sum of an array, or of a tree of them, over the ranks; each gets it."""
        return jax.lax.psum(partial, RANKS) if self.divided else partial

    def max(self, x: Array) -> Array:
        return jax.lax.pmax(x, RANKS) if self.divided else x

    def gather(self, x: Array) -> Array:
        """[..] of every rank, in their order, along a new first axis."""
        return jax.lax.all_gather(x, RANKS) if self.divided else x[None]

    def first(self, size: int) -> Int[Array, ""]:
        """The index, among all ranks' entries, of this rank's first one: each has `size` of them, in the ranks' order."""
        return jax.lax.axis_index(RANKS) * size if self.divided else jnp.int32(0)

    def first_expert(self, count: int) -> Int[Array, ""]:
        """The same of experts."""
        return jax.lax.axis_index(EXPERTS) * count if self.divided else jnp.int32(0)

    def before(self, x: Array) -> Array:
        """The sum over the ranks that come before this one."""
        if not self.divided:
            return jnp.zeros_like(x)
        every = self.gather(x)
        earlier = jnp.arange(every.shape[0]) < jax.lax.axis_index(RANKS)
        return jnp.where(earlier.reshape(-1, *(1,) * x.ndim), every, 0).sum(0)
