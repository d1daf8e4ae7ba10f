"""A gated MLA layer: latents in, latents out; expanded for prefill, absorbed for decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.batch import Step
from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.layers.param import Absorbed, Linear, Maker, RMSNorm
from k3jax.ops import mla as ops
from k3jax.probe import Tap


class MLA(nnx.Module):
    """Multi-head latent attention. Nothing is rotated: the `rope` channels are one more key part, shared by all heads."""

    def __init__(self, make: Maker, config: K3Config) -> None:
        c = config
        self.heads, self.head_dim, self.nope = c.num_attention_heads, c.qk_head_dim, c.qk_nope_head_dim
        self.q_lora, self.gated = c.q_lora_rank is not None, c.mla_use_output_gate
        width, values = c.hidden_size, c.num_attention_heads * c.v_head_dim
        if c.q_lora_rank is not None:
            self.q_a_proj = Linear(make, c.q_lora_rank, width, (None, "embed"))
            self.q_a_layernorm = RMSNorm(make, c.q_lora_rank, None, c.latent_norm_eps)
            self.q_b_proj = Linear(make, c.num_attention_heads * c.qk_head_dim, c.q_lora_rank, ("heads", None))
        else:
            self.q_proj = Linear(make, c.num_attention_heads * c.qk_head_dim, width, ("heads", "embed"))
        self.kv_a_proj_with_mqa = Linear(make, c.latent_size, width, (None, "embed"))
        self.kv_a_layernorm = RMSNorm(make, c.kv_lora_rank, None, c.latent_norm_eps)
        self.kv_b_proj = Linear(
            make, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, ("heads", None)
        )
        if self.gated:
            self.g_proj = Linear(make, values, width, ("heads", "embed"))
        self.o_proj = Linear(make, width, values, ("embed", "heads"))
        self.W_UK_T: Absorbed | None = nnx.data(None)
        self.W_UV: Absorbed | None = nnx.data(None)

    def absorb(self) -> None:
        """Split kv_b_proj for decoding, once, after the parameters are there."""
        W_UK_T, W_UV = ops.absorb(self.kv_b_proj.weight[...], heads=self.heads, nope=self.nope)
        axes = ("heads", None, None)
        self.W_UK_T, self.W_UV = Absorbed(W_UK_T, axes=axes), Absorbed(W_UV, axes=axes)

    def __call__(
        self, x: Float[Array, "T D"], pages: Float[Array, "P page L"] | None, step: Step, ctx: Context, tap: Tap
    ) -> tuple[Float[Array, "T D"], Float[Array, "P page L"] | None]:
        """Output and pages; without pages rows have no past and leave no latents."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.q_lora else self.q_proj(x)
        q = q.reshape(x.shape[0], -1, self.head_dim)  # the heads that this rank has
        c, k_r = jnp.split(self.kv_a_proj_with_mqa(x), [self.kv_a_layernorm.weight.shape[0]], axis=-1)
        c, k_r = tap("mla_latent", self.kv_a_layernorm(c)), tap("mla_krope", k_r)
        with jax.named_scope("mla"):
            if pages is not None:  # before attention: a token finds itself through the cache
                pages = ops.write(pages, jnp.concatenate([c, k_r], -1), step)
            o = self._attend(q, c, k_r, pages, step).reshape(x.shape[0], -1)
        if self.gated:
            o = o * jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32)).astype(o.dtype)
        return tap("mla_out", ctx.ranks.sum(self.o_proj(o))), pages

    def _attend(self, q: Array, c: Array, k_r: Array, pages: Array | None, step: Step) -> Array:
        n = step.decode_rows
        outputs = []
        if step.decode is not None:
            assert pages is not None and self.W_UK_T is not None and self.W_UV is not None, (
                "decoding needs a carry and absorb()"
            )
            outputs.append(ops.decode(q[:n], pages, step.decode, self.W_UK_T[...], self.W_UV[...]))
        if step.prefill is not None:
            outputs.append(ops.prefill(q[n:], c[n:], k_r[n:], self.kv_b_proj.weight[...], pages, step.prefill))
        return jnp.concatenate(outputs)
