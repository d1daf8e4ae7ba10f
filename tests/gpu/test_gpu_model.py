"""k3-tiny and a slice of K3's true widths, with GPU kernels and without: the same tokens in float32, as near to it in bfloat16."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import Row, get_state, pack, relative_error

import k3jax
from k3jax import K3Config, Kernels, SamplingParams
from k3jax.carry import PAGE, empty
from k3jax.context import Context
from k3jax.model import K3, forward
from k3jax.pallas import no_mosaic

XLA, GPU = Kernels("chunk", "dense"), Kernels("pallas", "dense", "pallas")
TINY = Path(__file__).parents[2] / "checkpoints" / "k3-tiny"


def a_slice(**changes):
    """Three layers of KDA and one of MLA, 96 heads of 128 channels; few experts, since their form is the same."""
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return dataclasses.replace(K3Config.k3().slice(4), vocab_size=4096, **ends, **changes)


def model_of(config, dtype):
    """Random, the queries over depth too: they begin at zero, where scores cannot be wrong."""
    model = K3(config, rngs=nnx.Rngs(0), dtype=dtype).absorb()
    for i, (path, query) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        if str(path[-2]).endswith("res_proj"):
            normal = jax.random.normal(jax.random.key(i), query.shape, query.dtype)
            query.set_value(normal * config.hidden_size**-0.5)
    return model


def tokens(lm, prompts, count):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return [answer.token_ids for answer in lm.generate(prompts, params)]


def test_tiny_generates_the_same_tokens():
    prompts = ["And God said", "In the beginning " * 40, "A"]
    found = []
    for kernels in (XLA, GPU):
        lm = k3jax.load(TINY, dtype="float32", kernels=kernels)
        found.append(tokens(lm, [lm.encode(p) for p in prompts], 96))
    assert found[0] == found[1]


def test_a_slice_of_true_width_generates_the_same_tokens():
    config = a_slice(num_experts=16)
    model = model_of(config, "float32")
    prompts = [np.random.default_rng(0).integers(0, 4096, n).tolist() for n in (200, 1, 65)]
    found = [tokens(k3jax.LM(model, config, None, kernels), prompts, 32) for kernels in (XLA, GPU)]
    assert found[0] == found[1]


# Two prompts in two steps of one program: by slot, the tokens of each step.
PIECES = {1: (1100, 700), 0: (600, 1000)}
PADDING = 18


def steps():
    """Each step's rows, and its batch."""
    random, longest = np.random.default_rng(0), max(map(sum, PIECES.values()))
    size = -(-longest // PAGE)
    ids = {slot: random.integers(0, 4096, sum(pieces)) for slot, pieces in PIECES.items()}
    found = []
    for step in range(2):
        rows = []
        for slot, pieces in PIECES.items():
            past, pages = sum(pieces[:step]), range(slot * size, (slot + 1) * size)
            rows.append(Row(ids[slot][past : past + pieces[step]].tolist(), past, slot, pages))
        found.append((rows, pack(rows, sum(len(row.ids) for row in rows) + PADDING, size)))
    return found


def prefill(model, kernels, **options):
    """Logits of every token and what each slot then holds, by name; and which kernels the program calls."""
    config, given, found = model.config, steps(), {}
    first = given[0][1]
    carry = empty(config, slots=2, pages=2 * first.block_table.shape[1], dtype=str(model.dtype))
    program = jax.jit(forward, static_argnames="ctx").trace(model, first, carry, ctx=Context(kernels))
    compiled = program.lower().compile(compiler_options=options)
    for step, (_, batch) in enumerate(given):
        out = compiled(model, batch, carry)
        carry, found[f"logits of step {step}"] = out.carry, out.logits[:-PADDING]
    for row in given[-1][0]:
        for kind, layers in vars(get_state(config, carry, row)).items():
            found |= {f"{kind} of layer {layer} in slot {row.slot}": a.astype(float) for layer, a in layers.items()}
    names = re.findall(r"\bname=(\w+)", str(program.jaxpr))
    return found, {name for name in names if name.startswith(("kda", "attnres"))}


@pytest.mark.skipif(no_mosaic() is not None, reason="no forms in Mosaic GPU")
def test_long_prompts_in_bfloat16_are_as_near_to_float32_as_xla_needs_hopper():
    """By the forms in Mosaic GPU, as the program says: logits and memory, against the same weights in float32.

    Every expert is chosen: with some of them, one rounding more would choose others, and nothing could be said. The kernels round
    the operands of their products, which XLA's form does not: in smaller models that makes errors larger by a fifth, by a third at
    most. A decay of half a chunk that is wrong by one percent makes some five times as large.
    """
    config = a_slice(num_experts=4, num_experts_per_token=4, attn_res_block_size=2)
    assert Kernels.auto(config) == GPU
    model = model_of(config, "bfloat16")
    got, kernels = prefill(model, GPU)
    assert kernels == {"kda_conv", "kda_prepare_mosaic", "kda_scan_mosaic", "attnres_mosaic"}
    # XLA may leave roundings out that stand in the program.
    xla, none = prefill(model, XLA, xla_allow_excess_precision=False)
    assert not none
    want, _ = prefill(jax.tree.map(lambda a: a.astype(jnp.float32), model), XLA)
    errors = {name: (relative_error(got[name], a), relative_error(xla[name], a)) for name, a in want.items()}
    assert all(ours <= 1.5 * its for ours, its in errors.values()), errors
