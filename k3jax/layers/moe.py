"""The latent mixture of experts: router at full width, experts in the latent, shared experts beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.layers.mlp import MLP
from k3jax.layers.param import Linear, Maker, RMSNorm, zeros
from k3jax.ops import moe as ops
from k3jax.ops.act import Activation
from k3jax.probe import Tap


class Gate(nnx.Module):
    """The router's matrix and the bias that only chooses."""

    def __init__(self, make: Maker, experts: int, width: int) -> None:
        self.weight = make(experts, width, axes=(None, "embed"))  # whole on every rank
        self.e_score_correction_bias = make(experts, axes=(None,), init=zeros, dtype=jnp.float32)


class Matrix(nnx.Module):
    """One kind of matrix of all experts, stacked: [E, out, in], or the same in MXFP4."""

    def __init__(
        self, make: Maker, experts: int, out: int, in_: int, axes: tuple[str | None, ...], packed: bool
    ) -> None:
        if packed:
            self.weight_packed = make(experts, out, in_ // 2, axes=axes, init=zeros, dtype=jnp.uint8)
            self.weight_scale = make(experts, out, in_ // 32, axes=axes, init=zeros, dtype=jnp.uint8)
        else:
            self.weight = make(experts, out, in_, axes=axes)
        self.packed = packed

    @property
    def value(self) -> ops.Matrices:
        return ops.Packed(self.weight_packed[...], self.weight_scale[...]) if self.packed else self.weight[...]


class Experts(nnx.Module):
    """w1 is the gate, w3 the up and w2 the down matrix."""

    def __init__(self, make: Maker, experts: int, width: int, hidden: int, packed: bool) -> None:
        self.w1 = Matrix(make, experts, hidden, width, ("expert", "expert_mlp", "latent"), packed)
        self.w3 = Matrix(make, experts, hidden, width, ("expert", "expert_mlp", "latent"), packed)
        self.w2 = Matrix(make, experts, width, hidden, ("expert", "latent", "expert_mlp"), packed)


class MoE(nnx.Module):
    """shared(x) + up(norm(sum_e w_e expert_e(down(x)))); without a latent the experts read x itself."""

    def __init__(self, make: Maker, config: K3Config, act: Activation, packed: bool) -> None:
        c = config
        self.gate = Gate(make, c.num_experts, c.hidden_size)
        self.experts = Experts(make, c.num_experts, c.expert_width, c.moe_intermediate_size, packed)
        self.latent = c.routed_expert_hidden_size is not None
        self.normed = self.latent and c.latent_moe_use_norm
        if self.latent:
            self.routed_expert_down_proj = Linear(make, c.expert_width, c.hidden_size, ("latent", "embed"))
            self.routed_expert_up_proj = Linear(make, c.hidden_size, c.expert_width, ("embed", "latent"))
        if self.normed:
            self.routed_expert_norm = RMSNorm(make, c.expert_width, "latent", c.rms_norm_eps)
        self.shared = c.num_shared_experts > 0
        if self.shared:
            self.shared_experts = MLP(make, c.hidden_size, c.num_shared_experts * c.moe_intermediate_size, act)
        self.router = ops.Router(
            c.num_experts_per_token, c.num_expert_group, c.topk_group, c.moe_renormalize, c.routed_scaling_factor
        )
        self.act = act

    def __call__(
        self, x: Float[Array, "T D"], ctx: Context, tap: Tap, ids: Int[Array, "T A"] | None = None
    ) -> Float[Array, "T D"]:
        routing = self.router(x, self.gate.weight[...], self.gate.e_score_correction_bias[...], ids)
        _tap_routing(routing, tap)
        z = self.routed_expert_down_proj(x) if self.latent else x
        w1, w3, w2 = self.experts.w1.value, self.experts.w3.value, self.experts.w2.value
        with jax.named_scope("experts"):
            some = w1.shape[0] < self.gate.weight.shape[0]
            first = ctx.ranks.first_expert(w1.shape[0]) if some else None
            y = ops.experts(z, routing, w1, w3, w2, self.act, ctx.kernels.moe, first)
        shared = self.shared_experts.partial(x) if self.shared else None
        y, shared = ctx.ranks.sum((y, shared))  # before the norm, which is of the whole sum
        if self.normed:
            y = self.routed_expert_norm(y)
        if self.latent:
            y = self.routed_expert_up_proj(y)
        if shared is not None:
            y = y + shared
        return tap("moe_out", y)


def _tap_routing(routing: ops.Routing, tap: Tap) -> None:
    """Traces speak of experts in ascending order; the model does not care."""
    order = jnp.argsort(routing.ids, axis=-1)
    tap("router_ids", jnp.take_along_axis(routing.ids, order, -1))
    tap("router_weights", jnp.take_along_axis(routing.weights, order, -1))
