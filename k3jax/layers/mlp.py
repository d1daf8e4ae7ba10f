"""The gated MLP: the dense layers and the shared experts."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from k3jax.context import Context
from k3jax.layers.param import Linear, Maker
from k3jax.ops.act import Activation


class MLP(nnx.Module):
    """down(act(gate(x), up(x)))."""

    def __init__(self, make: Maker, width: int, hidden: int, act: Activation) -> None:
        self.gate_proj = Linear(make, hidden, width, ("mlp", "embed"))
        self.up_proj = Linear(make, hidden, width, ("mlp", "embed"))
        self.down_proj = Linear(make, width, hidden, ("embed", "mlp"))
        self.act = act

    def __call__(self, x: Float[Array, "T D"], ctx: Context) -> Float[Array, "T D"]:
        return ctx.ranks.sum(self.partial(x))

    def partial(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """What this rank's hidden units add to the result."""
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
