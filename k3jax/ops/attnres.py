"""Attention residuals: a softmax over depth, one query vector a site.

    score_r = sum_d (s_r[d] / rms(s_r)) * n[d] q[d],   pi = softmax_r(score),   mix = sum_r pi_r s_r

with n = *_res_norm.weight and q = *_res_proj.weight. The sources are mixed as they are; only their scores see the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.ops.linear import einsum


def mix(
    sources: Sequence[Float[Array, "T D"]], norm: Float[Array, "D"], query: Float[Array, "1 D"], eps: float
) -> tuple[Float[Array, "T D"], Float[Array, "T R"]]:
    """The mixture in the sources' dtype, and the depth weights in float32, sources in the order given."""
    w = norm.astype(jnp.float32) * query[0].astype(jnp.float32)  # folded: no rounding between gain and query
    wide = [s.astype(jnp.float32) for s in sources]
    score = [einsum("td,d->t", s * jax.lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + eps), w) for s in wide]
    weights = jax.nn.softmax(jnp.stack(score, -1), axis=-1)
    mixed = sum(weights[:, r, None] * s for r, s in enumerate(wide))
    return mixed.astype(sources[0].dtype), weights
