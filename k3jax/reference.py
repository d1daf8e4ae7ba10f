"""The whole text model in NumPy float64, one token after the other: what every faster path is compared with.

Read top to bottom it is the model: storage, norms, Kimi Delta Attention (KDA), multi-head latent attention (MLA),
feed-forward, Attention Residuals (AttnRes), and the trunk that joins them. Weights are looked up by the names of
the released checkpoint. The released model rounds to bfloat16 between steps; here nothing is rounded, so this is
the function that the rounded implementations approximate.

Axis letters are those of `k3jax.config`. Sources: the Kimi K3 report and the Kimi-Linear report for the equations;
the released checkpoint for names, shapes and epsilons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from k3jax.config import K3Config

Array = np.ndarray
Trace = dict[str, Array]  # site name -> what was seen there

# Added to a sum of squares, not to a mean: a constant of the KDA kernels, in no configuration.
L2_NORM_EPS = 1e-6

# E2M1, the four-bit float of MXFP4: bit 3 is the sign, so code 8 is -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4_decode(packed: Array, scale: Array) -> Array:
    """Widen an MXFP4 matrix: `W[o, 2j+b] = E2M1[code] * 2^(scale[o, (2j+b) // 32] - 127)`, exact in float64.

    packed: uint8 [out, in/2], the low nibble is the even column. scale: uint8 [out, in/32], an E8M0 exponent.
    Returns float64 [out, in]. Raises ValueError on scale byte 255 (NaN in E8M0). Source: OCP MX, released checkpoint.
    """
    if (scale == 255).any():
        raise ValueError("MXFP4 scale byte 255 is NaN; allowed are 0 to 254")
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return E2M1[codes] * np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, axis=-1)


class Weights:
    """Checkpoint tensors by name below a prefix, each widened to float64 when it is read.

    Nothing is kept widened, so that a lazily loaded checkpoint costs the memory of one tensor at a time. Names may
    carry K3's `language_model.`. `name` may be stored as the pair `name_packed`, `name_scale` (MXFP4). Raises KeyError
    on a missing tensor.
    """

    def __init__(self, tensors: Mapping[str, Array], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    def under(self, prefix: str) -> Weights:
        return Weights(self.tensors, self.prefix + prefix)

    def __getitem__(self, name: str) -> Array:
        for stored in (self.prefix + name, "language_model." + self.prefix + name):
            if stored in self.tensors:
                return np.asarray(self.tensors[stored]).astype(np.float64)
            if stored + "_packed" in self.tensors:
                return mxfp4_decode(self.tensors[stored + "_packed"], self.tensors[stored + "_scale"])
        raise KeyError(f"{self.prefix}{name}: not in the checkpoint, plain or packed")


@dataclasses.dataclass(frozen=True)
class State:
    """What one sequence keeps between calls; `forward` returns a new one and leaves its argument as it was.

    recurrent: KDA layer -> S [H, K, V]. conv: KDA layer -> the last W-1 raw q, k, v projections [3, W-1, H*K], oldest
    first. latent: MLA layer -> normed latent and shared key of every token so far [S, C + rope]. Nothing is kept for
    AttnRes, which runs over depth and starts anew in every call.
    """

    recurrent: dict[int, Array]
    conv: dict[int, Array]
    latent: dict[int, Array]

    @classmethod
    def initial(cls, c: K3Config) -> State:
        """Zeros before the first token."""
        H, K, W = c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size
        return cls(
            recurrent={layer: np.zeros((H, K, K)) for layer in c.kda_layers},
            conv={layer: np.zeros((3, W - 1, H * K)) for layer in c.kda_layers},
            latent={layer: np.zeros((0, c.latent_size)) for layer in c.mla_layers},
        )


def linear(x: Array, weight: Array) -> Array:
    """`y = x W^T`; x [..., in], weight [out, in] as stored. No projection of the model has a bias."""
    return x @ weight.T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis: `x / sqrt(mean(x^2) + eps) * weight` (a plain gain, not 1 + weight)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2_norm(x: Array) -> Array:
    """Unit length over the last axis: `x / sqrt(sum(x^2) + 1e-6)`."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_NORM_EPS)


