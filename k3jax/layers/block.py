"""One decoder layer, and the depth stream that layers hand on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.batch import Step
from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.layers.kda import KDA
from k3jax.layers.mla import MLA
from k3jax.layers.mlp import MLP
from k3jax.layers.moe import MoE
from k3jax.layers.param import Linear, Maker, RMSNorm, Vector, zeros
from k3jax.ops import attnres
from k3jax.ops.act import Activation
from k3jax.probe import Tap

Memory = Any  # KDAState of a KDA layer, latent pages of an MLA layer, None without a carry


class Depth(NamedTuple):
    """What flows through depth, made anew in every pass: the running sum and the sums of finished blocks.

    Without attention residuals there are no blocks and the running sum is the residual stream.
    """

    running: Float[Array, "T D"]
    blocks: tuple[Float[Array, "T D"], ...] = ()
    pending: Float[Array, "T D"] | None = None  # still to be added to the running sum, by the next site's kernel

    def added(self) -> Depth:
        """With nothing pending."""
        return self if self.pending is None else Depth(self.running + self.pending, self.blocks)

    @property
    def sources(self) -> tuple[Float[Array, "T D"], ...]:
        return (*self.blocks, self.running)


def mix(depth: Depth, norm: Vector, proj: Linear, eps: float, site: str, tap: Tap) -> Float[Array, "T D"]:
    """The depth mixture that one site reads."""
    with jax.named_scope("attnres"):
        mixed, weights = attnres.mix(depth.sources, norm.weight[...], proj.weight[...], eps)
    tap(site, weights)
    return mixed


class Block(nnx.Module):
    """attention site, then MLP site; each reads a mixture over depth and adds to the running sum."""

    def __init__(self, make: Maker, config: K3Config, layer: int, packed: bool) -> None:
        c = config
        act = Activation(c.hidden_act, c.activation_situ_beta, c.activation_situ_linear_beta)
        self.layer, self.eps = layer, c.rms_norm_eps
        self.is_kda, self.is_moe = c.mixer(layer) == "kda", c.is_moe(layer)
        self.attnres, self.starts_block = c.attn_res_block_size is not None, c.starts_block(layer)
        self.input_layernorm = RMSNorm(make, c.hidden_size, "embed", c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(make, c.hidden_size, "embed", c.rms_norm_eps)
        if self.attnres:
            self.self_attention_res_norm = Vector(make, c.hidden_size, "embed")
            self.self_attention_res_proj = Linear(make, 1, c.hidden_size, (None, "embed"), init=zeros)
            self.mlp_res_norm = Vector(make, c.hidden_size, "embed")
            self.mlp_res_proj = Linear(make, 1, c.hidden_size, (None, "embed"), init=zeros)
        self.self_attn = KDA(make, c) if self.is_kda else MLA(make, c)
        if self.is_moe:
            self.block_sparse_moe = MoE(make, c, act, packed)
        else:
            self.mlp = MLP(make, c.hidden_size, c.intermediate_size, act)

    def __call__(
        self, depth: Depth, memory: Memory, step: Step, ctx: Context, tap: Tap,
        ids: Int[Array, "T A"] | None = None,
    ) -> tuple[Depth, Memory]:  # fmt: skip
        """The stream after this layer and the layer's new memory; `ids` forces the experts."""
        kernel = ctx.kernels.attnres == "pallas" and memory is not None  # without a memory there may be a gradient
        res = (self.self_attention_res_norm, self.self_attention_res_proj) if self.attnres and depth.blocks else None
        depth, x = self._read(depth, res, self.input_layernorm, "attn", ctx, tap, kernel)
        a, memory = self.self_attn(x, memory, step, ctx, tap)
        if self.starts_block:  # the sum before the mix is stored, and the next one starts from the attention's output
            depth = Depth(a, depth.sources)
        else:
            depth = Depth(depth.running, depth.blocks, a)

        res = (self.mlp_res_norm, self.mlp_res_proj) if self.attnres else None
        depth, x = self._read(depth, res, self.post_attention_layernorm, "mlp", ctx, tap, kernel)
        m = self.block_sparse_moe(x, ctx, tap, ids) if self.is_moe else self.mlp(x, ctx)
        depth = Depth(depth.running, depth.blocks, m)
        return depth if kernel else depth.added(), memory

    def _read(
        self, depth: Depth, res: tuple[Vector, Linear] | None, norm: RMSNorm, site: str, ctx: Context, tap: Tap,
        kernel: bool,
    ) -> tuple[Depth, Float[Array, "T D"]]:  # fmt: skip
        """Depth with nothing pending, and what a site reads of it: the mixture, or the running sum alone, normed."""
        if res is None or not kernel:
            depth = depth.added()
            h = depth.running if res is None else mix(depth, *res, self.eps, f"attnres_{site}", tap)
            x = norm(h)
        else:
            name = f"attnres_{site}"
            with jax.named_scope("attnres"):
                running, x, weights = attnres.mix_norm(
                    depth.running, depth.pending, depth.blocks, res[0].weight[...], res[1].weight[...], norm.weight[...],
                    eps=self.eps, weights=ctx.probe.wants(name), interpret=ctx.kernels.interpret,
                )  # fmt: skip
            if weights is not None:
                tap(name, weights)
            depth = Depth(running, depth.blocks)
        self._tap_sources("attnres_R_attn" if site == "attn" else "attnres_R", depth, tap)
        return depth, x

    def _tap_sources(self, site: str, depth: Depth, tap: Tap) -> None:
        if self.attnres:
            tap(site, jnp.int32(len(depth.sources)))
