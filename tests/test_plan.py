"""The plan: the released inventory to the byte, the arrays' own bytes on any split, laws of what fits and of time, the command."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from k3jax import carry as carries
from k3jax import cli, generate, sharding
from k3jax.batch import Batch
from k3jax.carry import PAGE
from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.model import K3, forward
from k3jax.plan import GPUS, RELEASED, SHARE, WORKSPACE, command, plan
from k3jax.plan.times import MEASURED

K3_, KIMI, TINY = K3Config.k3(), K3Config.kimi_linear_48b(), K3Config.tiny()
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results"

# The released K3: component, how many, shape, bytes of a number, and the axis that ranks divide.
INVENTORY = [
    # in all 93 layers
    ("dense + norms", 93 * 4, (7168,), 2, None),  # two norms, two gains of depth scores
    ("dense + norms", 93 * 2, (1, 7168), 2, None),
    ("attention", 93, (12288, 7168), 2, 0),  # g_proj
    ("attention", 93, (7168, 12288), 2, 1),  # o_proj
    # in 69 KDA layers
    ("attention", 69 * 3, (12288, 7168), 2, 0),  # q, k, v
    ("attention", 69, (96, 7168), 2, 0),  # b
    ("attention", 69, (128, 7168), 2, None),  # f_a
    ("attention", 69, (12288, 128), 2, 0),  # f_b
    ("attention", 69 * 3, (12288, 1, 4), 4, 0),  # taps
    ("attention", 69, (96,), 4, 0),  # A_log: 128 are stored, 96 of them used and held
    ("attention", 69, (12288,), 4, 0),  # dt_bias
    ("attention", 69, (128,), 4, None),  # o_norm
    # in 24 MLA layers
    ("attention", 24, (1536, 7168), 2, None),  # q_a
    ("attention", 24, (1536,), 2, None),
    ("attention", 24, (18432, 1536), 2, 0),  # q_b
    ("attention", 24, (576, 7168), 2, None),  # kv_a
    ("attention", 24, (512,), 2, None),
    ("attention", 24, (24576, 512), 2, 0),  # kv_b
    ("absorbed", 24, (24576, 512), 2, 0),  # the same, made at load
    # in layer 0
    ("dense + norms", 2, (33792, 7168), 2, 0),
    ("dense + norms", 1, (7168, 33792), 2, 1),
    # in 92 mixtures
    ("router", 92, (896, 7168), 2, None),
    ("router", 92, (896,), 4, None),
    ("latent projections", 92, (3584, 7168), 2, None),
    ("latent projections", 92, (7168, 3584), 2, None),
    ("latent projections", 92, (3584,), 2, None),
    ("shared experts", 92 * 2, (6144, 7168), 2, 0),
    ("shared experts", 92, (7168, 6144), 2, 1),
    ("experts", 92 * 2, (896, 3072, 1792), 1, 0),
    ("experts", 92 * 2, (896, 3072, 112), 1, 0),
    ("experts", 92, (896, 3584, 1536), 1, 0),
    ("experts", 92, (896, 3584, 96), 1, 0),
    # of the whole model
    ("embed + head", 2, (163840, 7168), 2, 0),
    ("embed + head", 3, (7168,), 2, None),
]
# GB a GPU, as published figures of the release give them.
GB = {
    8: dict(zip((*RELEASED, "total"), (180.81, 9.80, 9.45, 3.04, 1.18, 0.59, 0.19, 205.06), strict=True)),
    16: dict(zip((*RELEASED, "total"), (90.40, 5.33, 9.45, 1.52, 1.18, 0.29, 0.10, 108.28), strict=True)),
}


def parts(found, step):
    return {part.name: part for part in getattr(found, step)}


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 8, 16, 32])
def test_weights_are_those_of_the_release(ranks):
    found = plan(K3_, "h200", ranks)
    want = dict.fromkeys((*RELEASED, "absorbed"), 0)
    for component, copies, shape, size, axis in INVENTORY:
        assert axis is None or shape[axis] % ranks == 0
        want[component] += copies * math.prod(shape) * size // (1 if axis is None else ranks)
    assert found.weights == want
    assert found.total == sum(want[name] for name in RELEASED) and found.arguments(0, 0) == sum(want.values())
    if ranks in GB:
        assert {name: round(size / 1e9, 2) for name, size in (found.weights | {"total": found.total}).items()} == {
            **GB[ranks],
            "absorbed": {8: 0.08, 16: 0.04}[ranks],
        }


def test_released_totals():
    found = plan(K3_, "h200", 1)
    padded = 69 * 32 * 4  # entries of A_log that are stored and not held
    assert round((found.total + padded) / 1e9, 2) == 1559.97 and round(found.weights["experts"] / 1e9, 2) == 1446.46
    assert found.weights["experts"] == 92 * 896 * 17_547_264
    gb = {layers: round(plan(K3_.slice(layers), "h200", 1).total / 1e9, 1) for layers in (2, 4, 8, 13)}
    assert gb == {2: 24.0, 4: 57.6, 8: 125.1, 13: 209.6}
    gb = {layers: round(plan(K3_.slice(layers), "h200", 8).total / 1e9, 1) for layers in (56, 57, 61)}
    assert gb == {56: 123.0, 57: 125.2, 61: 134.1}


@functools.cache
def variables(config, packed, dtype):
    model = jax.eval_shape(K3.absorb, K3.abstract(config, dtype=dtype, packed=packed))
    return jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, nnx.Variable))


@pytest.mark.parametrize(
    ("config", "packed", "dtype"), [(K3_, True, "bfloat16"), (KIMI, False, "bfloat16"), (TINY, False, "float32")]
)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (8, 8), (8, 4), (8, 1), (2, 2)])
def test_weights_are_the_shards_of_a_mesh(config, packed, dtype, tp, ep):
    """As jax cuts the arrays, not as the plan does."""
    mesh, held = sharding.make_mesh(tp=tp, ep=ep), 0
    for variable in variables(config, packed, dtype):
        shard = NamedSharding(mesh, sharding.spec(variable.axes)).shard_shape(variable.shape)
        held += math.prod(shard) * variable.dtype.itemsize
    assert plan(config, "b300", tp, ep=ep, packed=packed, dtype=dtype, tokens=9).arguments(0, 0) == held


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 2)])
def test_arguments_are_the_arrays_of_a_step(tp, ep):
    """Parameters and pools as they lie on the first device."""
    mesh, slots, pages = sharding.make_mesh(tp=tp, ep=ep), 5, 7
    shapes = jax.eval_shape(K3.absorb, K3.abstract(TINY))
    model = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    state = generate.rows([], [], [], (), slots, TINY.vocab_size)._replace(
        carry=carries.empty(TINY, slots=slots, pages=pages)
    )
    placed = (
        sharding.placed(model, mesh, sharding.of_model(model)),
        sharding.placed(state, mesh, sharding.specs(generate.axes(state))),
    )
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    found = plan(TINY, "h200", tp, ep=ep, packed=False, tokens=9)
    assert found.arguments(slots, pages) == held
    assert found.arguments(slots + 1, pages + 1) - held == found.slot_bytes + found.page_bytes


def test_what_a_request_takes():
    for ranks in (1, 8):
        found = plan(K3_, "h200", ranks)
        assert found.state_bytes == 69 * (96 * 128 * 128 * 4 + 3 * 36864 * 2) // ranks + 4
        assert found.page_bytes == 27_648 * PAGE  # whole on every rank
    assert plan(KIMI, packed=False).page_bytes == 7 * 576 * 2 * PAGE


# -- what fits -------------------------------------------------------------------------------------------------------


def test_where_k3_fits():
    eight, sixteen, b300 = plan(K3_), plan(K3_, count=16), plan(K3_, "b300")
    assert not eight.fits and sixteen.fits and b300.fits and plan(K3_, "gb300").fits
    assert not plan(K3_, "b200").fits and plan(K3_, "b200", 16).fits and not plan(K3_, "h100", 16).fits
    assert not plan(K3_, memory=GPUS["h200"].memory, workspace=0).fits  # not even with all of its memory
    assert eight.smallest == sixteen.smallest == 16 and b300.smallest == 8 and plan(K3_, "h100").smallest == 32
    assert eight.others == ("b300", "gb300") and sixteen.others == ("b200", "b300", "gb300")
    assert plan(K3_, workspace=65 * 10**9).others == ("gb300",)  # the workspace is theirs too
    assert (eight.requests, eight.requests_limit, eight.longest, eight.longest_limit) == (0, "weights", 0, "weights")
    assert plan(K3_, count=1).layers == 8 and 56 <= eight.layers <= 61 and b300.layers == 93
    assert any("not fit 8 x H200: 70.8 GB" in line for line in eight.advice)
    assert any("first 61 fit, 60 of them in whole blocks of 12" in line for line in eight.advice)


def test_kimi_linear_fits_one_gpu():
    found = plan(KIMI, count=1, packed=False)
    assert found.fits and found.layers == 27 and found.smallest == 1 and round(found.total / 1e9, 1) == 98.2
    assert not plan(KIMI, "h100", 1, packed=False).fits and plan(KIMI, "h100", 2, packed=False).fits


@pytest.mark.parametrize(("gpu", "count"), [("h200", 1), ("b200", 1), ("h200", 8)])
def test_slices_are_the_longest_that_fit(gpu, count):
    found = plan(K3_, gpu, count)
    assert 0 < found.layers < 93
    assert plan(K3_.slice(found.layers), gpu, count).fits and not plan(K3_.slice(found.layers + 1), gpu, count).fits


@settings(deadline=None, max_examples=25)
@given(
    memory=st.integers(10**9, 2**40), tokens=st.integers(1, TINY.max_position_embeddings), tp=st.sampled_from([1, 2, 8])
)
def test_what_fits_is_the_most(memory, tokens, tp):
    """One request or one page more would be too much; with the limit named."""
    memory //= 100  # around what the small model takes
    found = plan(TINY, count=tp, packed=False, memory=memory, workspace=0, tokens=tokens)
    pages = -(-tokens // PAGE)
    assert found.left == memory - found.arguments(0, 0)
    assert found.fits == (found.arguments(1, 1) <= memory) == (found.longest > 0)
    if found.requests:
        assert found.arguments(found.requests, found.requests * pages) <= memory
    assert found.arguments(found.requests + 1, (found.requests + 1) * pages) > memory
    assert (found.requests_limit == "weights") == (found.longest_limit == "weights") == (not found.fits)
    if found.fits:
        assert found.arguments(1, -(-found.longest // PAGE)) <= memory
        full = found.longest == TINY.max_position_embeddings
        assert (found.longest_limit == "context") == full
        assert full or found.arguments(1, found.longest // PAGE + 1) > memory
        assert (found.requests_limit == "slots") == (found.slot_bytes > pages * found.page_bytes)


def test_the_least_that_fits():
    """The weights, a slot and a page, to the byte."""
    for config in (TINY, TINY.slice(3)):  # with latents, and without
        need = plan(config, packed=False, tokens=9).arguments(1, 1)
        fits, lacks = (plan(config, packed=False, tokens=9, workspace=7, memory=need + spare) for spare in (7, 6))
        assert fits.fits and fits.requests == 1 and fits.longest == (PAGE if config.mla_layers else 4096)
        assert not lacks.fits and lacks.requests == lacks.longest == 0 and lacks.layers == config.num_hidden_layers - 1
        assert any("0.0 GB are lacking" in line for line in lacks.advice)


def test_more_is_never_less():
    by_count = [plan(K3_, count=count) for count in (1, 2, 4, 8, 16, 32)]
    by_memory = [plan(K3_, count=16, memory=gb * 10**9) for gb in (50, 100, 113, 120, 141, 200)]
    by_tokens = [plan(K3_, count=16, tokens=tokens) for tokens in (1, 64, 65, 8192, 2**20)]
    by_rows = [plan(K3_, count=16, rows=rows) for rows in (1, 2, 32, 1000)]
    for more, less in itertools.pairwise(by_count):
        assert all(more.weights[name] >= less.weights[name] for name in more.weights)
    for plans in (by_count, by_memory):
        for field in ("requests", "longest", "layers", "left"):
            values = [getattr(found, field) for found in plans]
            assert values == sorted(values) and values[0] < values[-1]
    requests = [found.requests for found in by_tokens]
    assert requests == sorted(requests, reverse=True) and requests[0] > requests[-1]
    for step, plans in (("decode", by_rows), ("decode", by_tokens), ("prefill", by_tokens)):
        seconds = [found.seconds(step) for found in plans]
        assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    a_row = [found.seconds("decode") / found.rows for found in by_rows]
    assert a_row == sorted(a_row, reverse=True)  # rows share the weights
    assert by_rows[0].seconds("prefill") == by_rows[-1].seconds("prefill")


def test_copies():
    """Each is a model of its own."""
    two, one = plan(K3_, "b300", 16, tp=8), plan(K3_, "b300", 8)
    assert two.copies == 2 and dataclasses.replace(two, count=8) == one
    assert "2 copies on 8 each" in two.table()
    for step, tokens in (("decode", two.rows), ("prefill", two.tokens)):
        assert f"At most {2 * tokens / one.seconds(step):,.0f} tokens a second" in two.table()


# -- time ------------------------------------------------------------------------------------------------------------


def test_one_token_reads_the_active_parameters():
    decode = parts(plan(K3_, count=1, rows=1, tokens=8192), "decode")
    assert round(decode["experts"].bytes / 1e9, 1) == 25.8
    assert decode["experts"].bytes == pytest.approx(92 * 16 * 17_547_264, rel=1e-12)
    trunk = [decode[name] for name in RELEASED if name != "experts"]
    assert round(sum(part.bytes for part in trunk) / 1e9, 1) == 111.2  # 113.51 GB less the embedding
    products = sum(decode[name].flops for name in RELEASED) / 2
    assert round(products / 1e9, 2) == 104.19 and products < 104.19e9 + 1e7
    assert decode["KDA"].bytes == 2 * (69 * (96 * 128 * 128 * 4 + 3 * 36864 * 2) + 4)
    assert decode["MLA"].bytes == 8192 * 27_648 and decode["MLA"].flops == 24 * 8192 * 208_896
    assert "collectives" not in decode and "depth mixing" not in decode


def test_experts_that_rows_touch():
    def size(rows):
        return parts(plan(K3_, count=8, rows=rows), "decode")["experts"].bytes

    whole = plan(K3_, count=8).weights["experts"]
    assert size(2) == pytest.approx(whole * (1 - (880 / 896) ** 2), rel=1e-12)
    assert size(10**5) == whole
    assert parts(plan(K3_, count=8, rows=7), "decode")["experts"].flops == pytest.approx(
        2 * 7 * 16 * 3 * 3072 * 3584 * 92 / 8, rel=1e-12
    )


def test_prefill_counts():
    prefill = parts(plan(K3_, count=8), "prefill")
    assert prefill["MLA"].flops == 24 * 12 * 2 * 320 * (8192 * 8193 // 2)
    assert round(prefill["MLA"].flops * 8 / 24 / 1e12, 2) == 2.06
    assert prefill["KDA"].bytes == 69 * 12 * 8192 * 1282 + 2 * plan(K3_, count=8).state_bytes
    sources = sum(2 * (layer // 12 + 2) for layer in range(93)) - 8  # before its first layer a block is not yet stored
    assert prefill["depth mixing"].bytes == 8192 * 7168 * 2 * sources
    assert prefill["embed + head"].flops == 2 * (163840 // 8 + 1) * 7168  # of the last token alone
    assert prefill["experts"].bytes == pytest.approx(plan(K3_, count=8).weights["experts"], rel=1e-12)


@pytest.mark.parametrize("gpu", GPUS)
def test_bounds_are_rooflines(gpu):
    kind, found = GPUS[gpu], plan(K3_, gpu, 8)
    for step in ("decode", "prefill"):
        for part in getattr(found, step):
            if part.name != "collectives":
                assert part.bound == max(part.bytes / kind.bandwidth, part.flops / kind.flops) > 0
        assert found.seconds(step) == sum(part.bound for part in getattr(found, step))
        assert found.seconds(step, True) >= found.seconds(step)


def test_measured_figures_are_those_of_the_records():
    decode, prefill = ([name for (_, step), (name, _) in MEASURED.items() if step == s] for s in ("decode", "prefill"))
    record = json.loads((RECORDS / decode[0]).read_text())
    rows = [row for row in record["rows"] if row["op"] == "kda_decode" and row["state"] == "float32"]
    want = {(row["H"], row["B"]): round(row["us"], 2) for row in rows}
    assert {size: round(s * 1e6, 2) for size, s in MEASURED["h200", "decode"][1].items()} == want
    record = json.loads((RECORDS / prefill[0]).read_text())
    rows = [row for row in record["rows"] if row["op"] == "kda_prefill" and row["precision"] == "default"]
    want = {(r["H"], *r["lengths"]): round(r["us"], 1) for r in rows if r["bound"] == -5 and len(r["lengths"]) == 1}
    assert {size: round(s * 1e6, 1) for size, s in MEASURED["h200", "prefill"][1].items()} == want
    assert len(decode) == len(prefill) == 1 and "H200" in record["device"]


def test_measured_figures_stand_for_their_sizes_alone():
    found = plan(K3_, count=8, rows=32, tokens=8192)
    for step, seconds in (("decode", 19.09e-6), ("prefill", 247.5e-6)):
        part = parts(found, step)["KDA"]
        assert part.measured == 69 * seconds and part.source == MEASURED["h200", step][0] and part.measured > part.bound
        assert [p.name for p in getattr(found, step) if p.measured is not None] == ["KDA"]
        assert found.seconds(step, True) == pytest.approx(found.seconds(step) + part.measured - part.bound, rel=1e-12)
    softplus = dataclasses.replace(K3_, gate_lower_bound=None)
    for other in (
        plan(K3_, rows=33, tokens=8191),
        plan(K3_, "b300"),
        plan(K3_, count=16),
        plan(softplus),
        plan(KIMI, packed=False),
    ):
        for step in ("decode", "prefill"):
            assert other.seconds(step, True) == other.seconds(step)


@pytest.mark.parametrize(
    "changes", [{}, dict(num_shared_experts=0), dict(routed_expert_hidden_size=None, first_k_dense_replace=3)]
)
def test_collectives_are_those_of_the_model(changes):
    """Bytes of all sums over ranks in a traced pass."""
    T, mesh, config = 6, sharding.make_mesh(tp=2), K3Config.tiny(**changes)
    model = jax.eval_shape(K3.absorb, K3.abstract(config))
    carry = jax.eval_shape(functools.partial(carries.empty, config, slots=1, pages=1))
    batch = Batch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((T,), (2,), (1,), (1,), (1, 1), (1,))))
    ctx, kept = Context(Kernels.auto(config), mesh=mesh), sharding.specs(carries.axes(carry))
    one = lambda model, batch, carry: forward(model, batch, carry, ctx).carry  # noqa: E731
    every = sharding.per_rank(one, mesh, (sharding.of_model(model), jax.P(), kept), kept)
    sums = [eqn for eqn in _equations(jax.make_jaxpr(every)(model, batch, carry).jaxpr) if "psum" in eqn.primitive.name]
    size = sum(v.aval.size * v.aval.dtype.itemsize for eqn in sums for v in eqn.invars)
    assert size > 0 and parts(plan(config, count=2, packed=True, tokens=T), "prefill")["collectives"].bytes == size


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_sums_cross_the_network_where_nvlink_ends():
    within, beyond = (parts(plan(K3_, gpu, 32), "prefill")["collectives"] for gpu in ("gb300", "b300"))
    assert within.bytes == beyond.bytes and within.bound < beyond.bound
    size, calls = within.bytes, 1 + 2 * 93
    assert within.bound == pytest.approx(calls * 3e-6 + 2 * size * 31 / 32 / 900e9, rel=1e-12)
    assert beyond.bound == pytest.approx(
        calls * 6e-6 + 2 * size * 7 / 8 / 900e9 + 2 * size / 8 * 3 / 4 / 100e9, rel=1e-12
    )


# -- words -----------------------------------------------------------------------------------------------------------


def test_json_and_table_say_the_same():
    found = plan(K3_, "h200", 16, rows=200)
    data = found.json()
    assert json.loads(json.dumps(data)) == data
    assert {**data, "others": tuple(data["others"]), "advice": tuple(data["advice"])}.items() >= {
        name: value for name, value in vars(found).items() if name not in ("decode", "prefill")
    }.items()
    assert data["decode"] == [vars(part) for part in found.decode] and data["fits"] is True
    assert data["prefill_seconds"] == {
        "bound": found.seconds("prefill"),
        "with_measured": found.seconds("prefill", True),
    }
    text = found.table()
    assert max(map(len, text.splitlines())) <= 120
    for words in (
        *found.advice,
        *(f"{size:,}" for size in found.weights.values()),
        f"{found.total:,}",
        f"{found.requests:,}",
    ):
        assert words in text
    assert "200 rows of 8,192 tokens do not fit a copy" in text


def test_defaults():
    found = plan(K3_)
    assert (
        found.memory == int(SHARE * 143_771 * 2**20) and found.workspace == WORKSPACE and (found.tp, found.ep) == (8, 8)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(gpu="tpu"), "gpu='tpu': allowed are 'h100', 'h200', 'b200', 'b300', 'gb300'"),
        (dict(count=0), "count=0: allowed is an integer of 1 or more"),
        (dict(count=8.0), "count=8.0: allowed is an integer of 1 or more"),
        (dict(tp=0), "tp=0: allowed is an integer of 1 or more, or None"),
        (dict(tp=3), "tp=3: allowed are divisors of count=8"),
        (dict(ep=3), "ep=3: allowed are divisors of tp=8"),
        (dict(count=64), "tp=64: allowed are divisors of kda_num_heads=96"),
        (dict(rows=0), "rows=0: allowed is an integer of 1 or more"),
        (dict(rows=True), "rows=True: allowed is an integer of 1 or more"),
        (dict(tokens=2**20 + 1), "tokens=1048577: allowed are 1 to 1048576"),
        (dict(memory=-1), "memory=-1: allowed is an integer of 1 or more, or None"),
        (dict(workspace=-1), "workspace=-1: allowed is an integer of 0 or more"),
        (dict(dtype="float16"), "dtype='float16': allowed are 'bfloat16' and 'float32'"),
        (dict(packed=1), "packed=1: allowed are True and False"),
        (dict(count=16, ep=1, gpu=None), "gpu=None: allowed are 'h100'"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        plan(K3_, **options)
    assert words in str(error.value)


def test_packed_experts_need_whole_groups():
    with pytest.raises(ValueError, match="packed=True: allowed are False"):
        plan(dataclasses.replace(TINY, moe_intermediate_size=48), packed=True, tokens=9)


@pytest.fixture
def call(capsys):
    def run(*options):
        code = cli.main(["plan", *map(str, options)])
        return code, *capsys.readouterr()

    return run


def test_the_command_prints_a_plan(call):
    assert call() == (0, plan(K3_).table(), "")
    code, out, err = call(
        "--preset", "k3", "--gpu", "b300", "--count", 16, "--tp", 8, "--ep", 4, "--rows", 7, "--tokens", 99, "--json"
    )
    assert (code, err) == (0, "") and json.loads(out) == plan(K3_, "b300", 16, tp=8, ep=4, rows=7, tokens=99).json()
    code, out, _ = call("--preset", "kimi-linear-48b", "--count", 1, "--memory", 120.5)
    assert (code, out) == (0, plan(KIMI, count=1, packed=False, memory=int(120.5 * 2**30)).table())


def test_the_command_needs_no_weights(call, tmp_path):
    for packed in (False, True):
        config = K3_.slice(5)
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf(packed=packed)))
        want = plan(config, count=2, packed=packed).table()
        assert call("--model", tmp_path, "--count", 2) == (0, want, "")


def test_the_command_refuses_in_a_line(call, tmp_path):
    for options, words in (
        (("--gpu", "a100"), "gpu='a100': allowed are 'h100'"),
        (("--count", 0), "count=0: allowed is an integer of 1 or more"),
        (("--count", "x"), "--count"),
        (("--memory", "nan"), "memory=nan: allowed is a positive number of GiB"),
        (("--memory", "inf"), "memory=inf: allowed is a positive number of GiB"),
        (("--memory", 0), "memory=0.0: allowed is a positive number of GiB"),
        (("--memory", "1e300"), "memory=1e+300: allowed is a positive number of GiB"),
        (("--preset", "k4"), "k4"),
        (("--preset", "k3", "--model", tmp_path), "preset='k3': allowed is one of the two"),
        (("--model", tmp_path), "config.json: no such file"),
    ):
        code, out, err = call(*options)
        assert (code, out) == (2, "") and err.count("\n") == 1 and words in err, (options, err)


def test_a_preset_that_is_none():
    with pytest.raises(ValueError, match="preset='k4': allowed are 'k3', 'kimi-linear-48b' and None"):
        command(None, "k4", None, False)
