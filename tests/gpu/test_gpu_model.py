"""k3-tiny and a slice of K3's true widths generate the same tokens with GPU kernels and without, in float32."""

import dataclasses
from pathlib import Path

import numpy as np
from flax import nnx

import k3jax
from k3jax import K3Config, Kernels, SamplingParams
from k3jax.model import K3

XLA, GPU = Kernels("chunk", "dense"), Kernels("pallas", "dense", "pallas")
TINY = Path(__file__).parents[2] / "checkpoints" / "k3-tiny"


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
    """Three layers of KDA and one of MLA, 96 heads of 128 channels; few experts, since their form is the same."""
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = dataclasses.replace(K3Config.k3().slice(4), num_experts=16, vocab_size=4096, **ends)
    model = K3(config, rngs=nnx.Rngs(0), dtype="float32").absorb()
    prompts = [np.random.default_rng(0).integers(0, 4096, n).tolist() for n in (200, 1, 65)]
    found = [tokens(k3jax.LM(model, config, None, kernels), prompts, 32) for kernels in (XLA, GPU)]
    assert found[0] == found[1]
