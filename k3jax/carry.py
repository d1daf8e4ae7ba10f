"""The functional carry: all that outlives a step, and nothing else.

A KDA layer keeps, by slot, the last W-1 inputs of its short convolution and one matrix a head. An MLA layer keeps, by
page, one latent a token. Q/K/V, depth sources, router logits and activations belong to one forward pass and are not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config

if TYPE_CHECKING:
    from k3jax.ledger import Ledger

PAGE = 64  # tokens a latent page holds


class KDAState(NamedTuple):
    """One KDA layer's memory. Channels of a head lie together (q, then k, then v), so that heads shard as one axis."""

    conv: Float[Array, "slots W-1 H 2K+V"]  # raw projections before the convolution, oldest first, model dtype
    S: Float[Array, "slots H V K"]  # float32; K innermost: products with k and q read along it


# How they are divided over ranks: axes by name, as a parameter's.
KDA_AXES: Any = KDAState(jax.P(None, None, "heads"), jax.P(None, "heads"))  # type: ignore[arg-type]


class Carry(NamedTuple):
    """Donated to every step and returned by it. Layers in model order."""

    kda: tuple[KDAState, ...]
    mla: tuple[Float[Array, "pages page latent"], ...]  # [normed latent | shared key], model dtype
    lengths: Int[Array, "slots"]  # tokens that the slot's state stands for


class Conversation(NamedTuple):
    """One request between two calls: all that continuing it needs."""

    token_ids: tuple[int, ...]  # everything said so far, prompts and answers
    carry: Carry  # one slot and its pages in order, standing for the first `carry.lengths[0]` tokens

    def __repr__(self) -> str:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.carry))
        return f"<Conversation: {len(self.token_ids)} tokens, {size / 2**20:.1f} MiB>"


def axes(carry: Carry) -> Carry:
    """How a carry is divided over ranks. Every head reads the latents, so they are whole on each."""
    return Carry((KDA_AXES,) * len(carry.kda), (jax.P(),) * len(carry.mla), jax.P())  # type: ignore[arg-type]


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


def take(carry: Carry, slot: int | Int[Array, ""], pages: Int[Array, "P"]) -> Carry:
    """A carry of one slot and these pages, copied out of a pool."""
    return Carry(
        kda=tuple(KDAState(*(a[slot][None] for a in state)) for state in carry.kda),
        mla=tuple(latents[pages] for latents in carry.mla),
        lengths=carry.lengths[slot][None],
    )


def put(carry: Carry, slot: int | Int[Array, ""], pages: Int[Array, "P"], one: Carry) -> Carry:
    """The pool with a carry of one slot in this slot and its pages in these."""
    return Carry(
        kda=tuple(
            KDAState(*(a.at[slot].set(b[0]) for a, b in zip(*pair, strict=True)))
            for pair in zip(carry.kda, one.kda, strict=True)
        ),
        mla=tuple(a.at[pages].set(b) for a, b in zip(carry.mla, one.mla, strict=True)),
        lengths=carry.lengths.at[slot].set(one.lengths[0]),
    )


def repaged(one: Carry, page: int) -> Carry:
    """The same carry with its latents in pages of `page` tokens, the last one filled up with zeros."""

    def cut(latents: Array) -> Array:
        flat = latents.reshape(-1, latents.shape[-1])
        flat = jnp.pad(flat, ((0, -flat.shape[0] % page), (0, 0)))
        return flat.reshape(-1, page, flat.shape[-1])

    return one._replace(mla=tuple(cut(latents) for latents in one.mla))


def ledger(config: K3Config, *, tp: int = 1, tokens: int, dtype: str = "bfloat16", packed: bool = False) -> Ledger:
    """What one request of `tokens` tokens keeps, passes through and finds, on one of `tp` ranks: k3jax.ledger."""
    from k3jax import ledger  # it looks at the whole model, so it comes last

    return ledger.ledger(config, tp=tp, tokens=tokens, dtype=dtype, packed=packed)


def check(one: Carry, config: K3Config, dtype: str) -> None:
    """ValueError unless this is a carry of one slot of a model of this architecture, with a trunk of this dtype."""
    pages = one.mla[0].shape[0] if one.mla else 0
    wanted = jax.eval_shape(lambda: empty(config, slots=1, pages=pages, dtype=dtype))
    if jax.tree.structure(one) != jax.tree.structure(wanted):
        counts = f"{len(one.kda)} KDA and {len(one.mla)} MLA layers"
        raise ValueError(f"state of {counts}: allowed are {len(wanted.kda)} and {len(wanted.mla)}, this model's")
    for (path, found), w in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(wanted), strict=True):
        if (found.shape, found.dtype) != (w.shape, w.dtype):
            name, has = jax.tree_util.keystr(path), f"{found.dtype}{list(found.shape)}"
            raise ValueError(f"state{name} is {has}: allowed is {w.dtype}{list(w.shape)}, this model's")


def state_HKV(S_HVK: Float[Array, "*b H V K"]) -> Float[Array, "*b H K V"]:
    """The stored state in the axis order of the paper, the reference and the traces. Its own inverse."""
    return jnp.swapaxes(S_HVK, -1, -2)
