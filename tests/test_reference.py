"""The float64 reference against others' outputs, small exact numbers, and every variant a config can ask for."""

import json
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import K3_FIELDS, VARIANTS, assert_close, checkpoint, small
from safetensors.numpy import load_file

from k3jax import reference as ref
from k3jax.config import K3Config
from k3jax.reference import Reference, State, Weights, greedy

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
PROMPTS = range(7)
LOGIT_ATOL = 5e-4  # the outputs were computed in float32; float64 was seen within 1.5e-4 of them
SITE_ATOL = 1e-4  # of max(1, largest value)
PRINTED = 6e-9  # half of the eighth decimal, which the exact vectors are printed to


@lru_cache
def load(case):
    """Config, tensors, prompts and outputs of a golden case."""
    folder = GOLDEN / case
    config = K3Config.from_hf(json.loads((folder / "config.json").read_text()))
    inputs, outputs = dict(np.load(folder / "inputs.npz")), dict(np.load(folder / "outputs.npz"))
    return config, load_file(folder / "model.safetensors"), [inputs[f"prompt_{i}"] for i in PROMPTS], outputs


@lru_cache
def run(case, prompt):
    """Logits, state and trace of a whole golden prompt."""
    config, tensors, prompts, _ = load(case)
    return Reference(config, tensors).forward(prompts[prompt])


TOKENS = [3, 14, 15, 9, 26, 5, 3]


# Outputs of independent implementations.


@pytest.mark.parametrize("case", CASES)
def test_golden_logits(case):
    for prompt in PROMPTS:
        assert_close(run(case, prompt)[0], load(case)[3][f"logits_{prompt}"], LOGIT_ATOL, prompt)


@pytest.mark.parametrize("case", CASES)
def test_golden_greedy(case):
    config, tensors, prompts, outputs = load(case)
    for prompt in PROMPTS:
        assert greedy(config, tensors, prompts[prompt], 16) == outputs[f"greedy_{prompt}"].tolist(), prompt


@pytest.mark.parametrize("case", CASES)
def test_golden_sites(case):
    outputs = load(case)[3]
    trace = run(case, int(outputs["detail_prompt"]))[2]
    sites = {name for name in outputs if not name.startswith(("logits_", "greedy_", "long_", "detail_"))}
    assert {name for name in trace if not name.startswith("attnres_R")} == sites
    for name in sites:
        want = outputs[name]
        if name.startswith("router_ids"):
            assert np.array_equal(trace[name], want), name
        else:
            assert_close(trace[name], want, SITE_ATOL * max(1, np.abs(want).max()), name)


@pytest.mark.parametrize("case", CASES)
def test_golden_state_of_the_long_prompt(case):
    config, _, _, outputs = load(case)
    trace = run(case, int(outputs["long_prompt"]))[2]
    names = [name for name in outputs if name.startswith("long_kda")]
    assert len(names) == 4 * len(config.kda_layers)
    for name in names:
        want = outputs[name]
        assert_close(trace[name.removeprefix("long_")], want, SITE_ATOL * max(1, np.abs(want).max()), name)


def test_the_golden_cases_are_all_here():
    assert CASES == ["k3_bf16", "k3_f32", "k3_mxfp4", "k3_mxfp4_wide", "kimi_linear_a", "kimi_linear_b"]
    assert {load(case)[0].latent_norm_eps for case in CASES} == {1e-6}
    assert {load(case)[0].rms_norm_eps for case in CASES} == {1e-5, 1e-4}


# Small exact numbers.


def test_situ():
    gate, up = np.array([1, -2, 10, 0.5]), np.array([1, 3, -40, 0.25])
    assert_close(ref.situ(gate, up, 4, 25), [0.71581783, -0.65787382, -90.92900922, 0.07740211], PRINTED)


def test_bounded_log_decay():
    z, A_log = np.array([[[0.0], [-2], [5], [0.3]]]), np.array([0, 1, 0, np.log(2)])
    want = [-2.5, -0.02167771, -4.96653575, -3.22828153]
    assert_close(ref.kda_log_decay(z, A_log, -5.0).ravel(), want, PRINTED)


