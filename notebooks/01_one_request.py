# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One request through Kimi K3
#
# A prompt of four tokens A, B, C, D passes all layers once and gives the distribution of E. E is sampled, becomes the next
# input, and gives the distribution of F. This notebook runs that on `checkpoints/k3-tiny`, which has every part of K3 in
# 13 small layers, and looks into the caches at each step. Every claim is computed, and asserted.

# %%
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import k3jax
from k3jax import carry as carries
from k3jax.batch import Batch
from k3jax.model import Context, forward
from k3jax.timeline import render, timeline

root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "checkpoints" / "k3-tiny").is_dir())
lm = k3jax.load(root / "checkpoints" / "k3-tiny", dtype="float32")
A, B, C, D = lm.encode("In the beginning God created")[:4]
print(lm, [lm.decode([token]) for token in (A, B, C, D)])

# %% [markdown]
# ## The model gives logits; a token is something else
#
# One pass over A, B, C, D gives a row of logits for each. Row D says how likely each token of the vocabulary is to follow.
# Sampling is a step of its own: with another temperature or seed the same row gives another token.

# %%
logits = lm.logits([A, B, C, D])
for temperature, seed in ((0, 0), (1.0, 1), (1.0, 2)):
    params = k3jax.SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
    print(temperature, seed, repr(lm.generate([[A, B, C, D]], params)[0].text))
assert logits.shape == (4, lm.config.vocab_size)

# %% [markdown]
# ## The whole of it in one table
#
# The run below looks into the carry after each step. The token just sampled is in the token list and in no cache: after the
# prefill the caches stand for A...D, and E is only the next step's input.

# %%
print(render(timeline(lm, [A, B, C, D])))

# %% [markdown]
# ## What persists, and how many bytes
#
# A KDA layer keeps one matrix a head and the last three inputs of its short convolution, whatever the length. An MLA layer
# keeps one latent a token. Nothing else outlives a step. For the full model, one request of 4 tokens and one of 100,000:

# %%
for tokens in (4, 100_000):
    for entry in carries.ledger(k3jax.K3Config.k3(), tokens=tokens).of("persists")[:3]:
        shape = str(entry.logical or entry.shape)
        print(f"{tokens:7,} tokens  {entry.what:24} {entry.copies} x {shape:15} {entry.bytes / 2**20:9,.2f} MiB")

# %% [markdown]
# ## The same, step by step
#
# `forward` is a pure function: new tokens and a carry in, logits and the next carry out.


# %%
@functools.partial(jax.jit, static_argnames="decode")
def step(tokens, carry, decode=False):
    """One step of a request alone: its new tokens, and the carry of those before."""
    batch = Batch(
        tokens=tokens,
        query_start_loc=jnp.array([0, tokens.shape[0]], jnp.int32),
        num_computed=carry.lengths,
        state_indices=jnp.zeros(1, jnp.int32),
        block_table=jnp.zeros((1, 1), jnp.int32),
        logits_indices=jnp.array([tokens.shape[0] - 1], jnp.int32),
    )
    out = forward(lm.model, batch, carry, Context(lm.kernels, decode_rows=int(decode)))
    return out.logits[0], out.carry


def ids(*tokens):
    return jnp.array(tokens, jnp.int32)


empty = carries.empty(lm.config, slots=1, pages=1, dtype="float32")
row_d, after_prefill = step(ids(A, B, C, D), empty)
E = int(row_d.argmax())
row_e, after_decode = step(ids(E), after_prefill, decode=True)
F = int(row_e.argmax())
print("E =", repr(lm.decode([E])), " F =", repr(lm.decode([F])))

# %% [markdown]
# Prefill gave the distribution of E, the first decode step that of F: the same as one pass over all five tokens.

# %%
one_pass = lm.logits([A, B, C, D, E])
print("prefill against row 3:", np.abs(row_d - one_pass[3]).max())
print("decode  against row 4:", np.abs(row_e - one_pass[4]).max())
assert np.abs(row_d - one_pass[3]).max() < 1e-3 and np.abs(row_e - one_pass[4]).max() < 1e-3

# %% [markdown]
# ## What goes wrong if you shift by one
#
# Suppose an engine believes that sampling E has put E into the caches, and writes it during the prefill. The decode step then
# takes E a second time: the caches stand for six tokens, and the logits are those of A, B, C, D, E, E.

# %%
_, shifted = step(ids(A, B, C, D, E), empty)
row_wrong, shifted = step(ids(E), shifted, decode=True)


def log_softmax(row):
    return np.asarray(jax.nn.log_softmax(row))


right, wrong = log_softmax(row_e), log_softmax(row_wrong)
print("the caches stand for", int(shifted.lengths[0]), "tokens, not", int(after_decode.lengths[0]))
print(f"KL(right || wrong) = {(np.exp(right) * (right - wrong)).sum():.3f} nats")
print(f"F had probability {np.exp(right[F]):.4f}, and has {np.exp(wrong[F]):.4f}")
assert np.abs(row_wrong - lm.logits([A, B, C, D, E, E])[5]).max() < 1e-3
assert np.abs(row_wrong - row_e).max() > 0.1

# %% [markdown]
# ## Chunks against the recurrence
#
# KDA is defined token by token. Within a chunk of 64 tokens the same is done with matrix products, and only the state between
# chunks is handed on. Both are in `k3jax/ops/kda.py`; over a longer text they differ by rounding alone.

# %%
text = lm.encode((root / "checkpoints" / "k3-tiny" / "heldout.txt").read_text()[:600])
chunked = lm.logits(text)
recurrent = k3jax.LM(lm.model, lm.config, lm.tokenizer, k3jax.Kernels(kda="scan", moe="dense")).logits(text)
print(len(text), "tokens; largest difference of the logits:", np.abs(chunked - recurrent).max())
assert np.abs(chunked - recurrent).max() < 1e-3

# %% [markdown]
# ## Absorbed against expanded
#
# In a prefill MLA makes keys and values of every head from the latents. A decode step does not: the up-projections are absorbed
# into the query and into the output, so that attention reads the latents themselves. The step below is the same token, computed
# as a prefill of one token (expanded) and as a decode (absorbed).

# %%
expanded, _ = step(ids(E), after_prefill)
print("largest difference of the logits:", np.abs(expanded - row_e).max())
assert np.abs(expanded - row_e).max() < 1e-3

# %% [markdown]
# ## The exercise
#
# *Right after the prefill has sampled E, and before the first decode step: which of the request's states contain E?*
#
# None. The caches are compared byte by byte: sampling changes nothing in them. Then one decode step changes exactly the KDA
# states, the convolution histories, and one latent a layer.

# %%
before = jax.tree.map(np.array, after_prefill)
for temperature in (0.5, 1.0, 2.0):
    jax.random.categorical(jax.random.key(0), row_d / temperature)
same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after_prefill), strict=True)]
print("after sampling, arrays as before:", sum(same), "of", len(same))
assert all(same) and int(after_prefill.lengths[0]) == 4

S = sum(not np.array_equal(a.S, b.S) for a, b in zip(before.kda, after_decode.kda, strict=True))
conv = sum(not np.array_equal(a.conv, b.conv) for a, b in zip(before.kda, after_decode.kda, strict=True))
places = [np.argwhere((a != b).any(-1)).tolist() for a, b in zip(before.mla, after_decode.mla, strict=True)]
print(f"after one decode step: {S} KDA states and {conv} histories changed; latents (page, place): {places}")
assert S == conv == len(lm.config.kda_layers) and places == [[[0, 4]]] * len(lm.config.mla_layers)
