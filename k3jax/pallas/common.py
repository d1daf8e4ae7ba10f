"""What the Pallas-Triton kernels share: one way to launch, and functions that take one instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = 1.4426950408889634


def launch(
    kernel: Callable[..., None],
    *,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    warps: int,
    stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
    name: str,
) -> Callable[..., list[jax.Array]]:
    """A kernel over whole arrays: it indexes them by itself. `aliases`: inputs that become outputs where they are.

    The compiler is named: which one serves a call that names none changed between versions of jax.
    """
    params = plt.CompilerParams(num_warps=warps, num_stages=stages)
    options: dict[str, Any] = {"input_output_aliases": aliases or {}, "compiler_params": params, "interpret": interpret}
    return pl.pallas_call(kernel, out_shape=list(out_shape), grid=grid, name=name, **options)


def _approximate(instruction: str, x: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    asm = f"{instruction}.approx.ftz.f32 $0, $1;"
    [y] = plt.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[result])
    return y


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2^x in float32 by one instruction, relative error near 2^-22; exactly when interpreted."""
    return jnp.exp2(x) if interpret else _approximate("ex2", x)


def rcp(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / x in float32 by one instruction, relative error near 2^-23; exactly when interpreted."""
    return 1 / x if interpret else _approximate("rcp", x)


def sigmoid(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / (1 + exp(-x)) in float32 by three instructions."""
    return rcp(1 + exp2(-LOG2E * x.astype(jnp.float32), interpret), interpret)
