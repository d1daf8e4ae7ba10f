"""The choice of kernels, and a whole model with GPU kernels (interpreted) beside the same in XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import K3_FIELDS, NOWHERE, QUICK, Row, checkpoint, module, pack, relative_error, same_bits, small, stored

import k3jax
from k3jax import kernels as choice
from k3jax import pallas
from k3jax.batch import prepare
from k3jax.carry import empty
from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.model import forward
from k3jax.probe import Probe

XLA = Kernels("chunk", "dense")
GPU = Kernels("pallas", "dense", "pallas", interpret=True)
FIVE = K3_FIELDS | dict(num_hidden_layers=5, kda_layers=(0, 1, 3), attn_res_block_size=3, kda_head_dim=16)
SLOTS, PAGES, PAGE = 7, 12, 8
ROWS = [  # two that are decoded, one that has finished, one that is empty, prompts that begin and that go on
    Row([5], 9, 4, (0, 1)), Row([6], 3, 1, (2,)), Row([7], 5, NOWHERE, (3,)), Row([], 0, 5),
    Row([*range(1, 20)], 0, 0, (4, 5, 6)), Row([], 0, NOWHERE), Row([3, 4], 11, 6, (7, 8)), Row([9, 8, 7], 0, NOWHERE),
]  # fmt: skip


@functools.lru_cache
def model(kind):
    config = small(**(FIVE if kind == "k3" else dict(kda_head_dim=16)))
    return config, module(config, stored(config, checkpoint(config, seed=1)))


@functools.lru_cache
def step(kind, kernels, decode, save=()):
    ctx = Context(kernels, decode, Probe(frozenset(save)))
    return jax.jit(lambda m, batch, carry: forward(m, batch, carry, ctx), compiler_options=QUICK)


def carry_of(config, seed=3):
    """Random memories; NaN in the slots that no row reads."""
    rng = np.random.default_rng(seed)
    carry = empty(config, slots=SLOTS, pages=PAGES, page=PAGE, dtype="float32")
    carry = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), carry)
    read = [row.slot for row in ROWS if row.past and row.slot < SLOTS]
    unread = jnp.asarray([slot for slot in range(SLOTS) if slot not in read])
    return carry._replace(kda=jax.tree.map(lambda a: a.at[unread].set(jnp.nan), carry.kda))


def run(kind, kernels, rows=ROWS, decode=4, tokens=40, save=()):
    config, m = model(kind)
    return step(kind, kernels, decode, save)(m, pack(rows, tokens, 3), carry_of(config))


@pytest.mark.parametrize("kind", ["k3", "kimi_linear"])
@pytest.mark.parametrize(
    "rows, decode, tokens",
    [(ROWS[:4], 4, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((ROWS, 4, 40), (ROWS[4:], 0, 30)))],
)
def test_a_step_with_gpu_kernels_equals_one_without(kind, rows, decode, tokens):
    """Bounded and unbounded gates; with rows to decode, with prompts, with both; padding, and rows that leave nothing."""
    rows = [row._replace(ids=row.ids or [0]) if i < decode else row for i, row in enumerate(rows)]
    want, got = (run(kind, kernels, rows, decode, tokens) for kernels in (XLA, GPU))
    config, _ = model(kind)
    real = np.arange(sum(len(row.ids) for row in rows))
    if decode:
        real = np.delete(real, 2)  # what a finished request would say is nobody's
    assert relative_error(got.logits[real], want.logits[real]) < 1e-5
    before, written = carry_of(config), [row.slot for row in rows if row.ids and row.slot < SLOTS]
    others = np.array([slot for slot in range(SLOTS) if slot not in written])
    for old, a, b in zip(*(jax.tree.leaves(c.kda) for c in (before, want.carry, got.carry)), strict=True):
        assert relative_error(b[np.array(written)], a[np.array(written)]) < 1e-5
        assert same_bits(b[others], old[others])
    np.testing.assert_array_equal(got.carry.lengths, want.carry.lengths)
    np.testing.assert_array_equal(got.first_bad, want.first_bad)


@pytest.mark.parametrize(
    "precision, least, most", [("high", 0, 3e-4), pytest.param("default", 1e-3, 1e-2, marks=pytest.mark.slow)]
)
def test_precision_reaches_the_kernel_through_a_layer(precision, least, most):
    """The state of a prompt in bfloat16 beside the one in XLA, whose products are float32's."""
    config, m = model("k3")
    memory = carry_of(config).kda[0]
    memory = memory._replace(conv=memory.conv.astype(jnp.bfloat16))
    x = jnp.asarray(np.random.default_rng(5).normal(size=(19, config.hidden_size)), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
    def state(m, kernels):
        step = prepare(pack(ROWS[4:5], 19, 3), 0, PAGE, config.short_conv_kernel_size)
        return m.model.layers[0].self_attn(x, memory, step, Context(kernels), lambda _, value: value)[1].S[0]

    want, got = (state(m, k) for k in (XLA, Kernels("pallas", precision=precision, interpret=True)))
    assert least <= relative_error(got, want) < most


PROMPTS = dict(rows=ROWS[4:], decode=0, tokens=30)


@pytest.mark.slow
def test_depth_weights_are_seen_with_the_kernel():
    sites = ("attnres_attn_1", "attnres_mlp_0", "attnres_mlp_4", "attnres_R_3", "attnres_out", "hidden")
    want, got = (run("k3", kernels, save=sites, **PROMPTS).taps for kernels in (XLA, GPU))
    assert set(want) == set(got) == set(sites)
    for site in sites:
        a, b = (t[site][:, :24] if site == "hidden" else t[site][:24] if t[site].ndim else t[site] for t in (want, got))
        assert relative_error(b, a) < 1e-5, site


@pytest.mark.slow
def test_what_is_inside_kda_is_probed_in_xla():
    """A kernel shows nothing of its inside: to be probed is to run the other form."""
    sites = ("kda_core_1", "kda_state_3", "kda_conv_q_0")
    want, got = (run("k3", kernels, save=sites, **PROMPTS).taps for kernels in (XLA, GPU))
    for site in sites:
        real = (0, 2, 3) if "state" in site else slice(24)
        assert relative_error(np.asarray(got[site])[real,], np.asarray(want[site])[real,]) < 1e-5, site


@pytest.mark.slow
def test_without_a_carry_there_are_gradients():
    config = small(**(FIVE | dict(num_hidden_layers=2, kda_layers=(0,))))
    m = module(config, stored(config, checkpoint(config, seed=1)))
    batch = pack([Row([1, 2, 3])], 3, 0)
    slopes = [jax.grad(lambda m, k=k: forward(m, batch, None, Context(k)).logits.sum())(m) for k in (XLA, GPU)]
    want, got = (np.asarray(s.model.embed_tokens.weight[...]) for s in slopes)
    assert np.abs(want).max() > 0 and relative_error(got, want) < 1e-6


@pytest.mark.slow
def test_tokens_are_the_same_with_gpu_kernels_and_over_ranks(short):
    """Each rank runs the kernels on its own heads."""
    prompts = [[*range(7, 90)], [5]]
    sampling = k3jax.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    found = []
    for kernels, mesh in ((XLA, None), (GPU, None), (GPU, k3jax.make_mesh(tp=2))):
        lm = k3jax.load(short, dtype="float32", kernels=kernels, mesh=mesh)
        found.append([answer.token_ids for answer in lm.generate(prompts, sampling)])
    assert found[0] == found[1] == found[2]


# The choice.


def test_auto_takes_gpu_kernels_on_a_gpu_alone(monkeypatch, capsys):
    monkeypatch.setattr(choice, "cannot_compile", lambda: None)
    assert Kernels.auto(K3Config.k3(), "cpu") == Kernels("chunk", "grouped")
    assert Kernels.auto(K3Config.k3(), "cuda") == Kernels("pallas", "grouped", "pallas")
    assert capsys.readouterr().err == ""


def test_xla_is_a_choice_by_name(monkeypatch):
    monkeypatch.setattr(choice, "cannot_compile", lambda: None)
    assert (
        Kernels.resolve("xla", K3Config.k3(), "gpu")
        == Kernels("chunk", "grouped")
        != Kernels.auto(K3Config.k3(), "gpu")
    )
    with pytest.raises(ValueError, match="kernels='triton': allowed are 'auto', 'xla' or"):
        Kernels.resolve("triton", K3Config.k3())


def test_auto_says_once_what_it_drops(monkeypatch, capsys):
    choice._say_once.cache_clear()
    monkeypatch.setattr(choice, "cannot_compile", lambda: None)
    config = small(**(FIVE | dict(kda_head_dim=12)))
    for _ in range(2):
        assert Kernels.auto(config, "gpu") == Kernels("chunk", "dense", "pallas")
    line = "k3jax: no GPU kernels for kda (K=12: allowed are powers of two from 16)\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "kernels, changes, message",
    [
        (Kernels(kda="pallas"), {}, r"kernels.kda='pallas': platform='cpu': allowed is an NVIDIA GPU"),
        (Kernels(attnres="pallas"), {}, r"kernels.attnres='pallas': platform='cpu': allowed is an NVIDIA GPU"),
        (GPU, dict(kda_head_dim=12), r"kernels.kda='pallas': K=12: allowed are powers of two from 16"),
        (GPU, dict(kda_head_dim=2048), r"kernels.kda='pallas': K=2048: allowed are powers of two from 16 to 128"),
        (
            GPU,
            dict(short_conv_kernel_size=9),
            r"kernels.kda='pallas': taps=\[9, 3, 48\]: allowed is \[W, H, 2K\+V\] with W",
        ),
        (
            GPU,
            dict(gate_lower_bound=-6.0),
            r"kernels.kda='pallas': lower_bound=-6.0: allowed are -5.0 to 0, or None",
        ),
        (GPU, dict(attn_res_block_size=None), r"kernels.attnres='pallas': attn_res_block_size=None"),
    ],
)
def test_an_explicit_choice_that_cannot_run_raises(kernels, changes, message):
    with pytest.raises(ValueError, match=message):
        Kernels.resolve(kernels, small(**(FIVE | changes)), "cpu")


