"""How a parameter is declared: shape, dtype, axes and initial distribution, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from k3jax.ops.linear import linear, rms_norm

Init = Callable[[jax.Array, tuple[int, ...], DTypeLike], Array]


class Absorbed(nnx.Variable):
    """An array made from parameters at load: neither trained nor stored."""


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the parameters of one model: the trunk's dtype and a stream of keys, or None for shapes and dtypes alone."""

    dtype: jnp.dtype
    rngs: nnx.Rngs | None

    def __call__(
        self, *shape: int, axes: tuple[str | None, ...], init: Init | None = None, dtype: DTypeLike | None = None
    ) -> nnx.Param:
        """A parameter in the trunk's dtype unless `dtype` says otherwise; matrices start at std in^-1/2, vectors at one."""
        if self.rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, dtype or self.dtype), axes=axes)
        init = init or (ones if len(shape) == 1 else scaled_normal)
        return nnx.Param(init(self.rngs.params(), shape, dtype or self.dtype), axes=axes)


def ones(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return jnp.ones(shape, dtype)


def zeros(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return jnp.zeros(shape, dtype)


def scaled_normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Normal with standard deviation in^-1/2, `in` being the last axis."""
    return (jax.random.normal(key, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)


class Linear(nnx.Module):
    """y = x Wᵀ, W [out, in]; no bias anywhere in the model."""

    def __init__(
        self, make: Maker, out: int, in_: int, axes: tuple[str | None, str | None], init: Init | None = None
    ) -> None:
        self.weight = make(out, in_, axes=axes, init=init)

    def __call__(self, x: Array) -> Array:
        return linear(x, self.weight[...])


class Vector(nnx.Module):
    """One vector under the name `weight`: a norm's gain."""

    def __init__(self, make: Maker, size: int, axis: str | None, dtype: DTypeLike | None = None) -> None:
        self.weight = make(size, axes=(axis,), dtype=dtype)


class RMSNorm(Vector):
    """RMSNorm with a plain gain; eps as given, since it differs between the trunk and the latents."""

    def __init__(self, make: Maker, size: int, axis: str | None, eps: float) -> None:
        super().__init__(make, size, axis)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)
