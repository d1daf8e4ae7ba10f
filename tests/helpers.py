"""Shared by tests: random checkpoints under the released names, the modules made from them, and packed batches."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import k3jax
from k3jax import sharding
from k3jax.batch import NOWHERE, Batch
from k3jax.carry import Carry
from k3jax.config import K3Config
from k3jax.model import K3
from k3jax.ops.mxfp4 import encode
from k3jax.reference import State

# Compiler options of tests that compile whole models: a third of the time, the same mathematics.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

INTERPRET = jax.default_backend() == "cpu"  # GPU kernels


def assert_close(got, want, atol, what=""):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, what
    assert np.abs(got - want).max(initial=0) <= atol, (what, np.abs(got - want).max())


def relative_error(got, want):
    """Norm of the difference over the norm of what is wanted; NaN anywhere gives NaN, which fails every bound."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def same_bits(got, want):
    """Equality of bytes, so that NaN equals itself and 0 is not -0."""
    got, want = np.asarray(got), np.asarray(want)
    return got.shape == want.shape and got.dtype == want.dtype and got.tobytes() == want.tobytes()


def assert_directions(loss, arguments, gradients, bound):
    """Gradients against central differences of a float64 loss, each argument along a random direction."""
    rng = np.random.default_rng(7)
    arguments = [np.asarray(a, np.float64) for a in arguments]
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=arguments[i].shape)
        ends = [loss(*arguments[:i], arguments[i] + h * direction, *arguments[i + 1 :]) for h in (-1e-5, 1e-5)]
        want, gradient = (ends[1] - ends[0]) / 2e-5, np.asarray(gradient, np.float64)
        assert abs((gradient * direction).sum() - want) <= bound * np.linalg.norm(gradient), i


# Models.


def small(**changes):
    """A model of four layers with no two widths alike; MLA is layer 2."""
    fields = dict(
        vocab_size=31, hidden_size=12, num_hidden_layers=4, kda_layers=(0, 1, 3), kda_num_heads=3, kda_head_dim=4,
        num_attention_heads=2, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=7,
        intermediate_size=9, first_k_dense_replace=1, num_experts=8, num_experts_per_token=3, num_shared_experts=1,
        moe_intermediate_size=10, routed_scaling_factor=1.5,
    )  # fmt: skip
    return K3Config(**{**fields, **changes})


# What K3 has and Kimi-Linear has not.
K3_FIELDS = dict(
    attn_res_block_size=2, gate_lower_bound=-5.0, use_full_rank_gate=True, q_lora_rank=8, mla_use_output_gate=True,
    hidden_act="situ", routed_expert_hidden_size=6,
)  # fmt: skip


# Any combination of fields.
VARIANTS = {
    "kimi_linear": {},
    "k3": K3_FIELDS,
    "k3_blocks_of_one": K3_FIELDS | dict(attn_res_block_size=1),
    "k3_one_long_block": K3_FIELDS | dict(attn_res_block_size=9),
    "k3_plain_residual": K3_FIELDS | dict(attn_res_block_size=None),
    "k3_softplus": K3_FIELDS | dict(gate_lower_bound=None),
    "k3_low_rank_gate": K3_FIELDS | dict(use_full_rank_gate=False, kda_gate_rank=5, kda_decay_rank=3),
    "k3_silu": K3_FIELDS | dict(hidden_act="silu"),
    "k3_no_latent_norm": K3_FIELDS | dict(latent_moe_use_norm=False),
    "k3_full_width_experts": K3_FIELDS | dict(routed_expert_hidden_size=None),
    "k3_no_shared_experts": K3_FIELDS | dict(num_shared_experts=0),
    "k3_groups": K3_FIELDS | dict(num_expert_group=4, topk_group=2),
    "k3_top_one": K3_FIELDS | dict(num_experts_per_token=1),
    "k3_every_second_layer_dense": K3_FIELDS | dict(moe_layer_freq=2, first_k_dense_replace=0),
    "k3_two_taps": K3_FIELDS | dict(short_conv_kernel_size=2),
    "k3_all_kda": K3_FIELDS | dict(kda_layers=(0, 1, 2, 3)),
    "k3_all_mla": K3_FIELDS | dict(kda_layers=()),
    "kimi_linear_bounded": dict(gate_lower_bound=-2.0),
    "kimi_linear_q_lora": dict(q_lora_rank=8),
    "kimi_linear_latent": dict(routed_expert_hidden_size=6),
}


