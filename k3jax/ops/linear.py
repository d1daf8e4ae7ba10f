"""Products with stored weights, and the norms of the trunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# True float32 products where operands are float32: on a GPU the default is TF32, 10 bits of mantissa. No effect on bfloat16.
HIGHEST = jax.lax.Precision.HIGHEST


def linear(x: Float[Array, "*t I"], weight: Float[Array, "O I"]) -> Float[Array, "*t O"]:
    """x Wᵀ with the weight as stored, [out, in]; float32 accumulation, one rounding to x's dtype."""
    return project(x, weight).astype(x.dtype)


def project(x: Float[Array, "*t I"], weight: Float[Array, "O I"]) -> Float[Array, "*t O"]:
    """x Wᵀ in float32. On a CPU one row is computed as two: alone, XLA sums it in another order than beside others."""
    if x.ndim == 2 and x.shape[0] == 1 and jax.default_backend() == "cpu":
        return project(jnp.concatenate([x, jnp.zeros_like(x)]), weight)[:1]
    return einsum("...i,oi->...o", x, weight)


def einsum(spec: str, *operands: Array) -> Float[Array, "..."]:
    """jnp.einsum with float32 accumulation and result."""
    return jnp.einsum(spec, *operands, precision=HIGHEST, preferred_element_type=jnp.float32)


def rms_norm(x: Float[Array, "*t C"], weight: Float[Array, "C"], eps: float) -> Float[Array, "*t C"]:
    """w * x / sqrt(mean(x²) + eps): the mean in float32, the gain after the rounding to x's dtype, as the release does."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * y.astype(x.dtype)


def gated_rms_norm(
    o: Float[Array, "*t V"], gate: Float[Array, "*t V"], weight: Float[Array, "V"], eps: float
) -> Float[Array, "*t V"]:
    """RMSNorm over a head's V channels, then its gain, then sigmoid(gate); float32 throughout, one rounding at the end."""
    o32 = o.astype(jnp.float32)
    y = o32 * jax.lax.rsqrt(jnp.mean(o32 * o32, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    return (y * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)
