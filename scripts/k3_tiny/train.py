"""Train k3-tiny on the King James text with the package's XLA path and AdamW.

    python scripts/k3_tiny/train.py TEXT_DIR TOKENIZER_DIR OUT_DIR [--steps 2000 ...]

TEXT_DIR holds train.txt and heldout.txt (corpus.py), TOKENIZER_DIR the rank file (bpe.py). Writes OUT_DIR/params_*.npz (the
averaged weights under their released names; export.py makes a checkpoint of them) and OUT_DIR/log.json. With --validate
the last 150,000 bytes of the training text are kept out and judged instead of the held-out text, which then serves once,
for the final run.

The text is small, so most of this is about not learning it by heart: segmentations are drawn anew (BPE-dropout), weights
are dropped at random, decayed and averaged.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import bpe
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from k3jax.batch import single
from k3jax.config import K3Config
from k3jax.io.tokenizer import Tokenizer, read_ranks
from k3jax.kernels import Kernels
from k3jax.model import K3, Context, forward
from k3jax.probe import Probe
from k3jax.score import windows

Params = dict[str, jax.Array]  # released names (experts stacked) to float32 arrays
VALIDATION = 150_000  # bytes


def flat(model: K3) -> Params:
    return {".".join(map(str, path)): p.get_value() for path, p in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def rebuilt(abstract: K3, params: Params) -> K3:
    """The module with these parameters; a new object, so that tracing leaves `abstract` alone."""
    graph, state = nnx.split(abstract)
    pairs = [(path, p.replace(params[".".join(map(str, path))])) for path, p in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(pairs))


def is_matrix(name: str, value: jax.Array) -> bool:
    """Weights that are decayed and dropped: not norms, gates' rates and biases, short convolutions or depth queries."""
    return value.ndim >= 2 and "conv1d" not in name and "res_proj" not in name


def in_compute_dtype(params: Params) -> Params:
    """bfloat16, but for what the release stores in float32."""
    kept = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    return {name: value if name.endswith(kept) else value.astype(jnp.bfloat16) for name, value in params.items()}


def logits_of(abstract: K3, params: Params, tokens: jax.Array, probe: Probe) -> tuple[jax.Array, dict[str, jax.Array]]:
    """[B, T] tokens, each row a sequence of its own, to [B, T, N] logits."""
    model = rebuilt(abstract, params)
    ctx = Context(Kernels(moe="dense"), probe=probe)

    def one(row: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        out = forward(model, single(row, row.shape[0]), None, ctx)
        return out.logits, out.taps

    return jax.vmap(one)(tokens)


class Knobs(NamedTuple):
    """What may differ between runs of one compiled step."""

    rate: Any  # learning rate of this step
    decay: Any
    drop: Any
    noise: Any
    average: Any


# Parameters are one vector for the optimiser: hundreds of small updates would cost more to compile than the model.
# The rate and the decay are applied by hand, so that they are arguments of the step.
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98))


def make_step(abstract: K3, config: K3Config, unravel: Callable[[jax.Array], Params]):
    probe = Probe(frozenset(f"router_ids_{layer}" for layer in config.moe_layers))

    def loss_of(vector: jax.Array, tokens: jax.Array, targets: jax.Array):
        logits, taps = logits_of(abstract, in_compute_dtype(unravel(vector)), tokens, probe)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), taps

    def balance(taps: dict[str, jax.Array]) -> Params:
        """Load balance without a loss: the bias of crowded experts falls."""
        steps = {}
        for layer in config.moe_layers:
            load = jnp.bincount(taps[f"router_ids_{layer}"].reshape(-1), length=config.num_experts)
            steps[f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"] = 1e-3 * jnp.sign(
                load.mean() - load
            )
        return steps

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(
        vector: jax.Array,
        mean: jax.Array,
        state: Any,
        matrix: jax.Array,
        tokens: jax.Array,
        key: jax.Array,
        count: jax.Array,
        knobs: Knobs,
    ):
        dropped, noise, where, first = jax.random.split(jax.random.fold_in(key, count), 4)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        random_ids = jax.random.randint(noise, inputs.shape, 0, config.vocab_size - bpe.RESERVED)
        inputs = jnp.where(jax.random.bernoulli(where, knobs.noise, inputs.shape), random_ids, inputs)
        begins = jax.random.bernoulli(first, 0.1, (inputs.shape[0],))  # some sequences begin as texts do
        inputs = inputs.at[:, 0].set(jnp.where(begins, config.bos_token_id, inputs[:, 0]))
        scale = jnp.where(matrix, jax.random.bernoulli(dropped, 1 - knobs.drop, vector.shape) / (1 - knobs.drop), 1)
        (loss, taps), grad = jax.value_and_grad(loss_of, has_aux=True)(vector * scale, inputs, targets)
        update, state = ADAM.update(grad * scale, state)
        vector = vector - knobs.rate * (update + knobs.decay * matrix * vector)
        zeros = jax.tree.map(jnp.zeros_like, unravel(vector))
        vector = vector + jax.flatten_util.ravel_pytree({**zeros, **balance(taps)})[0]
        decay = jnp.minimum(knobs.average, (1 + count) / (10 + count))
        return vector, decay * mean + (1 - decay) * vector, state, loss

    return step