def softmax(x: Array, axis: int) -> Array:
    """`exp(x) / sum(exp(x))` along an axis, shifted by the maximum so that nothing overflows."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def softplus(x: Array) -> Array:
    """`log(1 + exp(x))`, written so that neither end overflows or cancels.

    The released kernels return x itself above 20, where the two differ by less than 2.1e-9.
    """
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x: Array) -> Array:
    """`1 / (1 + exp(-x)) = exp(-softplus(-x))`, accurate in relative terms for very negative x too."""
    return np.exp(-softplus(-x))


def silu(x: Array) -> Array:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """SiTU: `beta*tanh(gate/beta)*sigmoid(gate) * linear_beta*tanh(up/linear_beta)`. Source: Kimi K3 report.

    A SwiGLU whose two branches saturate, at beta and linear_beta; the sigmoid sees the raw gate.
    """
    return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)


def short_conv(x: Array, weight: Array) -> Array:
    """Causal depthwise convolution, then SiLU: `y_t = silu(sum_i w[:, i] * x[t - (W-1) + i])`; the last tap is now.

    x: [W-1+T, C], the W-1 past inputs in front. weight: [C, W] or [C, 1, W]. Returns [T, C].
    """
    taps = weight.reshape(x.shape[1], -1).T  # [W, C]
    T = len(x) - len(taps) + 1
    return silu(np.sum([tap * x[i : i + T] for i, tap in enumerate(taps)], axis=0))


def kda_log_decay(z: Array, A_log: Array, lower_bound: float | None) -> Array:
    """Log-decay of each key channel, in nats a token, at most 0.

    Kimi K3: `g = lower_bound * sigmoid(exp(A_log) * z)`, bounded. Kimi-Linear: `g = -exp(A_log) * softplus(z)`.
    z: [T, H, K], dt_bias already added. A_log: one value a head, at the front of its tensor whatever that tensor's
    shape ([H], [1, 1, H, 1], or [128] with the tail zero), although 128 also is K3's K. Returns [T, H, K].
    """
    rate = np.exp(A_log.reshape(-1)[: z.shape[1], None])
    return -rate * softplus(z) if lower_bound is None else lower_bound * sigmoid(rate * z)


def delta_rule(S: Array, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> tuple[Array, Array]:
    """One token of the gated delta rule. Source: Kimi-Linear report.

    `S <- Diag(exp(g)) S;  u = beta * (v - S^T k);  S <- S + k u^T;  o = K^-1/2 S^T q`: the decayed state is asked what
    it holds under k, and a share beta of the error is written back, so that k is overwritten and not piled up.
    S: [H, K, V]. q, k, log_decay: [H, K], q and k of unit length. v: [H, V]. beta: [H]. Returns o [H, V] and the new S.
    """
    S = np.exp(log_decay)[:, :, None] * S
    error = v - np.einsum("hk,hkv->hv", k, S)
    S = S + k[:, :, None] * (beta[:, None] * error)[:, None, :]
    return q.shape[-1] ** -0.5 * np.einsum("hk,hkv->hv", q, S), S


def kda(c: K3Config, w: Weights, x: Array, S: Array, past: Array) -> tuple[Array, Array, Array, Trace]:
    """A KDA layer: project, convolve, run the delta rule over the tokens, norm, gate, project.

    x: normed input [T, D]. S: [H, K, V]. past: raw q, k, v projections of the W-1 tokens before [3, W-1, H*K]. Returns
    out [T, D], S and past after the last token, and the trace. Source: Kimi-Linear report, released checkpoint.
    """
    T, H, K, W = len(x), c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size
    raw = np.stack([linear(x, w[f"{name}_proj.weight"]) for name in "qkv"])
    raw = np.concatenate([past, raw], axis=1)  # [3, W-1+T, H*K]
    convs = [short_conv(row, w[f"{name}_conv1d.weight"]) for name, row in zip("qkv", raw, strict=True)]
    q, k, v = (y.reshape(T, H, K) for y in convs)
    q, k = l2_norm(q), l2_norm(k)

    z = linear(linear(x, w["f_a_proj.weight"]), w["f_b_proj.weight"]) + w["dt_bias"].reshape(-1)
    log_decay = kda_log_decay(z.reshape(T, H, K), w["A_log"], c.gate_lower_bound)
    beta = sigmoid(linear(x, w["b_proj.weight"]))  # [T, H]

    core = np.empty((T, H, K))
    for t in range(T):
        core[t], S = delta_rule(S, q[t], k[t], v[t], log_decay[t], beta[t])

    if c.use_full_rank_gate:
        gate = linear(x, w["g_proj.weight"])
    else:
        gate = linear(linear(x, w["g_a_proj.weight"]), w["g_b_proj.weight"])
    # One gain of K channels serves all heads; norm and gain come before the gate.
    y = rms_norm(core, w["o_norm.weight"], c.rms_norm_eps) * sigmoid(gate.reshape(T, H, K))
    out = linear(y.reshape(T, H * K), w["o_proj.weight"])

    trace = dict(kda_core=core, kda_out=out, kda_log_decay=log_decay, kda_beta=beta, kda_state=S)
    trace |= {f"kda_conv_{name}": row[-W:] for name, row in zip("qkv", raw, strict=True)}
    return out, S, raw[:, T:], trace


def attend(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of one query: `o = sum_s softmax_s(d^-1/2 q.k_s) v_s`. q [H, d], k [S, H, d], v [S, H, V]."""
    pi = softmax(q.shape[-1] ** -0.5 * np.einsum("hd,shd->sh", q, k), axis=0)
    return np.einsum("sh,shv->hv", pi, v)


