"""Memory of a step: writing into a pool where it lies, and not holding one layer's arrays while others are computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

MANY = 16  # tokens of a step: with as many, what layers hold is worth more than the wait for one another


def put(pool: Array, index: Any, values: Array) -> Array:
    """The pool with `values` at `index`; what has an index outside of it is dropped.

    bfloat16 goes as 16 bits: for a CPU XLA widens such a scatter to float32, and the whole pool with it, in every step.
    """
    if pool.dtype != jnp.bfloat16:
        return pool.at[index].set(values, mode="drop")
    pool, values = (jax.lax.bitcast_convert_type(a, jnp.uint16) for a in (pool, values))
    return jax.lax.bitcast_convert_type(pool.at[index].set(values, mode="drop"), jnp.bfloat16)


def after(index: Int[Array, "B"], *written: Array) -> Int[Array, "B"]:
    """The same index, known only when these arrays are there.

    XLA is free to read the states of all layers before it writes the first, or to write them all at the end, and then holds
    what they are made of until there. It takes no hint, so the index is made to depend on the arrays: n (n + 1) is even.
    """
    for array in written:
        size = {2: jnp.int16, 4: jnp.int32}[array.dtype.itemsize]
        n = jax.lax.bitcast_convert_type(array.reshape(-1)[0], size).astype(jnp.int32)
        index = index + ((n * (n + 1)) & 1)
    return index


def filled(shape: tuple[int, ...], value: float, dtype: DTypeLike, when: Array) -> Array:
    """jnp.full, made only when the array `when`, of the step's tokens, is there: for what a loop fills or adds to.

    Constants wait for nothing: XLA makes the equal ones of all layers at once, in the first layer, and holds each until
    its own.
    """
    if when.shape[0] < MANY:
        return jnp.full(shape, value, dtype)
    return jnp.full(shape, jnp.asarray(value, dtype) + after(jnp.int32(0), when).astype(dtype))