def test_softplus_log_decay():
    z, A_log = np.array([[[0.0], [50], [-50], [-1e4]]]), np.array([0, np.log(3), 0, 0])
    g = ref.kda_log_decay(z, A_log, None).ravel()
    np.testing.assert_allclose(g, [-np.log(2), -150, -np.exp(-50), 0], rtol=1e-12)


def test_sigmoid_is_accurate_at_both_ends():
    want = [np.exp(-700), np.exp(-50), 0.5, 1 / (1 + np.exp(-1)), 1]
    np.testing.assert_allclose(ref.sigmoid(np.array([-700.0, -50, 0, 1, 800])), want, rtol=1e-12)


def test_short_conv():
    taps, zeros, x = np.array([[0.1, 0.2, 0.3, 0.4]]), np.zeros((3, 1)), np.arange(1.0, 6)[:, None]
    y = np.array([0.4, 1.1, 2, 3, 4])
    got = ref.short_conv(np.concatenate([zeros, x]), taps).ravel()
    assert_close(got, y / (1 + np.exp(-y)), 1e-12)
    assert_close(got, [0.23947506, 0.82528612, 1.76159416, 2.85772238, 3.92805516], PRINTED)
    assert_close(ref.short_conv(x[1:], taps[:, None]).ravel(), got[-1:], 1e-12)


def test_kda_recurrence():
    f = np.array([[-3.0, 0], [-1, -4], [2, -2]])[:, None]
    q, k = np.array([[1.0, 0], [1, 1], [0, -2]]), np.array([[1.0, 1], [0.5, -1], [2, 0]])
    v, beta = np.array([[1, 2], [3, -1], [0.5, 0.25]]), ref.sigmoid(np.array([0.0, 1, -1]))
    g = ref.kda_log_decay(f + np.array([0.1, -0.2]), np.array([0.5]), -5.0)
    want = [[-0.04157717, -2.09151426], [-0.92423366, -0.00491151], [-4.84798138, -0.12951062]]
    assert_close(g[:, 0], want, PRINTED)
    S, o = np.zeros((1, 2, 2)), []
    for t in range(3):
        q_t, k_t = ref.l2_norm(q[t]), ref.l2_norm(k[t])
        out, S = ref.delta_rule(S, q_t[None], k_t[None], v[t, None], g[t], beta[t, None])
        o.append(out[0])
    assert_close(o, [[0.24999981, 0.49999963], [-0.28553036, 0.57322621], [1.10236873, -0.63863816]], PRINTED)
    assert_close(S[0], [[0.14137217, 0.06791432], [-1.55898501, 0.90317086]], PRINTED)
    gated = ref.rms_norm(o[2], np.array([1.1, 0.9]), 1e-5) * ref.sigmoid(np.array([0.3, -0.7]))
    assert_close(gated, [0.77323073, -0.21170578], PRINTED)


def test_attn_res():
    sources = np.array([[1, 2, -1], [0.5, 0, 0.25], [-2, 1, 3]])[:, None]
    mix, pi = ref.attn_res(sources, np.array([1, 0.5, 2]), np.array([[0.2, -0.4, 0.1]]), 1e-5)
    assert_close(pi[0], [0.22528745, 0.47577965, 0.29893290], PRINTED)
    assert_close(mix[0], [-0.13468853, 0.74950780, 0.79045617], PRINTED)
    assert_close(np.log(pi[0] / pi[0, 2]), [-0.28284201, 0.46473569, 0], 2 * PRINTED)  # the third score is 0


def test_router():
    config = small(num_experts=4, num_experts_per_token=2, routed_scaling_factor=1.0)
    ids, weights = ref.router(config, np.array([[0.2, -1, 1.5, 0.9]]), np.array([0, 0.6, 0, -0.3]))
    assert ids.tolist() == [[1, 2]]
    assert_close(weights, [[0.24752645, 0.75247355]], PRINTED)


