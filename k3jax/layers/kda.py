"""A KDA layer: projections, short convolution, gated delta rule, gated norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from k3jax.batch import Step
from k3jax.carry import KDAState, state_HKV
from k3jax.config import K3Config
from k3jax.context import Context
from k3jax.kernels import Kernels
from k3jax.layers.param import Init, Linear, Maker, Vector
from k3jax.ops import conv, kda_kernels
from k3jax.ops import kda as ops
from k3jax.ops.linear import gated_rms_norm
from k3jax.ops.pool import put
from k3jax.probe import INSIDE_KDA, Tap


class Conv1d(nnx.Module):
    """Taps of one stream's channels, as released: [channels, 1, W]."""

    def __init__(self, make: Maker, channels: int, width: int) -> None:
        self.weight = make(channels, 1, width, axes=("heads", None, None), dtype=jnp.float32)


def _decay_rates(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """log of a rate uniform in [1, 16], as the gated-delta family starts."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1, 16)).astype(dtype)


def _decay_bias(lower_bound: float | None, A_log: nnx.Param) -> Init:
    """A bias with which every channel starts at a decay of exp(-d), log d uniform between log 1e-3 and log 1e-1."""

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        d = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(1e-3), jnp.log(1e-1)))
        rate = jnp.repeat(jnp.exp(A_log[...]), shape[0] // A_log.shape[0])
        if lower_bound is None:
            return jnp.log(jnp.expm1(d / rate)).astype(dtype)
        return (jax.scipy.special.logit(d / -lower_bound) / rate).astype(dtype)

    return init


class KDA(nnx.Module):
    """Kimi Delta Attention over a packed batch. float32 parameters are those that the release stores so."""

    def __init__(self, make: Maker, config: K3Config) -> None:
        c = config
        self.head_dim, self.lower_bound = c.kda_head_dim, c.gate_lower_bound
        self.full_rank_gate, self.eps = c.use_full_rank_gate, c.rms_norm_eps
        channels, width = c.kda_num_heads * c.kda_head_dim, c.hidden_size
        self.q_proj = Linear(make, channels, width, ("heads", "embed"))
        self.k_proj = Linear(make, channels, width, ("heads", "embed"))
        self.v_proj = Linear(make, channels, width, ("heads", "embed"))
        self.q_conv1d = Conv1d(make, channels, c.short_conv_kernel_size)
        self.k_conv1d = Conv1d(make, channels, c.short_conv_kernel_size)
        self.v_conv1d = Conv1d(make, channels, c.short_conv_kernel_size)
        self.b_proj = Linear(make, c.kda_num_heads, width, ("heads", "embed"))
        self.f_a_proj = Linear(make, c.decay_rank, width, (None, "embed"))
        self.f_b_proj = Linear(make, channels, c.decay_rank, ("heads", None))
        self.A_log = make(c.kda_num_heads, axes=("heads",), init=_decay_rates, dtype=jnp.float32)
        self.dt_bias = make(
            channels, axes=("heads",), init=_decay_bias(c.gate_lower_bound, self.A_log), dtype=jnp.float32
        )
        if self.full_rank_gate:
            self.g_proj = Linear(make, channels, width, ("heads", "embed"))
        else:
            self.g_a_proj = Linear(make, c.gate_rank, width, (None, "embed"))
            self.g_b_proj = Linear(make, channels, c.gate_rank, ("heads", None))
        self.o_norm = Vector(make, c.kda_head_dim, None, jnp.float32)
        self.o_proj = Linear(make, width, channels, ("embed", "heads"))

    def __call__(
        self, x: Float[Array, "T D"], state: KDAState | None, step: Step, ctx: Context, tap: Tap
    ) -> tuple[Float[Array, "T D"], KDAState | None]:
        """Output and new state; without a state every row starts from zero and nothing is kept."""
        if ctx.kernels.kda == "pallas" and state is not None and not ctx.probe.wants(*INSIDE_KDA):
            o, state = self._by_kernels(x, state, step, ctx.kernels)
            return tap("kda_out", ctx.ranks.sum(self.o_proj(o.reshape(x.shape[0], -1)))), state
        raw = self._projections(x, tap)
        with jax.named_scope("kda"):
            inputs, history = self._convolved(raw, x, state, step, tap)
            o, S = self._recurrence(inputs, state, step, "scan" if ctx.kernels.kda == "scan" else "chunk")
        o = tap("kda_core", o).astype(x.dtype)
        o = gated_rms_norm(o, self._gate(x), self.o_norm.weight[...], self.eps)
        tap("kda_state", state_HKV(S))
        a = tap("kda_out", ctx.ranks.sum(self.o_proj(o.reshape(x.shape[0], -1))))
        if state is None:
            return a, None
        slots = step.write_slots
        return a, KDAState(
            conv=put(state.conv, slots, history.astype(state.conv.dtype)),
            S=put(state.S, slots, S),
        )

    def _heads(self, x: Float[Array, "T C"]) -> Float[Array, "T H d"]:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)  # the heads that this rank has

    def _gate(self, x: Float[Array, "T D"]) -> Float[Array, "T H V"]:
        return self._heads(self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x)))

    def _decay_input(self, x: Float[Array, "T D"]) -> Float[Array, "T H K"]:
        return self._heads(self.f_b_proj(self.f_a_proj(x)))

    def _by_kernels(
        self, x: Float[Array, "T D"], state: KDAState, step: Step, kernels: Kernels
    ) -> tuple[Float[Array, "T H V"], KDAState]:
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        inputs = kda_kernels.Inputs(q, k, v, self._decay_input(x), self.b_proj(x), self._gate(x))
        bias, norm = self.dt_bias[...].reshape(-1, self.head_dim), self.o_norm.weight[...]
        parameters = kda_kernels.Parameters(self._taps(), self.A_log[...], bias, norm)
        form = kda_kernels.Form(self.lower_bound, self.eps, kernels.precision, kernels.interpret)
        with jax.named_scope("kda"):
            pools, o = kda_kernels.layer(kda_kernels.Pools(*state), inputs, parameters, step, form)
        return o, KDAState(*pools)

    def _projections(self, x: Float[Array, "T D"], tap: Tap) -> Float[Array, "T H C"]:
        """q, k and v before the convolution, a head's channels side by side."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        for name, stream in (("q", q), ("k", k), ("v", v)):
            tap(f"kda_conv_{name}", stream)
        return jnp.concatenate([self._heads(q), self._heads(k), self._heads(v)], axis=-1)

    def _taps(self) -> Float[Array, "H C W"]:
        return jnp.concatenate(
            [
                stream.weight[...][:, 0].astype(jnp.float32).reshape(-1, self.head_dim, stream.weight.shape[-1])
                for stream in (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            ],
            axis=1,
        )

    def _convolved(
        self, raw: Array, x: Array, state: KDAState | None, step: Step, tap: Tap
    ) -> tuple[ops.Inputs, Array]:
        weight = self._taps()
        history = _starting(
            None if state is None else state.conv, step, (weight.shape[-1] - 1, *raw.shape[1:]), raw.dtype
        )
        n = step.decode_rows
        y, kept = [], []
        if n:
            out, new = conv.step(raw[:n], weight, history[:n])
            y, kept = [out], [new]
        if step.prefill is not None:
            out, new = conv.packed(raw[n:], weight, history[n:], step.prefill)
            y, kept = [*y, out], [*kept, new]
        q, k, v = jnp.split(jnp.concatenate(y), 3, axis=-1)
        g = ops.log_decay(
            self._decay_input(x), self.A_log[...], self.dt_bias[...].reshape(-1, self.head_dim), self.lower_bound
        )
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
        return ops.Inputs(q, k, v, tap("kda_log_decay", g), tap("kda_beta", beta)), jnp.concatenate(kept)

    def _recurrence(
        self, inputs: ops.Inputs, state: KDAState | None, step: Step, impl: ops.Impl
    ) -> tuple[Array, Array]:
        S = _starting(None if state is None else state.S, step, (*inputs.v.shape[1:], self.head_dim), jnp.float32)
        n = step.decode_rows
        outputs, states = [], []
        if n:
            new, o = ops.step(S[:n], ops.Inputs(*(a[:n] for a in inputs)))
            outputs, states = [o], [new]
        if step.prefill is not None:
            new, o = ops.prefill(S[n:], ops.Inputs(*(a[n:] for a in inputs)), step.prefill, impl)
            outputs, states = [*outputs, o], [*states, new]
        return jnp.concatenate(outputs), jnp.concatenate(states)


def _starting(pool: Array | None, step: Step, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Each row's memory before the step: zero for a request that begins, whatever its slot holds."""
    rows = step.num_computed.shape[0]
    if pool is None:
        return jnp.zeros((rows, *shape), dtype)
    held = pool.at[step.read_slots].get(mode="fill", fill_value=0)
    return jnp.where((step.num_computed > 0).reshape(rows, *(1,) * len(shape)), held, 0)
