"""The functional carry: all that outlives a step, and nothing else.

A KDA layer keeps, by slot, the last W-1 inputs of its short convolution and one matrix a head. An MLA layer keeps, by
page, one latent a token. Q/K/V, depth sources, router logits and activations belong to one forward pass and are not here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config

PAGE = 64  # tokens a latent page holds


class KDAState(NamedTuple):
    """One KDA layer's memory. Channels of a head lie together (q, then k, then v), so that heads shard as one axis."""

    conv: Float[Array, "slots W-1 H 2K+V"]  # raw projections before the convolution, oldest first, model dtype
    S: Float[Array, "slots H V K"]  # float32; K innermost: products with k and q read along it


class Carry(NamedTuple):
    """Donated to every step and returned by it. Layers in model order."""

    kda: tuple[KDAState, ...]
    mla: tuple[Float[Array, "pages page latent"], ...]  # [normed latent | shared key], model dtype
    lengths: Int[Array, "slots"]  # tokens that the slot's state stands for


def empty(config: K3Config, *, slots: int, pages: int, page: int = PAGE, dtype: str = "bfloat16") -> Carry:
    """A carry of zeros; `dtype` is the trunk's. Its contents are never read before they are written."""
    c = config
    state = KDAState(
        conv=jnp.zeros((slots, c.short_conv_kernel_size - 1, c.kda_num_heads, 3 * c.kda_head_dim), dtype),
        S=jnp.zeros((slots, c.kda_num_heads, c.kda_head_dim, c.kda_head_dim), jnp.float32),
    )
    latents = jnp.zeros((pages, page, c.latent_size), dtype)
    return Carry(
        kda=tuple(KDAState(*map(jnp.copy, state)) for _ in c.kda_layers),
        mla=tuple(jnp.copy(latents) for _ in c.mla_layers),
        lengths=jnp.zeros(slots, jnp.int32),
    )


def state_HKV(S_HVK: Float[Array, "*b H V K"]) -> Float[Array, "*b H K V"]:
    """The stored state in the axis order of the paper, the reference and the traces. Its own inverse."""
    return jnp.swapaxes(S_HVK, -1, -2)
