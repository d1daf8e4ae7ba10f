"""The router and the routed experts.

    s = sigmoid(W_g x)      chosen = top A of s + bias      w = scale * s / sum(s)      y = sum_e w_e W2_e act(W1_e z, W3_e z)

The bias chooses and nothing else. Experts are stacked, w1 and w3 [E, F, L], w2 [E, L, F]; or packed as MXFP4.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from k3jax.ops import mxfp4
from k3jax.ops.act import Activation
from k3jax.ops.linear import einsum, project

Impl = Literal["dense", "grouped"]


class Routing(NamedTuple):
    ids: Int[Array, "T A"]
    weights: Float[Array, "T A"]  # float32

    def of(self, first: Int[Array, ""]) -> Routing:
        """The same with ids counted from expert `first`, where this rank's experts begin; those of other ranks lie outside."""
        return self._replace(ids=self.ids - first)


@dataclasses.dataclass(frozen=True)
class Router:
    """The choice's fixed numbers: experts a token, group limits, renormalisation and scale."""

    top: int
    groups: int
    top_groups: int
    renormalise: bool
    scale: float

    def __call__(
        self,
        x: Float[Array, "T D"],
        gate: Float[Array, "E D"],
        bias: Float[Array, "E"],
        ids: Int[Array, "T A"] | None = None,
    ) -> Routing:
        """Experts and weights of each token; `ids` forces the experts. Equal scores: the lowest index wins."""
        # Products in float32: scores rounded to bfloat16 change the chosen set for 5% of the tokens.
        scores = jax.nn.sigmoid(project(x.astype(jnp.float32), gate.astype(jnp.float32)))
        if ids is None:
            ids = self._choose(scores + bias.astype(jnp.float32))
        weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
        if self.renormalise and self.top > 1:  # a single weight stays the plain sigmoid
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return Routing(ids, weights * self.scale)

    def _choose(self, biased: Float[Array, "T E"]) -> Int[Array, "T A"]:
        if self.top_groups < self.groups:
            grouped = biased.reshape(biased.shape[0], self.groups, -1)
            best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            kept = jax.lax.top_k(best_two, self.top_groups)[1]
            stays = jnp.zeros(best_two.shape, bool).at[jnp.arange(biased.shape[0])[:, None], kept].set(True)
            biased = jnp.where(stays[..., None], grouped, -jnp.inf).reshape(biased.shape)
        return jax.lax.top_k(biased, self.top)[1]


class Packed(NamedTuple):
    """Experts' matrices as released: two E2M1 codes a byte, one power of two for 32 inputs."""

    codes: UInt8[Array, "E O I/2"]
    scales: UInt8[Array, "E O I/32"]

    def __getitem__(self, e: Array) -> Packed:
        return Packed(self.codes[e], self.scales[e])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


Matrices = Float[Array, "*e _ _"] | Packed  # [.., out, in]


def _decoded(w: Matrices, dtype: DTypeLike) -> Float[Array, "*e O I"]:
    return mxfp4.decode(w.codes, w.scales, dtype) if isinstance(w, Packed) else w


def _expert(z: Float[Array, "M L"], w1: Matrices, w3: Matrices, w2: Matrices, act: Activation) -> Float[Array, "M L"]:
    """One expert on M tokens; gate, up and product each rounded to z's dtype."""
    w1, w3, w2 = (_decoded(w, z.dtype) for w in (w1, w3, w2))
    gate, up = (einsum("ml,fl->mf", z, w).astype(z.dtype) for w in (w1, w3))
    return einsum("mf,lf->ml", act(gate, up), w2).astype(z.dtype)


def experts(
    z: Float[Array, "T L"], routing: Routing, w1: Matrices, w3: Matrices, w2: Matrices, act: Activation, impl: Impl
) -> Float[Array, "T L"]:
    """The weighted sum over each token's experts: float32 products and sum, weights after w2, one rounding to z's dtype.

    Ids that are no index of the matrices add nothing: those experts are another rank's.
    """
    match impl:
        case "dense":
            return _dense(z, routing, w1, w3, w2, act)
        case "grouped":
            return _grouped(z, routing, w1, w3, w2, act)
        case _:
            raise ValueError(f"kernels.moe={impl!r}: allowed are 'dense' and 'grouped'")


def _dense(z: Array, routing: Routing, w1: Matrices, w3: Matrices, w2: Matrices, act: Activation) -> Array:
    """Every expert on every token: the plain form, and the one for few experts or for training."""
    chosen = routing.ids[..., None] == jnp.arange(w1.shape[0])
    weights = jnp.sum(jnp.where(chosen, routing.weights[..., None], 0), axis=1)
    w1, w3, w2 = (_decoded(w, z.dtype) for w in (w1, w3, w2))
    # Experts outermost from the start, so that nothing is transposed between the two products.
    every = jnp.broadcast_to(z, (w1.shape[0], *z.shape))
    gate, up = (einsum("etl,efl->etf", every, w).astype(z.dtype) for w in (w1, w3))
    y = einsum("etf,elf->etl", act(gate, up), w2).astype(z.dtype)
    # Selected, not multiplied away: an expert that a token did not choose must not reach it, not even as 0 * NaN.
    weights = weights.T[..., None]
    return jnp.sum(jnp.where(weights != 0, weights * y, 0), axis=0).astype(z.dtype)


def _grouped(z: Array, routing: Routing, w1: Matrices, w3: Matrices, w2: Matrices, act: Activation) -> Array:
    """Assignments sorted by expert, in tiles of one expert each: only chosen experts are read, one at a time."""
    tokens, top = routing.ids.shape
    num_experts, assignments = w1.shape[0], tokens * top
    size = max(1, min(128, 1 << (assignments // num_experts).bit_length()))
    count = min(assignments, assignments // size + num_experts)  # tiles enough for any routing

    here = (routing.ids >= 0) & (routing.ids < num_experts)
    ids = jnp.where(here, routing.ids, num_experts).reshape(-1)  # the others come last, and in no tile
    order = jnp.argsort(ids, stable=True)
    per_expert = jnp.bincount(ids, length=num_experts)
    tile_ends = jnp.cumsum(-(-per_expert // size))
    expert = jnp.searchsorted(tile_ends, jnp.arange(count), side="right", method="compare_all")
    rank = jnp.arange(count) - jnp.where(expert > 0, tile_ends.at[expert - 1].get(mode="clip"), 0)
    start = (jnp.cumsum(per_expert) - per_expert).at[expert].get(mode="clip")
    local = rank[:, None] * size + jnp.arange(size)
    real = local < per_expert.at[expert].get(mode="fill", fill_value=0)[:, None]
    chosen = jnp.where(real, order.at[start[:, None] + local].get(mode="clip"), assignments)

    def tile(args: tuple[Array, Array]) -> Array:
        e, rows = args
        return _expert(z.at[rows // top].get(mode="clip"), w1[e], w3[e], w2[e], act)

    y = jax.lax.map(tile, (jnp.minimum(expert, num_experts - 1), chosen))
    by_assignment = jnp.zeros((assignments, z.shape[1]), z.dtype).at[chosen].set(y, mode="drop")
    by_token = by_assignment.reshape(tokens, top, -1).astype(jnp.float32)
    return jnp.sum(jnp.where(here, routing.weights, 0)[..., None] * by_token, axis=1).astype(z.dtype)
