"""The fast form against data from implementations that others wrote: see tests/golden/README.md."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import carry as carries
from k3jax.batch import Batch, prepare, single
from k3jax.carry import PAGE
from k3jax.layers.block import Depth
from k3jax.model import Context, forward

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/outputs.npz"))
SCALARS = ("detail_prompt", "long_prompt")

# Compiling four programs a case takes most of the time: two cases, one of each family, serve the quick suite.
QUICK = ("k3_mxfp4_wide", "kimi_linear_b")
MARKED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]

PIECE = 64  # pieces of prompts are padded to multiples of this

run = jax.jit(forward, static_argnames="ctx")


class Case:
    """One case: the model in float32, its prompts and what others computed."""

    def __init__(self, name: str, **options) -> None:
        self.name = name
        self.lm = k3jax.load(GOLDEN / name, **options)
        self.outputs = np.load(GOLDEN / name / "outputs.npz")
        inputs = np.load(GOLDEN / name / "inputs.npz")
        self.prompts = [inputs[f"prompt_{i}"].tolist() for i in range(len(inputs.files))]
        self.detail, self.long = (int(self.outputs[key]) for key in SCALARS)


@pytest.fixture(scope="module", params=MARKED)
def case(request):
    return Case(request.param, dtype="float32")


def cuts(length: int, size: int | str) -> list[int]:
    """Where pieces of `size` tokens start; "random": a few places, no two pieces alike."""
    if size == "random":
        return sorted({64, *np.random.default_rng(5).choice(np.arange(1, length), 6, replace=False).tolist()})
    return list(range(size, length, size))


def in_pieces(lm: k3jax.LM, prompt: list[int], cuts: list[int]) -> np.ndarray:
    """Logits of a prompt that enters the carry piece by piece, in slot 1 and in pages that do not follow one another.

    A piece of one token is a decode step of one row.
    """
    pages = -(-len(prompt) // PAGE)
    carry = carries.empty(lm.config, slots=2, pages=2 * pages, dtype=str(lm.model.dtype))
    carry = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, carry)
    table, slots = np.arange(1, 2 * pages, 2, dtype=np.int32)[None, ::-1], np.array([1], np.int32)
    logits, past = [], 0
    for piece in np.split(np.array(prompt, np.int32), cuts):
        size = len(piece)
        tokens = piece if size == 1 else np.pad(piece, (0, -size % PIECE))
        starts, wanted = np.array([0, size], np.int32), np.arange(len(tokens), dtype=np.int32)
        batch = Batch(tokens, starts, np.array([past], np.int32), slots, table, wanted)
        out = run(lm.model, batch, carry, Context(lm.kernels, decode_rows=int(size == 1)))
        logits, carry, past = [*logits, np.asarray(out.logits)[:size]], out.carry, past + size
    return np.concatenate(logits)


@pytest.fixture(scope="module")
def packed(case):
    """All prompts of a case in one packed batch, each with its own slot and pages, in one pass."""
    lengths = [len(prompt) for prompt in case.prompts]
    rows, pages = len(lengths), -(-max(lengths) // PAGE)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    tokens = np.concatenate(case.prompts).astype(np.int32)
    table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    batch = Batch(
        tokens,
        ends,
        np.zeros(rows, np.int32),
        np.arange(rows, dtype=np.int32),
        table,
        np.arange(len(tokens), dtype=np.int32),
    )
    carry = carries.empty(case.lm.config, slots=rows, pages=rows * pages, dtype="float32")
    out = run(case.lm.model, batch, carry, Context(case.lm.kernels))
    return np.split(np.asarray(out.logits), ends[1:-1]), out.carry


def logit_bound(name: str) -> float:
    return 3e-4 if name.startswith("kimi_linear") else 2e-3


def test_logits(case, packed):
    for i, logits in enumerate(packed[0]):
        assert np.abs(logits - case.outputs[f"logits_{i}"]).max() <= logit_bound(case.name), f"prompt {i}"


def test_long_states(case, packed):
    """The carry after the longest prompt, whose state has passed through several chunks."""
    config, carry = case.lm.config, packed[1]
    for index, layer in enumerate(config.kda_layers):
        S = np.asarray(carries.state_HKV(carry.kda[index].S[case.long]))
        assert_close(S, case.outputs[f"long_kda_state_{layer}"])
        q, k, v = np.split(np.asarray(carry.kda[index].conv[case.long]), 3, axis=-1)
        for stream, history in dict(q=q, k=k, v=v).items():
            wanted = case.outputs[f"long_kda_conv_{stream}_{layer}"][
                1:
            ]  # the oldest of the W inputs is no longer needed
            assert_close(history.reshape(wanted.shape), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 16, 64, "random"])
def test_any_split_of_a_prompt_is_one_shot(case, packed, size):
    """The longest prompt in pieces, into memory that holds NaN; pieces of one token take the decode path."""
    prompt, bound = case.prompts[case.long], 3e-5 if case.name.startswith("kimi_linear") else 5e-4
    logits = in_pieces(case.lm, prompt, cuts(len(prompt), size))
    assert np.abs(logits - packed[0][case.long]).max() <= bound


def test_greedy(case):
    sampling = k3jax.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for i, completion in enumerate(case.lm.generate(case.prompts, sampling)):
        assert completion.token_ids == case.outputs[f"greedy_{i}"].tolist(), f"prompt {i}"
        assert completion.finish_reason == "length" and completion.error is None


def test_trace(case):
    """Every activation that the data hold, by the names, shapes and axis order of the data."""
    names = [n for n in case.outputs.files if not n.startswith(("logits_", "greedy_", "long_")) and n not in SCALARS]
    traced = case.lm.trace(case.prompts[case.detail], names)
    assert set(traced) == set(names)
    for name in names:
        if name.startswith("router_ids"):
            np.testing.assert_array_equal(traced[name], case.outputs[name], name)
        else:
            assert_close(traced[name], case.outputs[name], name)


def assert_close(found: np.ndarray, wanted: np.ndarray, name: str = "") -> None:
    assert found.shape == wanted.shape, name
    assert np.abs(found - wanted).max() <= 1e-3 * max(1, np.abs(wanted).max()), name


@pytest.mark.parametrize("name", MARKED)
def test_each_layer_in_bfloat16(name):
    """bfloat16 as released, with the data's experts: what each layer makes of the data's own inputs is within 2e-2.

    A layer at a time, because the whole of these random models multiplies any rounding: float32's 1e-7 to 4e-4 on logits.
    """
    case = Case(name, dtype="bfloat16")
    config, outputs = case.lm.config, case.outputs
    tokens = np.array(case.prompts[case.detail], np.int32)
    hidden = [outputs["embed"], *outputs["hidden"]]  # hidden[layer] enters the layer
    starts = [layer for layer in range(config.num_hidden_layers) if config.starts_block(layer)]

    @jax.jit
    def layers(model, hidden):
        step = prepare(single(tokens, len(tokens)), 0, PAGE, config.short_conv_kernel_size)
        made = []
        for layer, block in enumerate(model.model.layers):
            stored = tuple(hidden[start] for start in starts if start < layer)
            ids = outputs[f"router_ids_{layer}"] if config.is_moe(layer) else None
            depth, _ = block(
                Depth(hidden[layer], stored), None, step, Context(case.lm.kernels), lambda site, value: value, ids
            )
            made.append(depth.running)
        return made

    made = layers(case.lm.model, [jnp.asarray(h, jnp.bfloat16) for h in hidden])
    for layer, (found, wanted) in enumerate(zip(made, hidden[1:], strict=True)):
        error = np.linalg.norm(np.asarray(found, np.float32) - wanted) / np.linalg.norm(wanted)
        assert error <= 2e-2, f"layer {layer}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 16, 64, "random"])
def test_any_split_of_real_text_is_one_shot(size):
    """On k3-tiny, in float32."""
    with k3jax.load(GOLDEN.parents[1] / "checkpoints" / "k3-tiny", dtype="float32") as lm:
        prompt = lm.encode("And the LORD God formed man of the dust of the ground, and breathed " * 8)[:127]
        assert np.abs(in_pieces(lm, prompt, cuts(len(prompt), size)) - lm.logits(prompt)).max() <= 1e-4