def checkpoint(c, seed=0):
    """Random float64 tensors under the released names, for any config."""
    rng = np.random.default_rng(seed)
    tensors = {}

    def add(name, *shape):
        tensors[name] = rng.normal(size=shape) * shape[-1] ** -0.5

    def norm(name, size):
        tensors[name] = 1 + 0.3 * rng.normal(size=size)

    def add_mlp(prefix, names, width, hidden):
        for name, shape in zip(names, [(hidden, width), (hidden, width), (width, hidden)], strict=True):
            add(f"{prefix}{name}.weight", *shape)

    D, HK, H = c.hidden_size, c.kda_num_heads * c.kda_head_dim, c.num_attention_heads
    sites = []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}."
        sites += [f"{at}self_attention_res", f"{at}mlp_res"]
        norm(f"{at}input_layernorm.weight", D)
        norm(f"{at}post_attention_layernorm.weight", D)
        attn = f"{at}self_attn."
        if c.mixer(layer) == "kda":
            for name in "qkv":
                add(f"{attn}{name}_proj.weight", HK, D)
                add(f"{attn}{name}_conv1d.weight", HK, 1, c.short_conv_kernel_size)
            add(f"{attn}b_proj.weight", c.kda_num_heads, D)
            add(f"{attn}f_a_proj.weight", c.decay_rank, D)
            add(f"{attn}f_b_proj.weight", HK, c.decay_rank)
            add(f"{attn}A_log", c.kda_num_heads)
            add(f"{attn}dt_bias", HK)
            norm(f"{attn}o_norm.weight", c.kda_head_dim)
            if c.use_full_rank_gate:
                add(f"{attn}g_proj.weight", HK, D)
            else:
                add(f"{attn}g_a_proj.weight", c.gate_rank, D)
                add(f"{attn}g_b_proj.weight", HK, c.gate_rank)
            add(f"{attn}o_proj.weight", D, HK)
        else:
            if c.q_lora_rank:
                add(f"{attn}q_a_proj.weight", c.q_lora_rank, D)
                norm(f"{attn}q_a_layernorm.weight", c.q_lora_rank)
                add(f"{attn}q_b_proj.weight", H * c.qk_head_dim, c.q_lora_rank)
            else:
                add(f"{attn}q_proj.weight", H * c.qk_head_dim, D)
            add(f"{attn}kv_a_proj_with_mqa.weight", c.latent_size, D)
            norm(f"{attn}kv_a_layernorm.weight", c.kv_lora_rank)
            add(f"{attn}kv_b_proj.weight", H * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
            if c.mla_use_output_gate:
                add(f"{attn}g_proj.weight", H * c.v_head_dim, D)
            add(f"{attn}o_proj.weight", D, H * c.v_head_dim)
        if not c.is_moe(layer):
            add_mlp(f"{at}mlp.", ["gate_proj", "up_proj", "down_proj"], D, c.intermediate_size)
            continue
        experts = f"{at}block_sparse_moe."
        add(f"{experts}gate.weight", c.num_experts, D)
        add(f"{experts}gate.e_score_correction_bias", c.num_experts)
        for expert in range(c.num_experts):
            add_mlp(f"{experts}experts.{expert}.", ["w1", "w3", "w2"], c.expert_width, c.moe_intermediate_size)
        if c.routed_expert_hidden_size:
            add(f"{experts}routed_expert_down_proj.weight", c.expert_width, D)
            add(f"{experts}routed_expert_up_proj.weight", D, c.expert_width)
            if c.latent_moe_use_norm:
                norm(f"{experts}routed_expert_norm.weight", c.expert_width)
        if c.num_shared_experts:
            hidden = c.num_shared_experts * c.moe_intermediate_size
            add_mlp(f"{experts}shared_experts.", ["gate_proj", "up_proj", "down_proj"], D, hidden)
    if c.attn_res_block_size:
        for site in [*sites, "model.output_attn_res"]:
            norm(f"{site}_norm.weight", D)
            add(f"{site}_proj.weight", 1, D)
    norm("model.norm.weight", D)
    tensors["model.embed_tokens.weight"] = rng.normal(size=(c.vocab_size, D))
    add("lm_head.weight", c.vocab_size, D)
    return tensors


PADDING = 5  # entries of A_log past the heads; K3 has 32


def stored(config, tensors, packed=False):
    """As a checkpoint stores them: float32, A_log with zeros past the heads, experts in MXFP4 if `packed`."""
    found = {}
    for name, value in tensors.items():
        if name.endswith("A_log"):
            found[name] = np.pad(value, (0, PADDING)).astype(np.float32)
        elif packed and ".experts." in name:
            found[f"{name}_packed"], found[f"{name}_scale"] = encode(value)
        else:
            found[name] = value.astype(np.float32)
    return found


def parameters(config, model):
    """Every parameter of a module (or of its gradient), with the names of the tensors that it is made of."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, parameter in state:
        name = ".".join(map(str, path))
        experts = range(config.num_experts) if ".experts." in name else [None]
        yield parameter, [name if e is None else name.replace(".experts.", f".experts.{e}.") for e in experts]


def module(config, tensors, packed=False):
    """The module whose parameters are `tensors`: attribute paths are the names, experts are stacked. All must be read."""
    model, unread = K3.abstract(config, dtype="float32", packed=packed), set(tensors)
    for parameter, names in parameters(config, model):
        value = np.stack([tensors[name] for name in names]) if len(names) > 1 else tensors[names[0]]
        value = value[: config.kda_num_heads] if names[0].endswith("A_log") else value
        assert value.shape == parameter.shape and value.dtype == parameter.dtype, names[0]
        parameter.set_value(jnp.asarray(value))
        unread -= set(names)
    assert not unread
    return model.absorb()


def tensors_of(config, model):
    """The inverse of `module`."""
    found = {}
    for parameter, names in parameters(config, model):
        value = np.asarray(parameter[...])
        found |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
    return {name: np.pad(value, (0, PADDING)) if name.endswith("A_log") else value for name, value in found.items()}


# Batches and carries.


class Row(NamedTuple):
    """One request's share of a step: its new tokens, and where its past is."""

    ids: Sequence[int]
    past: int = 0
    slot: int = NOWHERE
    pages: Sequence[int] = ()


def pack(rows, tokens, pages, pad=0):
    """Rows one after another, then token id `pad` up to `tokens`; page lists filled to `pages` with NOWHERE."""
    ids = [token for row in rows for token in row.ids]
    table = [[*row.pages, *[NOWHERE] * (pages - len(row.pages))] for row in rows]
    fields = (
        ids + [pad] * (tokens - len(ids)), np.cumsum([0, *(len(row.ids) for row in rows)]),
        [row.past for row in rows], [row.slot for row in rows], np.reshape(table, (len(rows), pages)), np.arange(tokens),
    )  # fmt: skip
    return Batch(*(jnp.asarray(field, jnp.int32) for field in fields))


def put_state(config, carry, row, state):
    """The carry with the reference's state of the `row.past` tokens before the row, in its slot and pages."""
    c, (kda, mla, lengths) = config, jax.tree.map(np.array, carry)
    for layer, memory in zip(c.kda_layers, kda, strict=True):
        streams = state.conv[layer].reshape(3, -1, c.kda_num_heads, c.kda_head_dim)
        memory.conv[row.slot] = np.concatenate(streams, axis=-1)
        memory.S[row.slot] = np.swapaxes(state.recurrent[layer], -1, -2)
    for layer, pool in zip(c.mla_layers, mla, strict=True):
        for position, latent in enumerate(state.latent[layer]):
            page, offset = divmod(position, pool.shape[1])
            pool[row.pages[page], offset] = latent
    lengths[row.slot] = row.past
    return jax.tree.map(jnp.asarray, Carry(kda, mla, lengths))


def get_state(config, carry, row):
    """What the carry holds of a row after its step, in the reference's layout."""
    c, length = config, row.past + len(row.ids)
    assert int(carry.lengths[row.slot]) == length
    state = State({}, {}, {})
    for layer, memory in zip(c.kda_layers, carry.kda, strict=True):
        streams = np.stack(np.split(np.asarray(memory.conv[row.slot]), 3, axis=-1))
        state.conv[layer] = streams.reshape(3, streams.shape[1], -1)
        state.recurrent[layer] = np.swapaxes(memory.S[row.slot], -1, -2)
    for layer, pool in zip(c.mla_layers, carry.mla, strict=True):
        state.latent[layer] = np.asarray(pool)[np.array(row.pages)].reshape(-1, pool.shape[-1])[:length]
    return state


def assert_state(got, want, atol):
    """Every array of two states, the recurrent one relative to its largest element."""
    for kind in State.__dataclass_fields__:
        for layer, value in getattr(want, kind).items():
            assert_close(
                getattr(got, kind)[layer], value, atol * max(1, np.abs(value).max(initial=0)), f"{kind} {layer}"
            )


def lengths_batch(lengths, tokens, past=None, page=8):
    """A batch of rows of these lengths, with pages of their own for past and new tokens; ids are zeros."""
    past = past or [0] * len(lengths)
    pages = max(1, max(-(-(n + p) // page) for n, p in zip(lengths, past, strict=True)))
    rows = [
        Row([0] * n, p, i, range(i * pages, (i + 1) * pages))
        for i, (n, p) in enumerate(zip(lengths, past, strict=True))
    ]
    return pack(rows, tokens, pages)


def log_softmax(logits):
    """In float64."""
    z = np.asarray(logits, np.float64)
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


# Meshes.


def on_mesh(lm: k3jax.LM, mesh) -> k3jax.LM:
    """The same model, divided over a mesh."""
    sharding.check(lm.config, mesh)
    held = jax.tree.map(np.array, lm.model)  # memory of its own: closing one leaves the other
    model = sharding.placed(held, mesh, sharding.of_model(lm.model))
    return k3jax.LM(model, lm.config, lm.tokenizer, lm.kernels, lm.end_ids, directory=lm.directory, mesh=mesh)