def test_an_old_jax_is_named(monkeypatch):
    monkeypatch.setattr(choice, "cannot_compile", lambda: "jax=0.10.2: allowed are 0.11 and newer")
    with pytest.raises(ValueError, match=r"kernels.kda='pallas': jax=0.10.2: allowed are 0.11 and newer"):
        Kernels.resolve(Kernels("pallas"), small(**FIVE), "gpu")


def test_a_model_without_a_bound_gets_what_it_has_kernels_for(monkeypatch, capsys):
    choice._say_once.cache_clear()
    monkeypatch.setattr(choice, "cannot_compile", lambda: None)
    config = small(kda_head_dim=16)
    assert config.gate_lower_bound is None
    assert Kernels.auto(config, "gpu") == Kernels("pallas", "dense")
    assert capsys.readouterr().err == ""  # there are no attention residuals to drop
    assert Kernels.auto(config).explain(config)["attention residuals"] == "none in this model"
    monkeypatch.setattr(choice, "_too_old", lambda platform: None)
    Kernels.resolve(Kernels("pallas"), config, "gpu")


def test_which_form_prompts_have_is_told(monkeypatch):
    monkeypatch.setattr(pallas, "cannot_compile", lambda: None)
    told = lambda config: Kernels("pallas").explain(config)["KDA prefill"]  # noqa: E731
    assert told(K3Config.k3()).endswith("; long ones of many heads in Mosaic GPU, others in Triton")
    assert told(K3Config.kimi_linear_48b()).endswith("; in Triton (lower_bound=None: allowed is a number)")
    assert "in Triton (q=float32: allowed is bfloat16)" in told(dataclasses.replace(K3Config.k3(), dtype="float32"))