def mla(c: K3Config, w: Weights, x: Array, cache: Array) -> tuple[Array, Array, Trace]:
    """An MLA layer, in its expanded form.

    x: normed input [T, D]. cache: [S, C + rope]. Returns out [T, D], the cache with T more tokens, and the trace.
    There are no positions: the `rope` channels keep their name but are never rotated. They are one more part of the
    key, shared by the heads, and skip the latent's norm. Source: Kimi-Linear report.
    """
    T, H, C, nope = len(x), c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim
    if c.q_lora_rank is None:
        q = linear(x, w["q_proj.weight"])
    else:
        q_latent = rms_norm(linear(x, w["q_a_proj.weight"]), w["q_a_layernorm.weight"], c.latent_norm_eps)
        q = linear(q_latent, w["q_b_proj.weight"])
    q = q.reshape(T, H, c.qk_head_dim)

    kv = linear(x, w["kv_a_proj_with_mqa.weight"])
    latent, k_rope = rms_norm(kv[:, :C], w["kv_a_layernorm.weight"], c.latent_norm_eps), kv[:, C:]
    cache = np.concatenate([cache, np.concatenate([latent, k_rope], axis=1)])
    S = len(cache)
    k_nope, v = np.split(linear(cache[:, :C], w["kv_b_proj.weight"]).reshape(S, H, -1), [nope], axis=-1)
    k_shared = np.broadcast_to(cache[:, None, C:], (S, H, c.qk_rope_head_dim))
    k = np.concatenate([k_nope, k_shared], axis=-1)

    visible = range(S - T + 1, S + 1)  # cached tokens that each query sees, itself included
    o = np.stack([attend(q[t], k[:seen], v[:seen]) for t, seen in enumerate(visible)]).reshape(T, -1)
    if c.mla_use_output_gate:
        o = o * sigmoid(linear(x, w["g_proj.weight"]))
    out = linear(o, w["o_proj.weight"])
    return out, cache, dict(mla_latent=latent, mla_krope=k_rope, mla_out=out)


def mlp(c: K3Config, x: Array, gate: Array, up: Array, down: Array) -> Array:
    """`down(act(gate x, up x))`, act SiTU or `silu(gate)*up`, for dense layers, shared experts and routed experts.

    x [..., in]; gate and up [hidden, in]; down [out, hidden]. Returns [..., out].
    """
    a, u = linear(x, gate), linear(x, up)
    if c.hidden_act == "situ":
        return linear(situ(a, u, c.activation_situ_beta, c.activation_situ_linear_beta), down)
    return linear(silu(a) * u, down)


def dense_mlp(c: K3Config, w: Weights, x: Array) -> Array:
    """The MLP whose matrices are called gate_proj, up_proj and down_proj. x [T, D] -> [T, D]."""
    return mlp(c, x, w["gate_proj.weight"], w["up_proj.weight"], w["down_proj.weight"])


