"""The ledger: published figures of the full model, its rule for ranks, and every array where the code really makes it."""

import collections
import dataclasses
import gc
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import K3_FIELDS, small

from k3jax import carry as carries
from k3jax.batch import Batch
from k3jax.carry import PAGE
from k3jax.config import K3Config
from k3jax.kernels import Kernels
from k3jax.ledger import ledger
from k3jax.model import K3, Context, forward

MIB = 2**20


@pytest.fixture(scope="module", params=[1, 8])
def full(request):
    """K3 on one rank and on one of eight; no array is made."""
    gc.collect()
    arrays = len(jax.live_arrays())
    made = ledger(K3Config.k3(), tp=request.param, tokens=4, packed=True)
    assert len(jax.live_arrays()) <= arrays  # the garbage of others may go meanwhile
    return made


def named(entries, *words):
    """The entries whose `what` or `where` holds all these words."""
    return [entry for entry in entries if all(word in f"{entry.what} {entry.where}" for word in words)]


def test_what_one_request_keeps(full):
    tp, heads = full.tp, 96 // full.tp
    [S], [conv], [latents] = (named(full.of("persists"), name) for name in ("[].S", "[].conv", "latents"))
    assert (S.copies, S.shape, S.dtype, S.logical) == (69, (heads, 128, 128), "float32", ())
    assert (conv.copies, conv.shape, conv.dtype) == (69, (3, heads, 384), "bfloat16")
    assert conv.logical == (36864 // tp, 3)
    assert S.bytes + conv.bytes == 69 * (96 * 128 * 128 * 4 + 3 * 36864 * 2) // tp
    assert round((S.bytes + conv.bytes) / MIB, 2) == {1: 428.55, 8: 53.57}[tp]
    assert (latents.copies, latents.shape, latents.dtype) == (24, (1, PAGE, 576), "bfloat16")  # whole on every rank
    assert latents.logical == (4, 576) and latents.bytes == 27_648 * PAGE
    [tokens], [length] = (named(full.of("persists"), name) for name in ("token list", "length"))
    assert tokens.shape == (5,) and length.bytes == 4


def test_what_the_model_holds(full):
    tp = full.tp
    # 2.78 T; the count of the released tensors, which pad A_log of 69 layers from 96 to 128 entries.
    assert full.parameters == 2_779_484_478_208 - 69 * 32
    experts = named(full.of("resident"), "MoE.experts.")
    assert sum(entry.bytes for entry in experts) == 17_547_264 * 92 * 896 // tp
    assert sum(entry.bytes for entry in experts) * 8 * tp == 4.25 * 3 * 3072 * 3584 * 92 * 896  # bits a weight
    shapes = {entry.where: (entry.copies, entry.shape) for entry in full.of("resident")}
    assert shapes["MLA.W_UK_T"] == (24, (96 // tp, 128, 512)) and shapes["MLA.W_UV"] == (24, (96 // tp, 512, 128))
    assert shapes["MoE.experts.w{1,3}.weight_packed"] == (184, (896 // tp, 3072, 1792))
    assert shapes["K3.lm_head"] == (1, (163840 // tp, 7168))
    assert shapes["MLA.kv_a_proj_with_mqa"] == (24, (576, 7168))
    assert shapes["Block.{mlp,self_attention}_res_proj"] == (186, (1, 7168))


def test_what_a_pass_makes(full):
    heads = 96 // full.tp
    for step, T in (("prefill", 4), ("decode", 1)):
        made = {entry.what: entry for entry in full.of("transient", step)}
        assert made["depth sources"].copies == 9 and made["depth sources"].shape == (T, 7168)
        assert made["router scores"].shape == (T, 896) and made["chosen experts"].shape == (T, 16)
        assert made["MLA q"].shape == (T, heads, 192) and made["KDA q, k, v"].shape == (T, 12288 // full.tp)
        assert made["sum over experts"].shape == (T, 3584) and made["expert activations"].shape[-1] == 3072
        assert made["logits"].shape == (1, 163840 // full.tp)
        assert ("MLA k" in made) == ("MLA v" in made) == (step == "prefill")  # decoding makes neither of the past
    assert {entry.what: entry.shape for entry in full.of("transient", "decode")}["MLA absorbed q"] == (1, heads, 576)


def test_what_persists_is_what_a_carry_allocates():
    """Of the small model, truly allocated; the host's two entries are beside it."""
    config, tokens = K3Config.tiny(), PAGE + 1
    carry = carries.empty(config, slots=1, pages=2)
    kept = [entry for entry in ledger(config, tokens=tokens).of("persists") if "host" not in entry.where]
    assert sum(entry.bytes for entry in kept) == sum(array.nbytes for array in jax.tree.leaves(carry))
    wanted = collections.Counter((a.size, str(a.dtype)) for a in jax.tree.leaves(carry))
    assert {(math.prod(e.shape), e.dtype): e.copies for e in kept} == wanted


def intermediates(jaxpr):
    """Shape and dtype of every array that a program makes, its inner programs included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape, str(variable.aval.dtype)
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from intermediates(inner)


MODELS = {
    "dense experts": small(**K3_FIELDS),
    "grouped experts": small(**K3_FIELDS | dict(num_experts=37, num_experts_per_token=5)),
    "mla alone, no depth mixing": small(kda_layers=(), num_experts=37),
    "kda alone, no experts": small(kda_layers=(0, 1, 2, 3), first_k_dense_replace=9),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_pass_makes_is_in_the_program(name):
    """Sizes are all different, so that an array of the wrong shape is not found by chance."""
    config, tokens, pages = MODELS[name], 2 * PAGE + 11, 3
    made = ledger(config, tokens=tokens)
    model = jax.eval_shape(K3.absorb, K3.abstract(config))
    carry = jax.eval_shape(lambda: carries.empty(config, slots=1, pages=pages))
    for step, T in (("prefill", tokens), ("decode", 1)):
        shapes = (T,), (2,), (1,), (1,), (1, pages), (1,)
        batch = Batch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
        ctx = Context(Kernels.auto(config), decode_rows=int(step == "decode"))
        program = jax.make_jaxpr(lambda *args, ctx=ctx: forward(*args, ctx))(model, batch, carry)
        there = set(intermediates(program.jaxpr))
        assert len(made.of("transient", step)) > 5
        for entry in made.of("transient", step):
            assert (entry.shape, entry.dtype) in there, entry


def test_a_rank_holds_the_parameters_of_a_model_with_its_share():
    """Half the heads, experts, MLP channels and vocabulary, made as a model of its own."""
    config = K3Config.tiny(num_shared_experts=2)
    half = dataclasses.replace(
        config, kda_num_heads=4, num_attention_heads=4, num_experts=8, num_shared_experts=1, intermediate_size=256,
        vocab_size=1024,
    )  # fmt: skip
    held = collections.Counter()
    for entry in ledger(config, tp=2, tokens=1, packed=True).of("resident"):
        held[entry.shape, entry.dtype] += entry.copies
    model = jax.eval_shape(K3.absorb, K3.abstract(half, packed=True))
    half_held = collections.Counter((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(nnx.state(model)))
    moe = len(config.moe_layers)
    for experts, copies in ((8, -moe), (16, moe)):  # every rank has the whole router
        half_held[(experts, 128), "bfloat16"] += copies
        half_held[(experts,), "float32"] += copies
    assert held == +half_held


def test_a_prompt_longer_than_one_prefill_comes_in_pieces():
    made = {entry.what: entry for entry in ledger(K3Config.tiny(), tokens=3000).of("transient", "prefill")}
    assert made["hidden state"].shape == (2048, 128) and made["MLA scores"].shape == (256, 8, 2048)


def test_the_table_is_plain_text():
    made = ledger(K3Config.tiny(), tp=2, tokens=70, packed=True)
    for width in (120, 160):
        lines = made.table(width).splitlines()
        assert all(len(line) <= width and line.isprintable() and line == line.rstrip() for line in lines)
    for entry in made.entries:
        assert any(all(cell in line for cell in (entry.what, entry.where, f" {entry.bytes:,} ")) for line in lines)
    for total in (made.bytes("persists"), made.bytes("resident")):
        assert f"{total:,} bytes (" in made.table()
    assert "[3, 4, 96] for [384, 3]" in made.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tp=7), "tp=7: allowed are divisors of kda_num_heads=8"),
        (dict(tp=16), "tp=16: allowed are divisors of kda_num_heads=8"),
        (dict(tp=0), "tp=0"),
        (dict(tp=True), "tp=True"),
        (dict(tp=2.0), "tp=2.0"),
        (dict(tokens=0), "tokens=0: allowed are 1 to 4096"),
        (dict(tokens=4097), "tokens=4097"),
        (dict(tokens="4"), "tokens='4'"),
        (dict(dtype="float16"), "dtype='float16'"),
        (dict(packed=1), "packed=1"),
        (
            dict(config=K3Config.tiny(num_attention_heads=6), tp=4),
            "tp=4: allowed are divisors of num_attention_heads=6",
        ),
        (dict(config=K3Config.tiny(num_experts=18), tp=4), "ep=4: allowed are divisors of num_experts=18"),
        (dict(config=K3Config.tiny(intermediate_size=6), tp=4), "tp=4: allowed are divisors of intermediate_size=6"),
        (dict(config=K3Config.tiny(vocab_size=2050), tp=4), "tp=4: allowed are divisors of vocab_size=2050"),
        (
            dict(config=K3Config.tiny(moe_intermediate_size=6), tp=4),
            "tp=4: allowed are divisors of num_shared_experts \\* moe_intermediate_size=6",
        ),
        (dict(config=K3Config.tiny(moe_intermediate_size=48), packed=True), "packed=True: allowed is False"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        ledger(**dict(config=K3Config.tiny(), tokens=4) | options)


def test_transient_arrays_have_no_sum():
    with pytest.raises(ValueError, match="lifetime='transient': allowed are 'persists' and 'resident'"):
        ledger(K3Config.tiny(), tokens=4).bytes("transient")


def test_a_kind_that_is_not_there_splits_freely():
    """Seven ranks of a model without heads of KDA: their number, of no use, does not count."""
    config = small(kda_layers=(), num_attention_heads=7, vocab_size=49, intermediate_size=7, num_experts=14,
                   moe_intermediate_size=7)  # fmt: skip
    assert not named(ledger(config, tp=7, tokens=4).entries, "KDA")
