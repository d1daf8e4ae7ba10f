"""The short convolution of q, k and v: depthwise, causal, no bias, then SiLU.

    y_t[c] = silu( sum_i w[c, i] x_{t-W+1+i}[c] )      tap W-1 on the current token, zeros before the first one

The history is the last W-1 raw inputs, oldest first. float32 weights, sum and SiLU; one rounding to x's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.batch import PrefillRows


def plain(
    x: Float[Array, "T H C"], weight: Float[Array, "H C W"], history: Float[Array, "W-1 H C"]
) -> tuple[Float[Array, "T H C"], Float[Array, "W-1 H C"]]:
    """One sequence, as the equation stands."""
    width = weight.shape[-1]
    padded = jnp.concatenate([history.astype(x.dtype), x])
    y = sum(weight[..., i] * padded[i : i + x.shape[0]].astype(jnp.float32) for i in range(width))
    return jax.nn.silu(y).astype(x.dtype), padded[padded.shape[0] - width + 1 :]


def step(
    x: Float[Array, "B H C"], weight: Float[Array, "H C W"], history: Float[Array, "B W-1 H C"]
) -> tuple[Float[Array, "B H C"], Float[Array, "B W-1 H C"]]:
    """One token for each of B rows."""
    window = jnp.concatenate([history, x[:, None].astype(history.dtype)], axis=1)
    y = jnp.einsum("bwhc,hcw->bhc", window.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.silu(y).astype(x.dtype), window[:, 1:]


def packed(
    x: Float[Array, "T H C"], weight: Float[Array, "H C W"], history: Float[Array, "B W-1 H C"], rows: PrefillRows
) -> tuple[Float[Array, "T H C"], Float[Array, "B W-1 H C"]]:
    """Rows of any length one after another, each continuing its own history. A row of length 0 keeps its history."""
    inputs = jnp.concatenate([history.reshape(-1, *x.shape[1:]).astype(x.dtype), x])
    window = inputs.at[rows.window].get(mode="clip").astype(jnp.float32)
    y = jnp.sum(window * jnp.moveaxis(weight, -1, 0), axis=1)
    return jax.nn.silu(y).astype(x.dtype), inputs.at[rows.kept].get(mode="clip").astype(history.dtype)
