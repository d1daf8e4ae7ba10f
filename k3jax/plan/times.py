"""Kinds of GPU, and how long they take at least for a step.

The bound of a part of a step is the longer of what it must read and write over the memory's bandwidth, and of its products over
the peak of dense bfloat16; one part follows another. Where a kernel of ours was measured in just that size, its time stands
beside the bound.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from k3jax.carry import PAGE
from k3jax.config import K3Config
from k3jax.plan.held import RELEASED, Held

LATENCY = 3e-6  # s, of a small all-reduce in one host: the best published on eight H200; NCCL takes 16 or more
Step = Literal["decode", "prefill"]


@dataclasses.dataclass(frozen=True)
class GPU:
    """One kind. Bytes, and bytes or operations a second; of links what one GPU sends while it receives as much."""

    title: str
    nominal: int  # memory as the vendor names it
    memory: int  # memory as nvidia-smi says
    bandwidth: float  # of memory
    flops: float  # products and sums in bfloat16, dense
    link: float  # NVLink
    joined: int  # GPUs that NVLink joins
    network: float  # to the GPUs of other hosts


# Vendor's data sheets of H100 SXM, H200 SXM, HGX B200, HGX B300 and GB300 NVL72. The sheets of the last two subtract what the
# system reserves (270 and 279 GB); the chip is named 288 GB. Memory: memory.total of nvidia-smi, in MiB. Network: the DGX
# systems' one adapter a GPU, 400 or 800 Gbit/s.
GPUS = {
    "h100": GPU("H100", 80 * 10**9, 81_559 * 2**20, 3.35e12, 989e12, 450e9, 8, 50e9),
    "h200": GPU("H200", 141 * 10**9, 143_771 * 2**20, 4.8e12, 989e12, 450e9, 8, 50e9),
    "b200": GPU("B200", 180 * 10**9, 183_359 * 2**20, 7.7e12, 2250e12, 900e9, 8, 50e9),
    "b300": GPU("B300", 288 * 10**9, 275_040 * 2**20, 7.7e12, 2250e12, 900e9, 8, 100e9),
    "gb300": GPU("GB300", 288 * 10**9, 284_208 * 2**20, 8.0e12, 2500e12, 900e9, 72, 100e9),
}

# Kernels of ours by GPU and step: the record in benchmarks/results, and seconds that one KDA layer takes there, by heads of a rank
# and rows or tokens (of one request). K = V = 128, four taps, gates above -5, bfloat16; of a prompt without the convolution.
MEASURED: dict[tuple[str, Step], tuple[str, dict[tuple[int, int], float]]] = {
    ("h200", "decode"): (
        "2026-11-30-kernels.json",
        {
            (12, 1): 5.90e-6, (12, 8): 10.02e-6, (12, 32): 19.09e-6, (12, 64): 41.48e-6, (12, 128): 66.13e-6,
            (12, 256): 127.17e-6, (96, 1): 9.15e-6, (96, 8): 38.91e-6, (96, 32): 131.78e-6, (96, 128): 467.20e-6,
        },
    ),
    ("h200", "prefill"): (
        "2026-12-01-kernels.json",
        {(12, 8192): 247.5e-6, (12, 32768): 806.9e-6, (96, 8192): 797.3e-6},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a step, all layers together, on one GPU. Seconds."""

    name: str
    bytes: float  # read and written; sent, by a collective
    flops: float
    bound: float
    measured: float | None = None
    source: str = ""  # where `measured` is from


