"""The gated activations of all three kinds of MLP: dense, shared and routed."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Activation:
    """SiTU or SiLU, with SiTU's limits of the gate branch (beta) and of the up branch (linear_beta)."""

    kind: Literal["situ", "silu"]
    beta: float
    linear_beta: float

    def __call__(self, gate: Float[Array, "*t F"], up: Float[Array, "*t F"]) -> Float[Array, "*t F"]:
        """situ: b tanh(a/b) sigmoid(a) * lb tanh(u/lb); silu: a sigmoid(a) * u. float32, one rounding to gate's dtype."""
        a, u = gate.astype(jnp.float32), up.astype(jnp.float32)
        match self.kind:
            case "situ":
                y = (
                    self.beta
                    * jnp.tanh(a / self.beta)
                    * jax.nn.sigmoid(a)
                    * (self.linear_beta * jnp.tanh(u / self.linear_beta))
                )
            case "silu":
                y = jax.nn.silu(a) * u
        return y.astype(gate.dtype)