def test_mxfp4_decode_by_definition():
    stored = np.load(GOLDEN / "mxfp4_vectors.npz")
    got = ref.mxfp4_decode(stored["packed"], stored["scales"])
    assert got.dtype == np.float64
    assert np.array_equal(got, stored["values"])
    assert np.array_equal(np.signbit(got), np.signbit(stored["values"]))


def test_mxfp4_decode_of_one_group():
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :8] = [0x9C, 0x71, 0x2A, 0xF0, 0x53, 0x08, 0xE4, 0xB6]
    want = [-2, -0.5, 0.5, 6, -1, 1, 0, -6, 1.5, 3, -0.0, 0, 2, -4, 4, -1.5]
    assert np.array_equal(ref.mxfp4_decode(packed, np.array([[121]], np.uint8))[0, :16] * 64, want)
    assert ref.mxfp4_decode(packed, np.array([[0]], np.uint8))[0, 5] == 2.0**-127
    with pytest.raises(ValueError, match="255"):
        ref.mxfp4_decode(packed, np.array([[255]], np.uint8))


# Epsilons: the golden logits hardly feel some of them, so each is made large and its site worked out again here.

BIG = dict(rms_norm_eps=0.5, latent_norm_eps=0.2)


def normed(x, weight, eps):
    return x * weight / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps)


def logistic(x):
    return 1 / (1 + np.exp(-x))


def forward_big(**changes):
    config = small(**BIG, **changes)
    tensors = checkpoint(config)
    return tensors, Reference(config, tensors).forward(TOKENS)[2]


def test_epsilon_of_the_l2_norm_is_added_to_the_sum():
    x = np.array([3e-4, 0, -4e-4, 0])
    assert_close(ref.l2_norm(x), x / np.sqrt(2.5e-7 + 1e-6), 1e-15)


def test_epsilon_of_the_l2_norm_in_a_kda_layer():
    config = small()
    w = checkpoint(config)
    at = "model.layers.0.self_attn."
    w[f"{at}q_proj.weight"] *= 1e-3
    w[f"{at}k_proj.weight"] *= 1e-3
    S, past = np.zeros((3, 4, 4)), np.zeros((3, 3, 12))
    x = np.random.default_rng(1).normal(size=(1, 12))
    core = ref.kda(config, Weights(w).under(at), x, S, past)[3]["kda_core"][0]
    raw = [x[0] @ w[f"{at}{name}_proj.weight"].T * w[f"{at}{name}_conv1d.weight"][:, 0, -1] for name in "qkv"]
    q, k, v = ((y * logistic(y)).reshape(3, 4) for y in raw)
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = logistic(x[0] @ w[f"{at}b_proj.weight"].T)
    assert (q**2).sum(-1).max() < 0.5  # the epsilon does matter here
    assert_close(core, (0.5 * beta * (q * k).sum(-1))[:, None] * v, 1e-12)


def test_epsilon_of_rms_norm_is_added_to_the_mean():
    x, weight = np.array([3e-3, 0, -4e-3, 0]), np.array([1, 2, 3, 4])
    assert_close(ref.rms_norm(x, weight, 1e-5), x * weight / np.sqrt(6.25e-6 + 1e-5), 1e-15)