def test_amd_and_old_cards_get_none(monkeypatch):
    class Card:
        compute_capability = "8.0"

    monkeypatch.setattr(choice, "cannot_compile", lambda: None)
    assert Kernels.auto(K3Config.k3(), "rocm") == Kernels("chunk", "grouped")
    monkeypatch.setattr(choice.jax, "default_backend", lambda: "gpu")
    for Card.compute_capability in ("8.0", "gfx942", 7.5):
        monkeypatch.setattr(choice.jax, "local_devices", lambda: [Card])
        assert choice.refuse("kda", K3Config.k3()).startswith(
            f"compute_capability={Card.compute_capability}: allowed are 9.0"
        )
    Card.compute_capability = "9.0"
    assert choice.refuse("kda", K3Config.k3()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"kda": "triton"},
        {"attnres": "chunk"},
        {"precision": "low"},
        {"interpret": 2},
        {"precision": "high"},
        {"interpret": True},
    ],
)
def test_unknown_choices(fields):
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match=rf"kernels.{name}={value!r}: allowed (are|is) "):
        Kernels(**fields)


def test_explain_names_what_runs_and_why_not():
    text = XLA.explain(small(**FIVE))
    assert "platform='cpu': allowed is an NVIDIA GPU" in text["KDA decode"] and text["attention residuals"].startswith(
        "XLA"
    )
    text = GPU.explain(small(**FIVE))
    assert all(
        text[op].startswith("Pallas")
        for op in ("KDA prefill", "KDA decode", "short convolution", "attention residuals")
    )
