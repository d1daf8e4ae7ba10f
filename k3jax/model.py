"""The main path, file 1: from packed tokens to the logits of the wanted rows.

    tokens [T] -> embedding -> layers (mix -> norm -> KDA or MLA, mix -> norm -> MLP or MoE) -> pick rows
               -> output mix -> norm -> head

`forward` is a pure function of parameters, batch and carry. File 2 is generate.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.batch import Batch, prepare
from k3jax.carry import PAGE, Carry
from k3jax.config import K3Config
from k3jax.context import Context as Context
from k3jax.layers.block import Block, Depth, mix
from k3jax.layers.mla import MLA
from k3jax.layers.param import Linear, Maker, RMSNorm, Vector, zeros
from k3jax.ops.linear import project
from k3jax.ops.pool import MANY, after
from k3jax.probe import Taps

Routing = Mapping[str, Int[Array, "T A"]]  # router_ids_L -> the experts that layer L must use


class Embedding(nnx.Module):
    """Rows of the vocabulary; no scaling."""

    def __init__(self, make: Maker, vocabulary: int, width: int) -> None:
        self.weight = make(vocabulary, width, axes=("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "T"], ctx: Context) -> Float[Array, "T D"]:
        table = self.weight[...]
        index = tokens - ctx.ranks.first(table.shape[0])
        here = (index >= 0) & (index < table.shape[0])  # one rank has the token's row
        return ctx.ranks.sum(jnp.where(here[:, None], table.at[index].get(mode="clip"), 0))


class Trunk(nnx.Module):
    """Everything but the head. Attribute paths below are the released tensor names."""

    def __init__(self, make: Maker, config: K3Config, packed: bool) -> None:
        c = config
        self.embed_tokens = Embedding(make, c.vocab_size, c.hidden_size)
        self.layers = nnx.List([Block(make, c, layer, packed) for layer in range(c.num_hidden_layers)])
        self.norm = RMSNorm(make, c.hidden_size, "embed", c.rms_norm_eps)
        if c.attn_res_block_size is not None:
            self.output_attn_res_norm = Vector(make, c.hidden_size, "embed")
            self.output_attn_res_proj = Linear(make, 1, c.hidden_size, (None, "embed"), init=zeros)


class K3(nnx.Module):
    """The parameters of one model. `packed` keeps the routed experts in MXFP4."""

    def __init__(
        self, config: K3Config, *, rngs: nnx.Rngs | None, dtype: str | jnp.dtype = "bfloat16", packed: bool = False
    ) -> None:
        make = Maker(jnp.dtype(dtype), rngs)
        self.model = Trunk(make, config, packed)
        self.lm_head = Linear(make, config.vocab_size, config.hidden_size, ("vocab", "embed"))
        self.config = config

    @classmethod
    def abstract(cls, config: K3Config, *, dtype: str | jnp.dtype = "bfloat16", packed: bool = False) -> K3:
        """Shapes and dtypes alone: no memory, any size."""
        return cls(config, rngs=None, dtype=dtype, packed=packed)

    @property
    def dtype(self) -> jnp.dtype:
        """The trunk's dtype, which is also that of activations and of the carry's latents."""
        return self.model.embed_tokens.weight.dtype

    def absorb(self) -> K3:
        """Make what decoding reads from the parameters (W_UK_T and W_UV of every MLA layer). Call once, after loading."""
        for block in self.model.layers:
            if isinstance(block.self_attn, MLA):
                block.self_attn.absorb()
        return self


@jax.tree_util.register_pytree_node_class
class Weights:
    """A model's parameters as they are now, flattened once, for who calls many small programs.

    Each call of a program flattens its arguments, and a module's tree is walked in Python: over a millisecond for the 384
    parameters of 13 layers, as much as a decode step takes on a GPU.
    """

    def __init__(self, model: K3) -> None:
        leaves, structure = jax.tree.flatten(model)
        self.leaves, self.structure = tuple(leaves), _interned(structure)

    @property
    def model(self) -> K3:
        return jax.tree.unflatten(self.structure, self.leaves)

    def tree_flatten(self) -> tuple[tuple[tuple[Array, ...]], Any]:
        return (self.leaves,), self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, children: tuple[tuple[Array, ...]]) -> Weights:
        weights = object.__new__(cls)
        [weights.leaves], weights.structure = children, structure
        return weights


@functools.lru_cache(maxsize=16)
def _interned(structure: Any) -> Any:
    """One object for all that are equal: they are compared at every call."""
    return structure


class Output(NamedTuple):
    logits: Float[Array, "wanted N"]  # float32, of batch.logits_indices; of this rank's part of the vocabulary
    carry: Carry | None
    taps: dict[str, Array]  # what ctx.probe asked for
    first_bad: Int[Array, "B"]  # the first layer after which a row held a value that is not finite; -1: none


def forward(model: K3, batch: Batch, carry: Carry | None, ctx: Context, routing: Routing | None = None) -> Output:
    """One pass over a packed batch; the carry then stands for each row's first `seq_lens` tokens.

    Without a carry every row starts from nothing and leaves nothing: scoring and training.
    """
    trunk, config, tap = model.model, model.config, Taps(ctx.probe)
    kda = iter(carry.kda if carry else ())
    mla = iter(carry.mla if carry else ())
    depth = Depth(tap("embed", trunk.embed_tokens(batch.tokens, ctx)))
    page = carry.mla[0].shape[1] if carry and carry.mla else PAGE
    step = prepare(batch, ctx.decode_rows, page, config.short_conv_kernel_size)
    # Counted without the layer's number, so that layers are alike to the compiler and a kernel of one serves all.
    good, layers_good = jnp.ones(batch.tokens.shape, bool), jnp.zeros(batch.tokens.shape, jnp.int32)
    hidden, memories = [], {"kda": [], "mla": []}
    for layer, block in enumerate(trunk.layers):
        mixer = config.mixer(layer)
        memory = next(kda if mixer == "kda" else mla, None)
        ids = None if routing is None else routing.get(f"router_ids_{layer}")
        with jax.named_scope(f"layer_{layer}"):
            depth, memory = block(depth, memory, step, ctx, tap.at(layer), ids)
        memories[mixer].append(memory)
        hidden.append(depth.added().running)
        good = good & jnp.isfinite(hidden[-1]).all(-1)
        layers_good = layers_good + good
        if batch.tokens.shape[0] >= MANY:  # one layer after the other
            step = step._replace(read_slots=after(step.read_slots, layers_good.max(), *jax.tree.leaves(memory)))
    if "hidden" in ctx.probe.save:
        tap("hidden", jnp.stack(hidden))

    with jax.named_scope("head"):
        logits = _head(model, depth, batch, tap)
    if carry is not None:
        lengths = carry.lengths.at[step.write_slots].set(step.seq_lens, mode="drop")
        carry = Carry(tuple(memories["kda"]), tuple(memories["mla"]), lengths)
    return Output(logits, carry, tap.values, _first_bad(layers_good, batch, len(trunk.layers)))


def _head(model: K3, depth: Depth, batch: Batch, tap: Taps) -> Float[Array, "wanted N"]:
    """Output mix, final norm and head, on the wanted rows alone."""
    trunk = model.model
    depth = jax.tree.map(lambda source: source.at[batch.logits_indices].get(mode="clip"), depth.added())
    h = depth.running
    if depth.blocks:
        h = mix(
            depth, trunk.output_attn_res_norm, trunk.output_attn_res_proj, model.config.rms_norm_eps, "attnres_out", tap
        )
    x = tap("final_hidden", trunk.norm(h))
    return project(x, model.lm_head.weight[...])


def _first_bad(layers_good: Int[Array, "T"], batch: Batch, layers: int) -> Int[Array, "B"]:
    """The fewest layers after which all was finite among each row's tokens; -1 where that is all of them."""
    rows = batch.num_computed.shape[0]
    fewest = jnp.full(rows, layers).at[batch.row].min(layers_good, mode="drop")
    return jnp.where(fewest == layers, -1, fewest)