def make_judge(abstract: K3, unravel: Callable[[jax.Array], Params], args: argparse.Namespace):
    """Bits of a text under the model, by windows; a batch of them at a time."""

    @jax.jit
    def bits(vector: jax.Array, inputs: jax.Array, targets: jax.Array, counted: jax.Array) -> jax.Array:
        logits, _ = logits_of(abstract, in_compute_dtype(unravel(vector)), inputs, Probe())
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(jnp.where(counted, nats, 0)) / math.log(2)

    def judge(vector: jax.Array, ids: list[int], bos: int) -> float:
        found, length = windows(ids, bos, args.length, args.length // 2), args.length
        total = 0.0
        for start in range(0, len(found), args.batch):
            group = found[start : start + args.batch]
            inputs, targets = np.zeros((2, args.batch, length), np.int32)
            counted = np.zeros((args.batch, length), bool)
            for i, w in enumerate(group):
                inputs[i, : len(w.inputs)], targets[i, : len(w.targets)] = w.inputs, w.targets
                counted[i, len(w.targets) - w.fresh : len(w.targets)] = True
            total += float(bits(vector, inputs, targets, counted))
        return total

    return judge


def save(params: Params, out: Path) -> None:
    """params_0.npz, ...: released names (experts stacked), bfloat16 as its bits in uint16, at most 12 MiB a file."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, value in params.items():
        array = np.asarray(value)
        array = array.view(np.uint16) if value.dtype == jnp.bfloat16 else array
        if sum(a.nbytes for a in shards[-1].values()) + array.nbytes > 12 << 20:
            shards.append({})
        shards[-1][name] = array
    for i, shard in enumerate(shards):
        np.savez(out / f"params_{i}.npz", **shard)


def _encode(text: str, ranks: dict[bytes, int], p: float, seed: int) -> np.ndarray:
    return np.array(bpe.encode_with_dropout(text, ranks, p, random.Random(seed)), np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "tokenizer", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--drop", type=float, default=0.05, help="share of weights at zero in a step")
    parser.add_argument("--noise", type=float, default=0.02, help="share of input tokens replaced by random ones")
    parser.add_argument("--bpe-dropout", type=float, default=0.1)
    parser.add_argument("--average", type=float, default=0.995, help="decay of the averaged weights")
    parser.add_argument("--segmentations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--every", type=int, default=250, help="steps between judgements")
    args = parser.parse_args()

    train_text, judged_text = (args.text / "train.txt").read_text(), (args.text / "heldout.txt").read_text()
    if args.validate:
        train_text, judged_text = train_text[:-VALIDATION], train_text[-VALIDATION:]
    ranks = read_ranks(args.tokenizer / "tiktoken.model")
    vocab = len(ranks) + bpe.RESERVED
    tokenizer = Tokenizer.from_directory(args.tokenizer, vocab)
    assert tokenizer is not None
    specials = tokenizer.special_ids
    config = K3Config.tiny(
        vocab_size=vocab,
        bos_token_id=specials["[BOS]"],
        eos_token_id=specials["<|end_of_msg|>"],
        pad_token_id=specials["[PAD]"],
    )
    judged_ids = tokenizer.encode(judged_text)
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(_encode, train_text, ranks, args.bpe_dropout if i else 0.0, args.seed + i)
            for i in range(args.segmentations)
        ]
        streams = [job.result() for job in jobs]

    params = flat(K3(config, rngs=nnx.Rngs(args.seed), dtype="float32"))
    abstract = K3.abstract(config, dtype="float32")
    vector, unravel = jax.flatten_util.ravel_pytree(params)
    matrix, _ = jax.flatten_util.ravel_pytree(
        {n: jnp.full(v.shape, is_matrix(n, v), jnp.float32) for n, v in params.items()}
    )
    matrix, mean, state = matrix > 0, jnp.copy(vector), ADAM.init(vector)
    schedule = optax.warmup_cosine_decay_schedule(
        0, args.rate, min(100, args.steps // 10), args.steps, 0.02 * args.rate
    )
    step, judge = make_step(abstract, config, unravel), make_judge(abstract, unravel, args)
    rng, key = np.random.default_rng(args.seed), jax.random.key(args.seed)
    log, losses, began = [], [], time.time()
    for count in range(args.steps):
        stream = streams[rng.integers(len(streams))]
        starts = rng.integers(0, len(stream) - args.length - 1, args.batch)
        tokens = stream[starts[:, None] + np.arange(args.length + 1)]
        knobs = Knobs(float(schedule(count)), args.decay, args.drop, args.noise, args.average)
        vector, mean, state, loss = step(vector, mean, state, matrix, tokens, key, np.int32(count), knobs)
        losses.append(loss)
        if (count + 1) % args.every == 0 or count + 1 == args.steps:
            last = count + 1 == args.steps
            entry = {
                "step": count + 1,
                "train_nats_per_token": round(float(jnp.stack(losses).mean()), 4),
                "seconds": round(time.time() - began, 1),
            }
            if args.validate or last:  # the held-out text is judged once
                entry["bits_per_byte"] = round(
                    judge(mean, judged_ids, config.bos_token_id) / len(judged_text.encode()), 4
                )
            losses = []
            log.append(entry)
            print(json.dumps(entry), flush=True)
    save(in_compute_dtype(unravel(mean)), args.out)
    device = jax.devices()[0].device_kind
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    record = {"settings": settings, "device": device, "jax": jax.__version__, "curve": log}
    (args.out / "log.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
