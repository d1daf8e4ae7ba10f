"""Attention residuals: a softmax over depth, one query vector a site.

    score_r = sum_d (s_r[d] / rms(s_r)) * n[d] q[d],   pi = softmax_r(score),   mix = sum_r pi_r s_r

with n = *_res_norm.weight and q = *_res_proj.weight. The sources are mixed as they are; only their scores see the norm.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from k3jax.pallas import attnres as kernel


def mix(
    sources: Sequence[Float[Array, "T D"]],
    norm: Float[Array, "D"],
    query: Float[Array, "1 D"],
    eps: float,
    there: Bool[Array, "R"] | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T R"]]:
    """The mixture in the sources' dtype, and the depth weights in float32, sources in the order given.

    there: which of them are meant, at least one, all by default; others have weight 0 and may be NaN. Raises ValueError for
    another shape or dtype of it.
    """
    if there is not None and (there.shape, there.dtype) != ((len(sources),), jnp.bool_):
        raise ValueError(f"there={there.dtype}{list(there.shape)}: allowed is bool[{len(sources)}]")
    w = norm.astype(jnp.float32) * query[0].astype(jnp.float32)  # folded: no rounding between gain and query
    wide = jnp.stack(sources).astype(jnp.float32)
    if there is not None:
        wide = jnp.where(there[:, None, None], wide, 0)
    score = jnp.sum(wide * w, -1) * jax.lax.rsqrt(jnp.mean(wide * wide, -1) + eps)
    if there is not None:
        score = jnp.where(there[:, None], score, -jnp.inf)
    weights = jax.nn.softmax(score, axis=0)
    return jnp.sum(weights[..., None] * wide, axis=0).astype(sources[0].dtype), weights.T


@functools.partial(jax.jit, static_argnames=("eps", "weights", "interpret"))
def mix_norm(
    running: Float[Array, "T D"],
    pending: Float[Array, "T D"] | None,
    blocks: tuple[Float[Array, "T D"], ...] | kernel.Bank,
    norm: Float[Array, "D"],
    query: Float[Array, "1 D"],
    gain: Float[Array, "D"],
    eps: float,
    weights: bool,
    interpret: bool,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Float[Array, "T R"] | None]:
    """One GPU kernel for a site: running + pending, the mixture of it and the blocks, normed, and if asked for its weights.

    A jit of its own, so that a program of many layers makes each kernel once.
    """
    return kernel.mix_norm(running, pending, blocks, norm, query, gain, eps, weights=weights, interpret=interpret)
