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
from k3jax.ops.pool import filled

Impl = Literal["dense", "grouped"]


class Routing(NamedTuple):
    ids: Int[Array, "T A"]
    weights: Float[Array, "T A"]  # float32


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
        # In float32: scores rounded to bfloat16 change the chosen set for 5% of the tokens. Products of two bfloat16 are exact
        # there, so the matrix is read as it is: a float32 copy of it would be made before a decode loop, one of every layer.
        scores = jax.nn.sigmoid(project(x, gate))
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
    z: Float[Array, "T L"], routing: Routing, w1: Matrices, w3: Matrices, w2: Matrices, act: Activation, impl: Impl,
    first: Int[Array, ""] | None = None,
) -> Float[Array, "T L"]:  # fmt: skip
    """The weighted sum over each token's experts: float32 products and sum, weights after w2, one rounding to z's dtype.

    first: the matrices are those of experts `first` and following; others are another rank's and add nothing here. None: of all.
    """
    if first is not None:
        routing = routing._replace(ids=routing.ids - first)  # those of others lie outside
    match impl:
        case "dense":
            return _dense(z, routing, w1, w3, w2, act)
        case "grouped":
            return _grouped(z, routing, w1, w3, w2, act, all_here=first is None)
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


def _grouped(
    z: Array, routing: Routing, w1: Matrices, w3: Matrices, w2: Matrices, act: Activation, all_here: bool
) -> Array:
    """Assignments by expert, in tiles of one expert each: only chosen experts are read, one at a time.

    A token's ids are distinct. Places are counted rather than sorted for, since XLA may compile each sort anew.
    """
    (tokens, top), width = routing.ids.shape, z.shape[1]
    num_experts, assignments = w1.shape[0], tokens * top
    size = max(1, min(128, 1 << (assignments // num_experts).bit_length()))
    count = min(assignments, assignments // size + num_experts)  # tiles enough for any routing

    here = (routing.ids >= 0) & (routing.ids < num_experts)
    ids = jnp.where(here, routing.ids, num_experts)
    # How many tokens have chosen each expert, up to and with each token.
    upto = jnp.cumsum((ids[..., None] == jnp.arange(num_experts)).any(1), axis=0, dtype=jnp.int32)
    tile_ends = jnp.cumsum(-(-upto[-1] // size))
    expert = jnp.searchsorted(tile_ends, jnp.arange(count), side="right", method="compare_all")
    first_tile = jnp.concatenate([jnp.zeros(1, tile_ends.dtype), tile_ends])
    place = first_tile.at[ids].get(mode="clip") * size + jnp.take_along_axis(upto, ids, axis=1, mode="clip") - 1
    place = jnp.where(here, place, count * size)  # experts of others are in no tile
    chosen = filled((count * size,), assignments, jnp.int32, when=ids)
    chosen = chosen.at[place.reshape(-1)].set(jnp.arange(assignments), mode="drop").reshape(count, size)

    weights = routing.weights.reshape(-1)

    def tile(total: Array, args: tuple[Array, Array]) -> tuple[Array, None]:
        e, rows = args

        def compute() -> Array:
            return _expert(z.at[rows // top].get(mode="clip"), w1[e], w3[e], w2[e], act)

        if all_here:  # then few tiles have no row
            y = compute()
        else:
            y = jax.lax.cond(rows[0] < assignments, compute, lambda: jnp.zeros((size, width), z.dtype))
        weighted = weights.at[rows].get(mode="fill", fill_value=0)[:, None] * y
        # A token is in one tile of an expert at most: it gets its experts' shares in their order, whatever is beside it.
        return total.at[jnp.where(rows < assignments, rows // top, tokens)].add(weighted, mode="drop"), None

    nothing = filled((tokens, width), 0, jnp.float32, when=z)
    return jax.lax.scan(tile, nothing, (jnp.minimum(expert, num_experts - 1), chosen))[0].astype(z.dtype)