def top(scores: Array, n: int) -> Array:
    """Indices of the n largest along the last axis, the lowest index first among equals."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :n]


def select_experts(c: K3Config, biased: Array) -> Array:
    """The A experts of each token: the largest biased scores [T, E], within the best groups of experts. Returns [T, A].

    Groups are contiguous; a group's score is the sum of its two largest biased scores. Source: released checkpoint
    (`noaux_tc`), where there is one group and so no limit.
    """
    if c.topk_group < c.num_expert_group:
        groups = biased.reshape(len(biased), c.num_expert_group, -1)
        best = top(np.sort(groups, axis=-1)[..., -2:].sum(axis=-1), c.topk_group)
        kept = np.zeros(groups.shape[:2], bool)
        np.put_along_axis(kept, best, True, axis=-1)
        biased = np.where(kept[..., None], groups, -np.inf).reshape(biased.shape)
    return top(biased, c.num_experts_per_token)


def router(c: K3Config, logits: Array, bias: Array, ids: Array | None = None) -> tuple[Array, Array]:
    """Experts and their weights: `s = sigmoid(logits)`, chosen by `s + bias`, weighted by s. Source: Kimi K3 report.

    logits [T, E]; bias [E]; ids [T, A] forces the choice. Returns ids ascending [T, A] and weights [T, A].
    The bias balances the load and must not leak into the weights. A single chosen expert is not divided by itself,
    which would make its weight 1 and lose the score.
    """
    scores = sigmoid(logits)
    ids = np.sort(select_experts(c, scores + bias) if ids is None else ids, axis=-1)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if c.moe_renormalize and c.num_experts_per_token > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * c.routed_scaling_factor


def moe(c: K3Config, w: Weights, x: Array, forced_ids: Array | None = None) -> tuple[Array, Trace]:
    """Mixture of experts: `up(norm(sum_e weight_e expert_e(down x))) + shared(x)`. x [T, D] -> out [T, D], trace.

    K3's experts work in a latent of L channels, between `down` and `up`; without a latent both, and the norm, are
    absent. The norm is of the complete sum. The router and the shared experts read the full width. Source: Kimi K3
    report; in the released checkpoint w1 is the gate, w3 up and w2 down.
    """
    ids, weights = router(c, linear(x, w["gate.weight"]), w["gate.e_score_correction_bias"], forced_ids)
    has_latent = c.routed_expert_hidden_size is not None
    z = linear(x, w["routed_expert_down_proj.weight"]) if has_latent else x
    y = np.zeros_like(z)
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        w1, w2, w3 = (w[f"experts.{expert}.{name}.weight"] for name in ("w1", "w2", "w3"))
        y[token] += weights[token, slot, None] * mlp(c, z[token], gate=w1, up=w3, down=w2)
    if has_latent:
        if c.latent_moe_use_norm:
            y = rms_norm(y, w["routed_expert_norm.weight"], c.rms_norm_eps)
        y = linear(y, w["routed_expert_up_proj.weight"])
    if c.num_shared_experts:
        y = y + dense_mlp(c, w.under("shared_experts."), x)
    return y, dict(router_ids=ids, router_weights=weights, moe_out=y)


def attn_res(sources: Array, norm: Array, query: Array, eps: float) -> tuple[Array, Array]:
    """Attention over depth: `pi = softmax_r(sum_d (norm*query)_d s_rd / rms(s_r)); h = sum_r pi_r s_r`.

    sources: [R, T, D], the stored blocks and last the running sum. norm: [D]; query: [1, D] as stored. The key is
    normed, `rms(s) = sqrt(mean(s^2) + eps)`; the value is the source itself. Returns h [T, D], pi [T, R].
    Source: Kimi K3 report.
    """
    scores = np.einsum("rtd,d->tr", rms_norm(sources, norm, eps), query.reshape(-1))
    pi = softmax(scores, axis=-1)
    return np.einsum("tr,rtd->td", pi, sources), pi


def mix_depth(c: K3Config, w: Weights, site: str, sources: list[Array]) -> tuple[Array, Array | None]:
    """What a site reads: the mix of the depth sources with the site's weights, or the only source there is.

    There is one source before the first stored block, and everywhere in a model with a plain residual stream.
    Returns h [T, D] and pi [T, R], or None.
    """
    if len(sources) == 1:
        return sources[0], None
    return attn_res(np.stack(sources), w[f"{site}_res_norm.weight"], w[f"{site}_res_proj.weight"], c.rms_norm_eps)


class Reference:
    """The text model over a dict of checkpoint tensors, in the released layout and any floating dtype."""

    def __init__(self, config: K3Config, tensors: Mapping[str, Array]):
        self.config, self.weights = config, Weights(tensors)

    def forward(
        self,
        token_ids: Sequence[int] | Array,
        state: State | None = None,
        *,
        routing: Mapping[str, Array] | None = None,
    ) -> tuple[Array, State, Trace]:
        """Run T tokens of one sequence, from its start or from a state.

        routing: `router_ids_L` [T, A] of the layers whose experts are forced (distinct ids; the weights still are the
        layer's own scores). Returns logits [T, N], the state after the last token, and the trace: `embed` [T, D],
        `hidden` [layers, T, D] (with AttnRes the running sum, not a full residual stream), `final_hidden` [T, D],
        `attnres_out` [T, R], and per layer, as `name_L`:
            KDA      kda_core [T, H, V]; kda_out [T, D]; kda_log_decay [T, H, K]; kda_beta [T, H];
                     kda_state [H, K, V]; kda_conv_q, _k, _v [W, H*K], the last W raw projections
            MLA      mla_latent [T, C]; mla_krope [T, rope]; mla_out [T, D]
            MoE      router_ids, router_weights [T, A]; moe_out [T, D]
            AttnRes  attnres_attn (not layer 0), attnres_mlp [T, R]; attnres_R, the R of the MLP
        Raises ValueError on an empty or not flat `token_ids`, or an id outside the vocabulary.
        """
        c, w, routing = self.config, self.weights, routing or {}
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or not ids.size or ids.min() < 0 or ids.max() >= c.vocab_size:
            raise ValueError(f"token_ids of shape {ids.shape}: allowed are 1 or more ids from 0 to {c.vocab_size - 1}")
        past, new = state or State.initial(c), State({}, {}, {})

        running = w["model.embed_tokens.weight"][ids]  # sum since the start of the depth block
        trace, hidden, blocks = {"embed": running}, [], []
        for layer in range(c.num_hidden_layers):
            at = w.under(f"model.layers.{layer}.")
            seen: dict[str, Array | None] = {}

            h, seen["attnres_attn"] = mix_depth(c, at, "self_attention", [*blocks, running])
            if c.starts_block(layer):
                # What is stored is the sum, not the mix: h is only read by the norm and never enters a sum.
                blocks.append(running)
                running = np.zeros_like(running)
            x = rms_norm(h, at["input_layernorm.weight"], c.rms_norm_eps)
            attn = at.under("self_attn.")
            if c.mixer(layer) == "kda":
                out, S, conv, sites = kda(c, attn, x, past.recurrent[layer], past.conv[layer])
                new.recurrent[layer], new.conv[layer] = S, conv
            else:
                out, new.latent[layer], sites = mla(c, attn, x, past.latent[layer])
            running = running + out
            seen |= sites

            h, seen["attnres_mlp"] = mix_depth(c, at, "mlp", [*blocks, running])
            x = rms_norm(h, at["post_attention_layernorm.weight"], c.rms_norm_eps)
            if c.is_moe(layer):
                out, sites = moe(c, at.under("block_sparse_moe."), x, routing.get(f"router_ids_{layer}"))
                seen |= sites
            else:
                out = dense_mlp(c, at.under("mlp."), x)
            running = running + out

            hidden.append(running)
            seen["attnres_R"] = np.array(len(blocks) + 1) if blocks else None
            trace |= {f"{name}_{layer}": value for name, value in seen.items() if value is not None}

        h, pi = mix_depth(c, w, "model.output_attn", [*blocks, running])
        if pi is not None:
            trace["attnres_out"] = pi
        final = rms_norm(h, w["model.norm.weight"], c.rms_norm_eps)
        trace |= {"hidden": np.stack(hidden), "final_hidden": final}
        return linear(final, w["lm_head.weight"]), new, trace


def greedy(config: K3Config, tensors: Mapping[str, Array], prompt: Sequence[int], n: int) -> list[int]:
    """The n tokens after a prompt, each the argmax (the lowest id among equals); no stop token, one token a step."""
    model = Reference(config, tensors)
    logits, state, _ = model.forward(prompt)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < n:
        logits, state, _ = model.forward(tokens[-1:], state)
        tokens.append(int(logits[-1].argmax()))
    return tokens[:n]
