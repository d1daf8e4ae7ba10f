"""MXFP4: 4-bit E2M1 codes, two a byte, and one E8M0 scale per 32 columns. Source: OCP Microscaling Formats v1.0.

    W[o, 2j + b] = CODES[nibble b of packed[o, j]] * 2^(scales[o, (2j + b) // 32] - 127),  b = 0 the low nibble

Groups run along the input dimension, the last: `weight_packed` [out, in/2] and `weight_scale` [out, in/32].
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, UInt8

GROUP = 32  # columns that share a scale
BIAS = 127  # scale byte of the factor 1
NAN = 255  # the one scale byte without a value
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # bit 3 is the sign
PAIRS = np.stack([CODES[np.arange(256) & 15], CODES[np.arange(256) >> 4]], axis=-1)  # [byte, nibble]
DTYPES = tuple(np.dtype(dtype) for dtype in (ml_dtypes.bfloat16, np.float32, np.float64))


def decode(
    packed: UInt8[Array, "*lead half"], scales: UInt8[Array, "*lead group"], dtype: Any
) -> Float[Array, "*lead in"]:
    """The weights W in `dtype`, inside a compiled step; equal to decode_numpy for scale bytes 2 to 254.

    Below that XLA's CPU code takes subnormals for zero: every value of byte 0, and the codes +-0.5 of byte 1.
    Byte 255 gives infinities and NaN: see check_scales. ValueError as decode_numpy, and for float64 without
    jax_enable_x64.
    """
    _check(packed, scales, dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != np.dtype(dtype):
        raise ValueError(f"decode to {np.dtype(dtype)} needs jax_enable_x64")
    return _decode(packed, scales, np.dtype(dtype), jnp)


def decode_numpy(
    packed: UInt8[np.ndarray, "*lead half"], scales: UInt8[np.ndarray, "*lead group"], dtype: Any
) -> Float[np.ndarray, "*lead in"]:
    """The weights W in `dtype`, exact; what float32 and bfloat16 cannot hold, 2^128 and more, is infinite.

    Takes 8 bytes of scratch per packed byte: decode a stack of experts one by one. ValueError for a dtype other than
    bfloat16, float32, float64, for packed or scales that are not uint8, for shapes other than [..., 16 n], [..., n], for
    scale byte 255.
    """
    _check(packed, scales, dtype)
    check_scales(scales, "scales")
    with np.errstate(over="ignore"):
        return _decode(packed, scales, np.dtype(dtype), np)


def check_scales(scales: UInt8[np.ndarray, "*shape"], name: str) -> None:
    """ValueError if a scale byte of tensor `name` is 255, NaN in E8M0, which no weight should hold."""
    count = np.count_nonzero(scales == NAN)
    if count:
        raise ValueError(f"tensor {name!r}: {count} of {scales.size} scale bytes are {NAN} (NaN), not 0 to 254")


def encode(
    weights: Float[np.ndarray, "*lead in"],
) -> tuple[UInt8[np.ndarray, "*lead half"], UInt8[np.ndarray, "*lead group"]]:
    """(packed, scales), so that decode(encode(W)) == W wherever some MXFP4 tensor holds W.

    The OCP rule: shared exponent floor(log2(amax)) - 2, kept within -127 to 127; codes rounded to nearest, ties to the
    even code, saturated at 6 (an amax of 8 times the factor loses a quarter). A group of zeros gets byte 127.
    ValueError for weights that are not floating, not finite or not [..., 32 n].
    """
    if not jnp.issubdtype(weights.dtype, jnp.floating) or not weights.ndim or weights.shape[-1] % GROUP:
        raise ValueError(f"weights of {weights.dtype}{list(weights.shape)}: floating, [..., a multiple of {GROUP}]")
    exact = np.float64 if weights.dtype.itemsize > 4 else np.float32  # scaling by powers of two stays exact
    groups = weights.astype(exact).reshape(*weights.shape[:-1], weights.shape[-1] // GROUP, GROUP)
    amax = np.abs(groups).max(axis=-1)
    if not np.isfinite(amax).all():
        raise ValueError("weights are not finite")
    exponent = np.where(amax > 0, np.frexp(amax)[1] - 3, 0).clip(-BIAS, NAN - 1 - BIAS)  # frexp: amax < 2^e <= 2 amax
    scaled = np.abs(groups) * np.ldexp(exact(1), -exponent)[..., None]
    codes = np.signbit(groups).astype(np.uint8) << 3
    for below, bound in enumerate(((CODES[:7] + CODES[1:8]) / 2).astype(exact)):
        codes += scaled >= bound if below % 2 else scaled > bound  # a tie goes to the even code
    codes = codes.reshape(weights.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + BIAS).astype(np.uint8)


def _decode(packed: Any, scales: Any, dtype: np.dtype, xp: ModuleType) -> Any:
    """Both forms of decode. The factor is made from its bits, since exp2 is not exact on every backend."""
    info = ml_dtypes.finfo(dtype)
    bits = scales.astype(f"uint{info.bits}") + (info.maxexp - 1 - BIAS)
    bits = xp.maximum(bits << info.nmant, 1 << (info.nmant - 1))  # byte 0 of an 8-bit exponent: subnormal 2^-127
    groups = xp.asarray(PAIRS, dtype)[packed].reshape(*scales.shape, GROUP)
    return (groups * bits.view(dtype)[..., None]).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _check(packed: Any, scales: Any, dtype: Any) -> None:
    if np.dtype(dtype) not in DTYPES:
        raise ValueError(f"decode to {np.dtype(dtype)}: not one of {', '.join(map(str, DTYPES))}")
    if packed.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"packed and scales are uint8, not {packed.dtype} and {scales.dtype}")
    if not scales.ndim or packed.shape != (*scales.shape[:-1], scales.shape[-1] * GROUP // 2):
        raise ValueError(f"packed {list(packed.shape)} and scales {list(scales.shape)} are not [..., 16 n], [..., n]")