def test_epsilons_of_the_trunk_and_of_mla():
    """Input, latent, query-latent, post-attention and last norm, in one MLA layer with a dense MLP."""
    w, trace = forward_big(num_hidden_layers=1, kda_layers=(), q_lora_rank=8, mla_use_output_gate=True)
    at = "model.layers.0."
    attn = f"{at}self_attn."
    embed = trace["embed"]
    x = normed(embed, w[f"{at}input_layernorm.weight"], 0.5)
    kv = x @ w[f"{attn}kv_a_proj_with_mqa.weight"].T
    latent = normed(kv[:, :6], w[f"{attn}kv_a_layernorm.weight"], 0.2)
    assert_close(trace["mla_krope_0"], kv[:, 6:], 1e-12)
    assert_close(trace["mla_latent_0"], latent, 1e-12)

    q = normed(x @ w[f"{attn}q_a_proj.weight"].T, w[f"{attn}q_a_layernorm.weight"], 0.2) @ w[f"{attn}q_b_proj.weight"].T
    heads = []
    for head in range(2):
        key_value = latent @ w[f"{attn}kv_b_proj.weight"][head * 12 : head * 12 + 12].T
        k, v = np.hstack([key_value[:, :5], kv[:, 6:]]), key_value[:, 5:]
        scores = np.where(np.tri(len(TOKENS)) > 0, q[:, head * 7 : head * 7 + 7] @ k.T / np.sqrt(7), -np.inf)
        heads.append(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True) @ v)
    out = np.hstack(heads) * logistic(x @ w[f"{attn}g_proj.weight"].T) @ w[f"{attn}o_proj.weight"].T
    assert_close(trace["mla_out_0"], out, 1e-12)

    h = embed + out
    x = normed(h, w[f"{at}post_attention_layernorm.weight"], 0.5)
    a, u, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    h = h + ((x @ a.T) * logistic(x @ a.T) * (x @ u.T)) @ down.T
    assert_close(trace["hidden"], h[None], 1e-12)
    assert_close(trace["final_hidden"], normed(h, w["model.norm.weight"], 0.5), 1e-12)


@pytest.mark.parametrize("full_rank", [True, False])
def test_epsilon_of_o_norm(full_rank):
    w, trace = forward_big(use_full_rank_gate=full_rank)
    at = "model.layers.0."
    attn = f"{at}self_attn."
    x = normed(trace["embed"], w[f"{at}input_layernorm.weight"], 0.5)
    low = [w[f"{attn}g_a_proj.weight"], w[f"{attn}g_b_proj.weight"]] if not full_rank else []
    gate = x @ (w[f"{attn}g_proj.weight"] if full_rank else low[1] @ low[0]).T
    y = normed(trace["kda_core_0"], w[f"{attn}o_norm.weight"], 0.5) * logistic(gate).reshape(-1, 3, 4)
    assert_close(trace["kda_out_0"], y.reshape(-1, 12) @ w[f"{attn}o_proj.weight"].T, 1e-12)


def test_epsilon_of_the_attn_res_key_norm():
    """The sources too: stored blocks oldest first, the running sum last, never what was mixed."""
    w, trace = forward_big(attn_res_block_size=1, num_hidden_layers=2, kda_layers=(0, 1))
    embed, first, second = trace["embed"], *trace["hidden"]
    assert_close(trace["kda_out_0"] + trace_of_dense_mlp(w, trace), first, 1e-12)
    for name, site, sources in [
        ("attnres_mlp_0", "model.layers.0.mlp", [embed, trace["kda_out_0"]]),
        ("attnres_attn_1", "model.layers.1.self_attention", [embed, first]),
        ("attnres_mlp_1", "model.layers.1.mlp", [embed, first, trace["kda_out_1"]]),
        ("attnres_out", "model.output_attn", [embed, first, second]),
    ]:
        norm, query = w[f"{site}_res_norm.weight"], w[f"{site}_res_proj.weight"][0]
        score = np.stack([normed(s, norm, 0.5) @ query for s in sources], axis=-1)
        assert_close(trace[name], np.exp(score) / np.exp(score).sum(-1, keepdims=True), 1e-12, name)
    mix = sum(trace["attnres_out"][:, r, None] * s for r, s in enumerate([embed, first, second]))
    assert_close(trace["final_hidden"], normed(mix, w["model.norm.weight"], 0.5), 1e-12)
    assert "attnres_attn_0" not in trace


def trace_of_dense_mlp(w, trace):
    """Layer 0's MLP on the mix that its depth weights give."""
    at, pi = "model.layers.0.", trace["attnres_mlp_0"]
    x = pi[:, :1] * trace["embed"] + pi[:, 1:] * trace["kda_out_0"]
    x = normed(x, w[f"{at}post_attention_layernorm.weight"], 0.5)
    a, u = x @ w[f"{at}mlp.gate_proj.weight"].T, x @ w[f"{at}mlp.up_proj.weight"].T
    return (a * logistic(a) * u) @ w[f"{at}mlp.down_proj.weight"].T