def parts(step: Step, held: Held, kind: str, rows: int, tokens: int) -> tuple[Part, ...]:
    """The parts of a pass: `rows` rows of one new token each, the last of `tokens`, or one row of `tokens` new ones."""
    c, gpu, ranks, item = held.config, GPUS[kind], held.ep * held.tp, jnp.dtype(held.dtype).itemsize
    decode, found = step == "decode", []
    T = rows if decode else tokens

    def part(name: str, size: float, flops: float, measured: float | None = None, source: str = "") -> None:
        if size:
            found.append(Part(name, size, flops, max(size / gpu.bandwidth, flops / gpu.flops), measured, source))

    weights, factors = held.weights(), held.factors()
    for name in RELEASED:  # decoding reads what is absorbed from kv_b_proj in its place: both are as large
        size, products = float(weights[name]), float(T * factors[name])
        if name == "experts" and size:
            # Each token draws A of E experts, all equally often; a rank has its share of what is drawn.
            drawn = c.num_experts_per_token / c.num_experts
            size, products = size * (1 - (1 - drawn) ** T), products * drawn
        if name == "embed + head":  # a few rows of the one; of the other all, for the last token of each row
            size, products = float(factors[name] * item), float(rows * factors[name])
        part(name, size, 2 * products)

    state, sampling, page = held.pools()
    if c.kda_layers:
        # States are read and written; of new tokens of a prompt q, k, v, decay, output and beta pass. The products are the three
        # with a state that every form has: with k, with q, and the new v k.
        heads = len(c.kda_layers) * c.kda_num_heads // ranks
        size = 2 * rows * state + (not decode) * T * heads * (5 * c.kda_head_dim + 1) * item
        part("KDA", size, 6 * T * heads * c.kda_head_dim**2, *_measured(step, held, kind, T))
    if c.mla_layers:
        # Each new token with the latents up to its own: absorbed in decoding, else with keys and values made from them.
        heads = len(c.mla_layers) * c.num_attention_heads // ranks
        pairs = rows * tokens if decode else tokens * (tokens + 1) // 2
        width = c.latent_size + c.kv_lora_rank if decode else c.qk_head_dim + c.v_head_dim
        size = rows * tokens * page / PAGE + (not decode) * 2 * T * heads * width * item
        part("MLA", size, 2 * pairs * heads * width)
    if c.attn_res_block_size and not decode:  # the few rows of a decode step stay in the cache
        sources = sum(c.depth_sources(layer, site) for layer in range(c.num_hidden_layers) for site in ("attn", "mlp"))
        part("depth mixing", T * sources * c.hidden_size * item, 4 * T * sources * c.hidden_size)
    part("sampling", rows * sampling, 0)
    if ranks > 1:
        found.append(_collectives(c, gpu, ranks, T * item))
    return tuple(found)


def _collectives(c: K3Config, gpu: GPU, ranks: int, item: int) -> Part:
    """The sums over ranks: of the embedding, and of each layer's attention and feed-forward; routed and shared experts together.

    item: bytes of one channel, all tokens. In a host a GPU sends all but its own share, twice: to add, and to tell the sums.
    Between hosts the same is done with its share.
    """
    moe, calls = len(c.moe_layers), 1 + 2 * c.num_hidden_layers
    size = item * ((calls - moe * (not c.num_shared_experts)) * c.hidden_size + moe * c.expert_width)
    inside, hosts = min(ranks, gpu.joined), -(-ranks // gpu.joined)
    sent, beyond = 2 * size * (1 - 1 / inside), 2 * size / inside * (1 - 1 / hosts)
    bound = calls * min(hosts, 2) * LATENCY + sent / gpu.link + beyond / gpu.network
    return Part("collectives", size, 0, bound)


def _measured(step: Step, held: Held, kind: str, size: int) -> tuple[float | None, str]:
    """Seconds of all KDA layers and the record they are from, if a kernel was measured in just this size."""
    c, (source, figures) = held.config, MEASURED.get((kind, step), ("", {}))
    one = figures.get((c.kda_num_heads // (held.ep * held.tp), size))
    alike = (c.kda_head_dim, c.short_conv_kernel_size, c.gate_lower_bound, held.dtype) == (128, 4, -5.0, "bfloat16")
    return (None, "") if one is None or not alike else (len(c.kda_layers) * one, source)
