"""A model over the ranks of a mesh: the same numbers as on one device, and no more exchanged than must be."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from helpers import on_mesh, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

import k3jax
from k3jax import K3Config, SamplingParams, carry, generate, sharding
from k3jax.batch import single
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.model import K3
from k3jax.ranks import Ranks
from k3jax.sampling import AXES, RowSampling, by_row, sample

GOLDEN = Path(__file__).parent / "golden"
PROMPT = [5, 17, 200, 31, 4, 4, 250, 11, 80] * 8 + [9]
SPLITS = [(2, 2), (4, 1), (8, 8), (8, 4), (8, 1)]  # ranks, and over how many of them whole experts are divided
MARKED = [pytest.param(split, marks=() if split in ((2, 2), (8, 4)) else pytest.mark.slow) for split in SPLITS]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5)
DRAWN = SamplingParams(max_tokens=8, temperature=1, top_p=0.9, top_k=40, seed=3, ignore_eos=True, logprobs=5)
EDITED = SamplingParams(max_tokens=8, seed=5, repetition_penalty=1.3, min_p=0.02, min_tokens=8, logit_bias={7: 3.0})


def mesh(tp, ep=None):
    return k3jax.make_mesh(tp=tp, ep=ep)


@pytest.fixture(scope="module", params=MARKED, ids=lambda split: f"tp{split[0]}-ep{split[1]}")
def divided(request, pair):
    with on_mesh(pair, mesh(*request.param)) as lm:
        yield lm


# -- the same numbers -----------------------------------------------------------------------------------------------


def same_trace(lm, one, logits, states=1e-4):
    """Logits within `logits`, states within `states` relative, the same experts, and all else that can be seen as close."""
    assert np.abs(lm.logits(PROMPT) - one.logits(PROMPT)).max() <= logits
    found, wanted = lm.trace(PROMPT, "*"), one.trace(PROMPT, "*")
    assert found.keys() == wanted.keys()
    for site, want in wanted.items():
        if site.startswith("router_ids") or want.dtype.kind == "i":
            np.testing.assert_array_equal(found[site], want, err_msg=site)
        else:
            assert relative_error(found[site], want) <= states, site


def test_one_pass_is_the_same(divided, pair):
    same_trace(divided, pair, logits=1e-4)


def same_tokens(lm, one):
    prompts = [PROMPT[:20], PROMPT[:7], PROMPT[3:9]]
    for found, want in zip(*(model.generate(prompts, [GREEDY, DRAWN, EDITED]) for model in (lm, one)), strict=True):
        assert (found.token_ids, found.text, found.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        if want.logprobs:
            np.testing.assert_allclose(found.logprobs.tokens, want.logprobs.tokens, atol=1e-4)
            assert [[*top] for top in found.logprobs.top] == [[*top] for top in want.logprobs.top]


def test_tokens_are_the_same(divided, pair):
    same_tokens(divided, pair)


def test_scores_are_the_same(divided, pair):
    found, want = (lm.score([PROMPT], window=32, stride=16)[0].logprobs for lm in (divided, pair))
    np.testing.assert_allclose(found, want, atol=1e-4)


@pytest.mark.parametrize("tp, ep", [(4, 4), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_kimi_linear_is_the_same(tp, ep):
    """No latent, no depth mixture, an unbounded gate: logits within 1e-4."""
    options = dict(dtype="float32")
    with k3jax.load(GOLDEN / "kimi_linear_a", **options) as one:
        with k3jax.load(GOLDEN / "kimi_linear_a", **options, mesh=mesh(tp, ep)) as lm:
            same_trace(lm, one, logits=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tp, ep", SPLITS)
@pytest.mark.parametrize("dtype, experts", [("float32", "decoded"), ("float32", "packed")])
def test_the_whole_model_is_the_same(tp, ep, dtype, experts):
    options = dict(dtype=dtype, experts=experts)
    with k3jax.load(TINY, **options) as one, k3jax.load(TINY, **options, mesh=mesh(tp, ep)) as lm:
        same_trace(lm, one, logits=1e-3)
        same_tokens(lm, one)


# -- sampling over a divided vocabulary --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_divided_vocabulary_gives_the_same_tokens(data):
    """Logits on a coarse grid, so that equal ones lie on both sides of every border."""
    rows, vocabulary = 4, 64
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = np.round(rng.normal(size=(rows, vocabulary)) * data.draw(st.sampled_from((0.5, 2, 8)))).astype(np.float32)
    draw = data.draw
    params = [
        SamplingParams(
            temperature=draw(st.sampled_from((0, 0.5, 1, 3))),
            top_k=draw(st.sampled_from((0, 1, 2, 7, 63, 64, 1000))),
            top_p=draw(st.sampled_from((1, 0.999, 0.9, 0.5, 0.1, 1e-6))),
            min_p=draw(st.sampled_from((0, 0.01, 0.3, 1))),
            logprobs=0,
            logprobs_mode=draw(st.sampled_from(("raw", "processed"))),
            seed=draw(st.integers(0, 9)),
            presence_penalty=draw(st.sampled_from((0, 1))),
            min_tokens=draw(st.sampled_from((0, 5))),
            logit_bias=draw(st.sampled_from(({}, {3: -np.inf, 60: 2.0}))),
        )
        for _ in range(rows)
    ]
    counts = rng.integers(0, 2, (rows, vocabulary)).astype(np.int32)
    allowed = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32) if draw(st.booleans()) else None
    sampling = by_row(params, [[1]] * rows, (2, 40), rows, vocabulary)
    arguments = logits, np.arange(rows, dtype=np.int32), counts, sampling, allowed
    one, many = ONE(*arguments), MANY(*arguments)
    np.testing.assert_array_equal(many.token, one.token)
    finite = np.isfinite(one.top_logprobs)  # of alternatives that nobody may have the order says nothing
    np.testing.assert_array_equal(np.where(finite, many.top_ids, 0), np.where(finite, one.top_ids, 0))
    np.testing.assert_allclose(many.top_logprobs, one.top_logprobs, atol=1e-5)
    np.testing.assert_allclose(many.logprob, one.logprob, atol=1e-5)


def _sampled(logits, positions, counts, sampling, allowed, ranks):
    return sample(logits, positions, counts, sampling, 9, allowed, ranks)


ONE = jax.jit(lambda *arguments: _sampled(*arguments, Ranks()))


@jax.jit
def MANY(*arguments):
    by_token, own = jax.P(None, sharding.RANKS), sharding.specs(AXES)
    specs = (by_token, jax.P(), by_token, RowSampling(*own), jax.P())
    f = lambda *arguments: _sampled(*arguments, Ranks(sharding.RANKS, "ep"))  # noqa: E731
    return sharding.per_rank(f, mesh(8, 4), specs, jax.P())(*arguments)


# -- what is exchanged, and what is held --------------------------------------------------------------------------------


def lowered(config, tp, ep, tokens=16, rows=4, packed=False, prompt=False):
    """The text of a step of the engine that decodes, or that reads a prompt, with abstract arrays."""
    m = mesh(tp, ep)
    model = jax.eval_shape(K3.absorb, K3.abstract(config, dtype="bfloat16", packed=packed))
    state = jax.eval_shape(lambda: generate.empty(model, slots=rows, pages=8))

    def on(tree, specs):
        where = jax.tree.map(lambda spec: jax.NamedSharding(m, spec), specs)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, where)

    model, state = on(model, sharding.of_model(model)), on(state, sharding.specs(generate.axes(state)))
    ctx = Context(Kernels.auto(config), mesh=m)
    if prompt:
        batch = jax.eval_shape(
            lambda: single(jnp.zeros(tokens, jnp.int32), tokens, 4)._replace(logits_indices=jnp.zeros(1, jnp.int32))
        )
        return _jitted(generate.step).lower(model, state, batch, jax.ShapeDtypeStruct((1,), bool), ctx)
    table = jax.ShapeDtypeStruct((rows, 2), jnp.int32)
    slots, steps = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return _jitted(generate.decode).lower(model, state, slots, table, steps, ctx)


def _jitted(program):
    """With arguments that it does not use, since they take memory like the others."""
    options = dict(static_argnames=("ctx", "sampling"), donate_argnames="state", keep_unused=True)
    return jax.jit(program.__wrapped__, **options)


def collectives(text, *, large):
    """How many of each kind; `large`: of those alone that move an array of that width (the hidden state's or the latent's)."""
    found = Counter()
    pattern = r'"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)"'
    for match in re.finditer(pattern, text):
        shape = re.search(r"-> \(?tensor<([^>]+)>", text[match.start() :]).group(1)
        if [int(n) for n in re.findall(r"(\d+)x", shape)][-1:] in [[width] for width in large]:
            found[match.group(1)] += 1
    return found


@pytest.mark.parametrize("prompt", [False, True])
def test_collectives_of_a_layer(prompt):
    """One sum after attention, one after a dense MLP, two of a latent mixture; one of the embedding; nothing is gathered."""
    config = K3Config.tiny()
    text = lowered(config, 8, 8, prompt=prompt).as_text()
    dense = config.num_hidden_layers - len(config.moe_layers)
    sums = 1 + config.num_hidden_layers + dense + 2 * len(config.moe_layers)
    assert collectives(text, large={config.hidden_size, config.routed_expert_hidden_size}) == {"all_reduce": sums}
    gathered = re.findall(r'"stablehlo\.all_gather".*?-> tensor<([\dx]+)x\w+>', text, re.S)
    assert gathered and all(int(np.prod([int(n) for n in shape.split("x")])) <= 8 * 4 * 20 for shape in gathered)


@pytest.mark.parametrize("prompt", [False, True])
def test_a_rank_is_given_its_share_and_keeps_its_memory(prompt):
    """Arguments of a compiled step are the ledger's bytes; pools are updated where they are."""
    config = dataclasses.replace(K3Config.tiny(), num_hidden_layers=4, kda_layers=(0, 1, 3))
    memory = lowered(config, 8, 4, packed=True, prompt=prompt).compile().memory_analysis()
    model = jax.eval_shape(K3.absorb, K3.abstract(config, packed=True))
    state = jax.eval_shape(lambda: generate.empty(model, slots=4, pages=8))
    of_model = sharding.rank_bytes(model, sharding.named(model), 4, 2)
    of_state = sharding.rank_bytes(state, generate.axes(state), 4, 2)
    assert memory.alias_size_in_bytes == of_state
    assert of_model + of_state <= memory.argument_size_in_bytes <= of_model + of_state + 2000  # the batch


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tp=0), "tp=0: allowed are 1 to 8"),
        (dict(tp=9), "tp=9: allowed are 1 to 8"),
        (dict(data=3, tp=4), "tp=4: allowed are 1 to 2"),
        (dict(data=9), "data=9: allowed are 1 to 8"),
        (dict(data=True), "data=True"),
        (dict(tp=8, ep=3), "ep=3: allowed are divisors of tp=8"),
        (dict(tp="8"), "tp='8'"),
    ],
)
def test_meshes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        k3jax.make_mesh(**options)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(kda_num_heads=6), "tp=4: allowed are divisors of kda_num_heads=6"),
        (dict(num_attention_heads=6), "tp=4: allowed are divisors of num_attention_heads=6"),
        (dict(vocab_size=2046), "tp=4: allowed are divisors of vocab_size=2046"),
        (dict(num_experts=17), "ep=2: allowed are divisors of num_experts=17"),
        (dict(intermediate_size=513), "tp=4: allowed are divisors of intermediate_size=513"),
        (dict(moe_intermediate_size=96), "tp / ep=2: allowed are divisors of 3"),
    ],
)
def test_sizes_that_ranks_cannot_share(changes, message):
    """By name, before anything is read."""
    config = dataclasses.replace(K3Config.tiny(), **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        sharding.check(config, mesh(4, 2), packed=True)


def test_a_directory_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr("k3jax.io.hf.load", None)
    with pytest.raises(ValueError, match=r"tp=8: allowed are divisors of kda_num_heads=4"):
        k3jax.load(GOLDEN / "kimi_linear_a", mesh=mesh(8))
    with pytest.raises(ValueError, match="mesh=.*allowed is one of k3jax.make_mesh"):
        k3jax.load(TINY, mesh=jax.make_mesh((8,), ("x",)))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_of_a_rank(tp):
    """Each rank's channels are those of its own heads, in q, k and v alike: three segments, not one slice (B89)."""
    config = K3Config.tiny()
    state = jax.eval_shape(lambda: carry.empty(config, slots=2, pages=1))
    for leaf, axes in zip(state.kda[0], carry.axes(state).kda[0], strict=True):
        assert sharding.share(leaf.shape, (*axes, *(None,) * (leaf.ndim - len(axes))), tp, 1)[
            -2 if leaf.ndim == 4 else 1
        ] in (
            config.kda_num_heads // tp,
            32,
        )