# Feed-forward variants, by hand.


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("latent, norm", [(None, True), (6, True), (6, False)])
@pytest.mark.parametrize("act", ["silu", "situ"])
def test_moe_by_hand(act, latent, norm, shared):
    """Also the epsilon of routed_expert_norm, and that it sees the complete sum."""
    config = small(
        **BIG, hidden_act=act, activation_situ_beta=0.7, activation_situ_linear_beta=1.3,
        routed_expert_hidden_size=latent, latent_moe_use_norm=norm, num_shared_experts=shared,
    )  # fmt: skip
    at = "model.layers.1.block_sparse_moe."
    w = {name.removeprefix(at): value for name, value in checkpoint(config).items() if name.startswith(at)}
    x = np.random.default_rng(2).normal(size=(5, 12))

    def hand_mlp(x, gate, up, down):
        a, u = w[gate] @ x, w[up] @ x
        y = 0.7 * np.tanh(a / 0.7) * logistic(a) * 1.3 * np.tanh(u / 1.3) if act == "situ" else a * logistic(a) * u
        return w[down] @ y

    got, seen = ref.moe(config, Weights(w), x)
    for t in range(5):
        score = logistic(w["gate.weight"] @ x[t])
        ids = sorted(sorted(range(8), key=lambda e: -(score + w["gate.e_score_correction_bias"])[e])[:3])
        weight = 1.5 * score[ids] / score[ids].sum()
        assert seen["router_ids"][t].tolist() == ids
        assert_close(seen["router_weights"][t], weight, 1e-12)
        z = w["routed_expert_down_proj.weight"] @ x[t] if latent else x[t]
        names = [[f"experts.{e}.{name}.weight" for name in ("w1", "w3", "w2")] for e in ids]
        y = sum(g * hand_mlp(z, *name) for g, name in zip(weight, names, strict=True))
        if latent:
            y = normed(y, w["routed_expert_norm.weight"], 0.5) if norm else y
            y = w["routed_expert_up_proj.weight"] @ y
        if shared:
            y = y + hand_mlp(x[t], *(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")))
        assert_close(got[t], y, 1e-12)


def route(scores, bias, **fields):
    config = small(num_experts=len(bias), **fields)
    ids, weights = ref.router(config, np.log(np.array(scores) / (1 - np.array(scores))), np.array(bias))
    return ids.tolist(), weights


def test_group_score_is_the_sum_of_its_two_best_biased_scores():
    # The first group has the best maximum (.9), triple (1.09) and total (1.14), the second the best pair.
    scores = [[0.9, 0.1, 0.09, 0.05, 0.55, 0.5, 0.01, 0.02]]
    groups = dict(num_expert_group=2, topk_group=1, num_experts_per_token=2, routed_scaling_factor=1.0)
    ids, weights = route(scores, np.zeros(8), **groups)
    assert ids == [[4, 5]]
    assert_close(weights, [[0.55 / 1.05, 0.5 / 1.05]], 1e-12)
    ids, weights = route(scores, [0, 0.1, 0, 0, 0, 0, 0, 0], **groups)
    assert ids == [[0, 1]]
    assert_close(weights, [[0.9, 0.1]], 1e-12)


def test_losing_groups_are_excluded_even_where_all_biased_scores_are_negative():
    # The pairs score -2.9, -1.5, -2.4 and -3.1 with the bias: groups 1 and 2 stay, though expert 0 is second best.
    scores = [[0.95, 0.15, 0.7, 0.8, 0.55, 0.05, 0.3, 0.6]]
    bias = [-1.5, -2.5, -1.5, -1.5, -1.0, -2.0, -2.0, -2.0]
    groups = dict(num_expert_group=4, topk_group=2, num_experts_per_token=4)
    assert route(scores, bias, **groups)[0] == [[2, 3, 4, 5]]
    assert route(scores, bias, **groups | dict(num_expert_group=1, topk_group=1))[0] == [[0, 2, 3, 4]]


def test_ties_go_to_the_lowest_index():
    assert route([[0.5] * 6], np.zeros(6), num_experts_per_token=3)[0] == [[0, 1, 2]]
    assert route([[0.25, 0.5, 0.5, 0.5]], np.zeros(4), num_experts_per_token=2)[0] == [[1, 2]]
    grouped = dict(num_expert_group=3, topk_group=1, num_experts_per_token=1)
    assert route([[0.25, 0.25, 0.5, 0.5, 0.5, 0.5]], np.zeros(6), **grouped)[0] == [[2]]


def test_a_single_expert_keeps_its_score():
    ids, weights = route([[0.2, 0.8, 0.3]], np.zeros(3), num_experts_per_token=1, routed_scaling_factor=2.5)
    assert ids == [[1]]
    assert_close(weights, [[2.0]], 1e-12)


def test_without_renormalisation_the_weights_are_the_scaled_scores():
    ids, weights = route([[0.2, 0.8, 0.3]], np.zeros(3), num_experts_per_token=2, moe_renormalize=False)
    assert ids == [[1, 2]]
    assert_close(weights, [[1.2, 0.45]], 1e-12)


@pytest.mark.parametrize(
    "first, freq, moe", [(0, 1, {0, 1, 2, 3}), (2, 1, {2, 3}), (1, 2, {2}), (0, 3, {0, 3}), (4, 1, set())]
)
def test_which_layers_are_mixtures(first, freq, moe):
    config = small(first_k_dense_replace=first, moe_layer_freq=freq)
    trace = Reference(config, checkpoint(config)).forward(TOKENS)[2]
    assert {layer for layer in range(4) if f"moe_out_{layer}" in trace} == moe


def test_forced_routing():
    config = small()
    model = Reference(config, checkpoint(config))
    logits, _, trace = model.forward(TOKENS)
    own = {name: ids[:, ::-1] for name, ids in trace.items() if name.startswith("router_ids")}
    assert np.array_equal(model.forward(TOKENS, routing=own)[0], logits)
    forced, _, seen = model.forward(TOKENS, routing={"router_ids_1": np.array([[7, 0, 4]] * len(TOKENS))})
    assert (seen["router_ids_1"] == [0, 4, 7]).all()
    every = np.array([np.arange(8)] * len(TOKENS))
    scores = model.forward(TOKENS, routing={"router_ids_1": every})[2]["router_weights_1"][:, [0, 4, 7]]
    assert_close(seen["router_weights_1"], 1.5 * scores / scores.sum(-1, keepdims=True), 1e-12)
    assert np.abs(forced - logits).max() > 1e-2


# The trunk.


@pytest.mark.parametrize("block", [1, 2, 3, 4, 9])
def test_zero_depth_queries_weigh_all_sources_alike(block):
    config = small(attn_res_block_size=block)
    tensors = checkpoint(config)
    zero = {name: 0 * value for name, value in tensors.items() if name.endswith("_res_proj.weight")}
    trace = Reference(config, tensors | zero).forward(TOKENS)[2]
    for layer in range(4):
        R = layer // block + 2
        assert trace[f"attnres_R_{layer}"] == R
        assert_close(trace[f"attnres_mlp_{layer}"], np.full((len(TOKENS), R), 1 / R), 1e-15)
        if layer:
            R = -(-layer // block) + 1
            assert_close(trace[f"attnres_attn_{layer}"], np.full((len(TOKENS), R), 1 / R), 1e-15)
    R = -(-4 // block) + 1
    assert_close(trace["attnres_out"], np.full((len(TOKENS), R), 1 / R), 1e-15)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 9])
def test_zero_depth_queries_make_a_plain_residual_stream(block):
    """The mix then is the plain stream divided by R, and a norm without epsilon does not see R."""
    plain = small(rms_norm_eps=1e-30)
    tensors = checkpoint(small(attn_res_block_size=block))
    tensors |= {name: 0 * value for name, value in tensors.items() if name.endswith("_res_proj.weight")}
    want = Reference(plain, tensors).forward(TOKENS)[0]
    got = Reference(small(rms_norm_eps=1e-30, attn_res_block_size=block), tensors).forward(TOKENS)[0]
    assert_close(got, want, 1e-11)


def test_the_residual_stream_without_attn_res():
    config = small(num_hidden_layers=3, kda_layers=(0, 1))
    trace = Reference(config, checkpoint(config)).forward(TOKENS)[2]
    assert not [name for name in trace if name.startswith("attnres")]
    hidden = trace["hidden"]
    assert_close(hidden[1], hidden[0] + trace["kda_out_1"] + trace["moe_out_1"], 1e-12)
    assert_close(hidden[2], hidden[1] + trace["mla_out_2"] + trace["moe_out_2"], 1e-12)


def test_the_running_sum_restarts_at_a_block():
    config = small(attn_res_block_size=2)
    trace = Reference(config, checkpoint(config)).forward(TOKENS)[2]
    hidden = trace["hidden"]
    assert_close(hidden[1], hidden[0] + trace["kda_out_1"] + trace["moe_out_1"], 1e-12)
    assert_close(hidden[2], trace["mla_out_2"] + trace["moe_out_2"], 1e-12)


# Any combination of fields.


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_equals_any_split(variant):
    config = small(**VARIANTS[variant])
    model = Reference(config, checkpoint(config))
    want, end, trace = model.forward(TOKENS)
    assert np.isfinite(want).all() and want.std() > 0.1
    for cuts in ([1], [4], [6], range(1, len(TOKENS))):
        state, logits = None, []
        for part in np.split(np.array(TOKENS), list(cuts)):
            part_logits, state, last = model.forward(part, state)
            logits.append(part_logits)
        assert_close(np.concatenate(logits), want, 1e-12)
        for layer in config.kda_layers:
            assert_close(state.recurrent[layer], end.recurrent[layer], 1e-12)
            assert_close(last[f"kda_conv_k_{layer}"], trace[f"kda_conv_k_{layer}"], 1e-12)
        for layer in config.mla_layers:
            assert_close(state.latent[layer], end.latent[layer], 1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_is_seen_by_later_ones_only(variant):
    config = small(**VARIANTS[variant])
    model = Reference(config, checkpoint(config))
    want, got = (model.forward(tokens)[0] for tokens in (TOKENS, [*TOKENS[:3], 30, *TOKENS[4:]]))
    assert_close(got[:3], want[:3], 1e-12)
    assert np.abs(got[3:] - want[3:]).max(axis=-1).min() > 1e-6


def test_forward_leaves_its_state_alone():
    config = small(**K3_FIELDS)
    model = Reference(config, checkpoint(config))
    state = model.forward(TOKENS[:4])[1]
    first = model.forward(TOKENS[4:], state)[0]
    model.forward([1, 2], state)
    assert np.array_equal(model.forward(TOKENS[4:], state)[0], first)


def test_the_initial_state_is_the_default():
    config = small(**K3_FIELDS)
    model = Reference(config, checkpoint(config))
    assert np.array_equal(model.forward(TOKENS, State.initial(config))[0], model.forward(TOKENS)[0])


def test_short_prompts_have_zeros_in_front():
    config = small()
    trace = Reference(config, checkpoint(config)).forward(TOKENS[:2])[2]
    conv = trace["kda_conv_v_0"]
    assert conv.shape == (4, 12) and not conv[:2].any() and conv[2:].any(axis=-1).all()


def test_low_rank_gates_equal_the_products_of_their_factors():
    """A rank is read from the tensor: a full-rank gate and a decay of rank D give the same function."""
    low = small(kda_decay_rank=3, kda_gate_rank=5)
    tensors = checkpoint(low)
    full = dict(tensors)
    for layer in low.kda_layers:
        at = f"model.layers.{layer}.self_attn."
        full[f"{at}g_proj.weight"] = full.pop(f"{at}g_b_proj.weight") @ full.pop(f"{at}g_a_proj.weight")
        full[f"{at}f_b_proj.weight"] = full[f"{at}f_b_proj.weight"] @ full[f"{at}f_a_proj.weight"]
        full[f"{at}f_a_proj.weight"] = np.eye(12)
    got = Reference(small(use_full_rank_gate=True), full).forward(TOKENS)[0]
    assert_close(got, Reference(low, tensors).forward(TOKENS)[0], 1e-12)


def test_greedy_is_the_argmax_of_the_whole_prefix():
    config = small(**K3_FIELDS)
    tensors = checkpoint(config)
    tokens = list(TOKENS)
    for _ in range(5):
        tokens.append(int(Reference(config, tensors).forward(tokens)[0][-1].argmax()))
    assert greedy(config, tensors, TOKENS, 5) == tokens[len(TOKENS) :]
    assert greedy(config, tensors, TOKENS, 0) == []


# Storage.


def same_logits(config, tensors, other):
    return np.array_equal(Reference(config, tensors).forward(TOKENS)[0], Reference(config, other).forward(TOKENS)[0])


def test_names_with_and_without_the_prefix():
    config = small(**K3_FIELDS)
    tensors = checkpoint(config)
    assert same_logits(config, tensors, {f"language_model.{name}": value for name, value in tensors.items()})


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3, 1), (128,)])
def test_a_log_of_any_stored_shape(shape):
    """The padding is never read: here it is NaN."""
    config = small(**K3_FIELDS)
    tensors = checkpoint(config)
    stored = {name: np.full(shape, np.nan) for name in tensors if name.endswith("A_log")}
    for name, value in stored.items():
        value.reshape(-1)[:3] = tensors[name]
    assert same_logits(config, tensors, tensors | stored)


