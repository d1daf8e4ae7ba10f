"""Kernels: which implementation each operation uses, chosen once and explicitly."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, Literal, get_args, get_type_hints

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.pallas import attnres, cannot_compile, conv, gated_norm, kda_decode, kda_prefill

# Up to this many experts all of them run on every token: faster than sorting tokens by expert, and simple to differentiate.
_DENSE_EXPERTS = 32
_GPU_KERNELS = ("kda", "attnres")  # the fields that may be "pallas"


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One implementation an operation. Hashable: part of the static context of a step.

    kda: prompts by "chunk" (matrix products within 64 tokens), by "scan" (token by token, the definition), both in XLA; or
    "pallas", GPU kernels for prompts and decoding, with convolution and gated norm inside.
    moe: "dense" (every expert on every token) or "grouped" (tokens sorted by expert; only chosen experts are read), in XLA.
    attnres: "xla", or "pallas": the residual add, the mixture and the norm after it in one GPU kernel.
    precision: of products of bfloat16 inputs in the GPU kernels, "default" or "high" (TF32 operands, slower). With float32
    inputs they are float32's.
    interpret: GPU kernels run in Pallas' interpreter, on any device: slow, for tests.

    A pass without a carry (logits, traces, scores, training) and one that is probed inside KDA run the XLA form: kernels have
    no gradient and show nothing of what is inside them.
    """

    kda: Literal["chunk", "scan", "pallas"] = "chunk"
    moe: Literal["dense", "grouped"] = "grouped"
    attnres: Literal["xla", "pallas"] = "xla"
    precision: Literal["default", "high"] = "default"
    interpret: bool = False

    def __post_init__(self) -> None:
        for op, choice in get_type_hints(type(self)).items():
            allowed = get_args(choice) or (True, False)
            value = getattr(self, op)
            if value not in allowed or type(value) is not type(allowed[0]):
                raise ValueError(f"kernels.{op}={getattr(self, op)!r}: allowed are {', '.join(map(repr, allowed))}")
        for field, plain in (("precision", "default"), ("interpret", False)):
            if getattr(self, field) != plain and "pallas" not in (self.kda, self.attnres):
                raise ValueError(f"kernels.{field}={getattr(self, field)!r}: allowed is {plain!r} without GPU kernels")

    @classmethod
    def auto(cls, config: K3Config, platform: str | None = None) -> Kernels:
        """What is taken where nobody chooses, for the model on devices of this platform, jax's own if None.

        On a GPU, kernels that cannot run are dropped, and one line on the standard error says which and why.
        """
        plain = cls(moe="dense" if config.num_experts <= _DENSE_EXPERTS else "grouped")
        if not _is_gpu(platform):
            return plain
        dropped = {op: reason for op in _wanted(config) if (reason := refuse(op, config, platform))}
        if dropped:
            _say_once(f"k3jax: no GPU kernels for {'; '.join(f'{op} ({why})' for op, why in dropped.items())}")
        return dataclasses.replace(plain, **{op: "pallas" for op in _wanted(config) if op not in dropped})

    @classmethod
    def resolve(cls, kernels: Kernels | str, config: K3Config, platform: str | None = None) -> Kernels:
        """What `load(kernels=...)` takes: "auto", "xla" (no GPU kernels) or a choice. ValueError for kernels that cannot run."""
        if isinstance(kernels, Kernels):
            for op in _GPU_KERNELS:
                if (
                    getattr(kernels, op) == "pallas"
                    and (op != "kda" or config.kda_layers)
                    and (reason := refuse(op, config, platform, kernels.interpret))
                ):
                    raise ValueError(f"kernels.{op}='pallas': {reason}")
            return kernels
        if kernels in ("auto", "xla"):
            return cls.auto(config, "cpu" if kernels == "xla" else platform)
        raise ValueError(f"kernels={kernels!r}: allowed are 'auto', 'xla' or a k3jax.Kernels, as Kernels(kda='pallas')")

    def explain(self, config: K3Config) -> dict[str, str]:
        """What each operation of a model runs on, and why."""
        few = f"{config.num_experts} experts, {_DENSE_EXPERTS} or fewer"
        many = f"{config.num_experts} experts, more than {_DENSE_EXPERTS}"
        why = "asked for" if self.moe != self.auto(config).moe else few if self.moe == "dense" else many
        moe = {"dense": "every expert on every token", "grouped": "tokens sorted by expert, chosen experts alone"}[
            self.moe
        ]
        only = "the only form so far"
        return {
            **self._explain_kda(config),
            "MLA prefill": f"XLA: keys and values expanded from the latents; {only}",
            "MLA decode": f"XLA: absorbed, on the latents themselves; {only}",
            "attention residuals": self._explain_attnres(config),
            "mixture of experts": f"XLA: {moe} ({why})",
        }

    def _explain_kda(self, config: K3Config) -> dict[str, str]:
        ops = ("KDA prefill", "KDA decode", "short convolution")
        if not config.kda_layers:
            return dict.fromkeys(ops, "none in this model")
        if self.kda == "pallas":
            how = "Pallas, interpreted" if self.interpret else "Pallas"
            prompts = (
                f"chunks of 32 tokens, then the state through them; precision {self.precision}; {self._prompts(config)}"
            )
            texts = prompts, "convolution, recurrence and gated norm, in place", "histories in place"
            return {op: f"{how}: {text}" for op, text in zip(ops, texts, strict=True)}
        kda = {
            "chunk": "chunks of 64 tokens as matrix products, the faster form for prompts",
            "scan": "token by token, the definition: asked for",
        }[self.kda]
        texts = f"XLA: {kda}", "XLA: one step of the recurrence", "XLA"
        return {op: f"{text}; {_why_not('kda', config)}" for op, text in zip(ops, texts, strict=True)}

    def _prompts(self, config: K3Config) -> str:
        """Which form of the prefill's kernels there is."""
        if self.interpret:
            return "in Triton"
        raw, S, rows = _prefill_arrays(config)
        precision = "highest" if raw.q.dtype == jnp.float32 else self.precision
        reason = kda_prefill.refuse(
            raw, S, rows, config.gate_lower_bound, precision=precision, tuning=kda_prefill.Mosaic()
        )
        return f"in Triton ({reason})" if reason else "long ones of many heads in Mosaic GPU, others in Triton"

    def _explain_attnres(self, config: K3Config) -> str:
        if not config.attn_res_block_size:
            return "none in this model"
        if self.attnres == "pallas":
            return (
                f"Pallas{', interpreted' * self.interpret}: residual add, mixture and norm in one; before the head XLA"
            )
        return f"XLA; {_why_not('attnres', config)}"


def refuse(op: str, config: K3Config, platform: str | None = None, interpret: bool = False) -> str | None:
    """Why the GPU kernels of an operation cannot run this model, or None: what the kernels say of a step's arrays."""
    if not interpret:
        if not _is_gpu(platform):
            return f"platform={platform or jax.default_backend()!r}: allowed is an NVIDIA GPU"
        if reason := cannot_compile() or _too_old(platform):
            return reason
    array = functools.partial(_array, dtype=config.dtype)
    if op == "attnres":
        if not config.attn_res_block_size:
            return "attn_res_block_size=None: the model has no attention residuals"
        x, vector = array(1, config.hidden_size), array(config.hidden_size)
        return attnres.refuse(x, x, [x], vector, vector, vector)
    H, K, W, bound = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size, config.gate_lower_bound
    x, single = array(1, H, K), jnp.float32
    raw, S, rows = _prefill_arrays(config)
    taps = tuple(array(H, K, W, dtype=single) for _ in range(3))
    history = array(1, W - 1, H, 3 * K)
    layer = kda_decode.Layer(x, x, x, taps, x, array(K, dtype=single))
    gates = kda_decode.Gates(raw.f, raw.b, raw.A_log, raw.dt_bias)
    return (
        kda_decode.refuse(history, S, layer, gates, kda_decode.Rows(rows.slots, rows.num_computed), bound)
        or kda_prefill.refuse(raw, S, rows, bound)
        or conv.refuse(x, x, x, array(W, H, 3 * K, dtype=single), history, *rows)
        or gated_norm.refuse(x, x, array(K, dtype=single))
    )


def _array(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _prefill_arrays(config: K3Config) -> tuple[kda_prefill.Raw, Any, kda_prefill.Rows]:
    """Abstract ones of a token, its state, and its row."""
    H, K, single, integer = config.kda_num_heads, config.kda_head_dim, jnp.float32, jnp.int32
    x, b = (_array(1, H, *rest, dtype=config.dtype) for rest in ((K,), ()))
    raw = kda_prefill.Raw(x, x, x, x, b, _array(H, dtype=single), _array(H, K, dtype=single))
    starts, row = (_array(n, dtype=integer) for n in (2, 1))
    return raw, _array(1, H, K, K, dtype=single), kda_prefill.Rows(starts, row, row)


def _wanted(config: K3Config) -> tuple[str, ...]:
    """Operations of a model that have GPU kernels."""
    there = {"kda": config.kda_layers, "attnres": config.attn_res_block_size}
    return tuple(op for op in _GPU_KERNELS if there[op])


def _why_not(op: str, config: K3Config) -> str:
    return f"no GPU kernels: {refuse(op, config) or 'not asked for'}"


def _is_gpu(platform: str | None) -> bool:
    return (platform or jax.default_backend()) in ("gpu", "cuda")


def _too_old(platform: str | None) -> str | None:
    """Of the card that is there; one that is not, for which a program may be compiled, is not asked."""
    devices = jax.local_devices() if platform is None or jax.default_backend() == "gpu" else []
    capability = str(getattr(devices[0], "compute_capability", "0") if devices else "9.0")
    if not capability.replace(".", "").isdigit() or float(capability) < 9:
        return f"compute_capability={capability}: allowed are 9.0 (Hopper) and newer"
    return None


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)