def test_conv_weights_of_rank_two():
    config = small()
    tensors = checkpoint(config)
    assert same_logits(config, tensors, {n: v[:, 0] if "conv1d" in n else v for n, v in tensors.items()})


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_narrow_tensors_are_widened(dtype):
    config = small(**K3_FIELDS)
    narrow = {name: value.astype(dtype) for name, value in checkpoint(config).items()}
    assert same_logits(config, narrow, {name: value.astype(np.float64) for name, value in narrow.items()})
    logits, state, trace = Reference(config, narrow).forward(TOKENS)
    assert {logits.dtype, state.latent[2].dtype, trace["embed"].dtype} == {np.dtype(np.float64)}


def test_packed_experts_equal_their_decoded_weights():
    config, tensors, _, _ = load("k3_mxfp4_wide")
    decoded = {name: value for name, value in tensors.items() if not name.endswith(("_packed", "_scale"))}
    packed = [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]
    decoded |= {name: ref.mxfp4_decode(tensors[f"{name}_packed"], tensors[f"{name}_scale"]) for name in packed}
    assert len(packed) == 3 * config.num_experts * len(config.moe_layers)
    assert same_logits(config, tensors, decoded)


def test_a_missing_tensor_is_named():
    config = small()
    tensors = checkpoint(config)
    del tensors["model.layers.2.self_attn.kv_b_proj.weight"]
    with pytest.raises(KeyError, match="model.layers.2.self_attn.kv_b_proj.weight"):
        Reference(config, tensors).forward(TOKENS)
    packed = Weights({"experts.0.w1.weight_packed": np.zeros((1, 16), np.uint8)})
    with pytest.raises(KeyError, match="experts.0.w1.weight_scale"):
        packed["experts.0.w1.weight"]


@pytest.mark.parametrize("tokens", [[], [31], [-1], [[1, 2]]])
def test_bad_token_ids_are_refused(tokens):
    config = small()
    with pytest.raises(ValueError, match="token_ids"):
        Reference(config, checkpoint(config)).forward(tokens)
