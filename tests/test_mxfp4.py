"""MXFP4: both decoders against a float64 table look-up and golden vectors, and the encoder as their inverse."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from k3jax.ops import mxfp4

BF16 = ml_dtypes.bfloat16
DTYPES = [BF16, np.float32, np.float64]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
golden = np.load(Path(__file__).parent / "golden" / "mxfp4_vectors.npz")
decode_jit = jax.jit(mxfp4.decode, static_argnums=2)


def by_definition(packed, scales):
    """Float64 [..., in], element by element."""
    values = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]))
    for *row, column in np.ndindex(values.shape):
        code = int(packed[*row, column // 2]) >> 4 * (column % 2) & 15
        sign = -1.0 if code & 8 else 1.0
        values[*row, column] = sign * E2M1[code & 7] * 2.0 ** (int(scales[*row, column // 32]) - 127)
    return values


def narrow(values, dtype):
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype) if dtype == BF16 else values.astype(dtype)


def same(a, b):
    """Equal bits: -0 is not 0, and NaN equals NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def every_code():
    """All 16 codes, in both nibbles, under every scale byte but 255: packed [255, 16], scales [255, 1]."""
    codes = np.stack([np.arange(16), 15 - np.arange(16)], -1).astype(np.uint8)
    packed = np.broadcast_to(codes[:, 0] | codes[:, 1] << 4, (255, 16)).copy()
    return packed, np.arange(255, dtype=np.uint8)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_vectors(dtype):
    packed, scales, values = golden["packed"], golden["scales"], golden["values"]
    same(mxfp4.decode_numpy(packed, scales, dtype), narrow(values, dtype))
    assert dtype == np.float64 or np.isinf(mxfp4.decode_numpy(packed, scales, dtype)).sum() == 24  # 2^128 and more


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale(dtype):
    packed, scales = every_code()
    same(mxfp4.decode_numpy(packed, scales, dtype), narrow(by_definition(packed, scales), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_form_equals_numpy(dtype):
    packed, scales = every_code()
    expected = mxfp4.decode_numpy(packed, scales, dtype)
    with jax.enable_x64(True):
        values = np.asarray(decode_jit(packed, scales, dtype))
    same(values[2:], expected[2:])
    low, exact = values[:2].astype(np.float64), expected[:2].astype(np.float64)
    if dtype == np.float64:
        same(low, exact)
    else:  # byte 0 has a subnormal factor, byte 1 a subnormal 0.5: exact, or taken for zero
        subnormal = (np.arange(2)[:, None] == 0) | (np.abs(exact) < 2.0**-126)
        assert ((low == exact) | (subnormal & (low == 0))).all()


def test_compiled_golden_vectors():
    packed, scales = golden["packed"], golden["scales"]
    values = np.asarray(decode_jit(packed, scales, np.float32))
    normal = np.repeat(scales, 32, axis=-1) >= 2
    np.testing.assert_array_equal(values[normal], mxfp4.decode_numpy(packed, scales, np.float32)[normal])


def test_compiled_byte_255_is_not_finite():
    values = decode_jit(np.arange(16, dtype=np.uint8)[None], np.full((1, 1), 255, np.uint8), np.float32)
    assert not np.isfinite(values).any()


def test_worked_example():
    """Eight bytes at scale byte 121 = 2^-6: the specification's own numbers."""
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :8] = list(bytes.fromhex("9C712AF05308E4B6"))
    expected = np.array([
        -0.03125, -0.0078125, 0.0078125, 0.09375, -0.015625, 0.015625, 0, -0.09375,
        0.0234375, 0.046875, -0.0, 0, 0.03125, -0.0625, 0.0625, -0.0234375,
    ])  # fmt: skip
    same(mxfp4.decode_numpy(packed, np.full((1, 1), 121, np.uint8), np.float64)[0, :16], expected)


@pytest.mark.parametrize("decode", [mxfp4.decode_numpy, decode_jit])
def test_low_nibble_is_the_even_column(decode):
    packed = np.tile(np.array([0x72, 0xB5], np.uint8), 8)[None]
    values = decode(packed, np.full((1, 1), 127, np.uint8), np.float32)
    np.testing.assert_array_equal(values[0, :4], [1.0, 6.0, 3.0, -1.5])


@pytest.mark.parametrize("byte, factor", [(127, 1.0), (126, 0.5), (128, 2.0), (0, 2.0**-127)])
def test_scale_bias(byte, factor):
    values = mxfp4.decode_numpy(np.full((1, 16), 0x22, np.uint8), np.full((1, 1), byte, np.uint8), np.float32)
    assert (values == np.float32(factor)).all() and factor > 0


def test_each_group_has_its_own_scale_and_leading_axes_are_free():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (2, 3, 5, 48), dtype=np.uint8)
    scales = rng.integers(100, 150, (2, 3, 5, 3), dtype=np.uint8)
    expected = by_definition(packed, scales)
    same(mxfp4.decode_numpy(packed, scales, np.float64), expected)
    same(np.asarray(decode_jit(packed, scales, BF16)), narrow(expected, BF16))
    assert mxfp4.decode_numpy(packed[:0], scales[:0], BF16).shape == (0, 3, 5, 96)


U8 = np.uint8
REFUSED = [
    (np.zeros((4, 24), U8), np.zeros((4, 1), U8), np.float32, r"\[\.\.\., 16 n\]"),  # in = 48, not a multiple of 32
    (np.zeros((4, 16), U8), np.zeros((3, 1), U8), np.float32, "packed"),
    (np.zeros((4, 16), U8), np.zeros((4, 2), U8), np.float32, "packed"),
    (np.zeros((4, 16), U8), np.zeros((1, 4, 1), U8), np.float32, "packed"),
    (np.zeros((), U8), np.zeros((), U8), np.float32, "packed"),
    (np.zeros((4, 16), np.int8), np.zeros((4, 1), U8), np.float32, "int8"),
    (np.zeros((4, 16), U8), np.zeros((4, 1), np.float32), np.float32, "uint8"),
    (np.zeros((4, 16), U8), np.zeros((4, 1), U8), np.float16, "float16"),
    (np.zeros((4, 16), U8), np.zeros((4, 1), U8), np.int32, "int32"),
]


@pytest.mark.parametrize("packed, scales, dtype, message", REFUSED)
@pytest.mark.parametrize("decode", [mxfp4.decode_numpy, decode_jit])
def test_refuses(decode, packed, scales, dtype, message):
    with pytest.raises(ValueError, match=message):
        decode(packed, scales, dtype)


def test_refuses_float64_that_would_be_float32():
    with pytest.raises(ValueError, match="x64"):
        mxfp4.decode(jnp.zeros((1, 16), U8), jnp.zeros((1, 1), U8), np.float64)


def test_scale_byte_255_is_refused_and_counted():
    scales = np.array([[1, 255], [255, 254]], U8)
    with pytest.raises(ValueError, match=r"experts\.7\.w1\.weight_scale.* 2 of 4 "):
        mxfp4.check_scales(scales, "experts.7.w1.weight_scale")
    with pytest.raises(ValueError, match="2 of 4"):
        mxfp4.decode_numpy(np.zeros((2, 32), U8), scales, np.float32)
    mxfp4.check_scales(np.arange(255, dtype=U8), "all others")


packed_rows = st.tuples(arrays(U8, (3, 32)), arrays(U8, (3, 2), elements=st.integers(0, 254)))


@settings(deadline=None, max_examples=60)
@given(packed_rows)
def test_encode_keeps_what_mxfp4_can_hold(row):
    weights = mxfp4.decode_numpy(*row, np.float64)
    same(mxfp4.decode_numpy(*mxfp4.encode(weights), np.float64), weights)


@settings(deadline=None, max_examples=60)
@given(arrays(np.float32, (2, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_encode_is_the_nearest_value_of_the_ocp_scale(weights):
    packed, scales = mxfp4.encode(weights)
    values = mxfp4.decode_numpy(packed, scales, np.float64)
    same(mxfp4.decode_numpy(*mxfp4.encode(values), np.float64), values)
    grid = np.array(E2M1 + [-code for code in E2M1])
    for row, group in np.ndindex(scales.shape):
        x, factor = weights[row, 32 * group :][:32].astype(np.float64), 2.0 ** (int(scales[row, group]) - 127)
        amax = np.abs(x).max()
        assert scales[row, group] in (0, 127) or 4 * factor <= amax < 8 * factor
        best = np.abs(x[:, None] - factor * grid).min(axis=-1)
        np.testing.assert_array_equal(np.abs(x - values[row, 32 * group :][:32]), best)


def test_encode_ties_go_to_the_even_code_and_large_values_saturate():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 7.999]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    weights = np.zeros((1, 32), np.float32)
    weights[0, :18] = ties + [-tie for tie in ties]
    packed, scales = mxfp4.encode(weights)
    assert scales == 127
    same(mxfp4.decode_numpy(packed, scales, np.float64)[0, :18], np.array(expected + [-value for value in expected]))


@pytest.mark.parametrize("amax, byte", [(0.0, 127), (6.0, 127), (1.0, 125), (2.0**127, 252), (2.0**-130, 0)])
def test_encode_scale_byte(amax, byte):
    assert mxfp4.encode(np.full((1, 32), amax))[1] == byte


def test_encode_keeps_bfloat16_weights_and_negative_zero():
    weights = np.tile(np.array([-0.0, 1.5, -6.0, 0.5], BF16), (2, 8))
    same(mxfp4.decode_numpy(*mxfp4.encode(weights), BF16), weights)


@pytest.mark.parametrize("bad", [np.zeros((2, 48)), np.zeros(()), np.zeros((1, 32), int), np.full((1, 32), np.nan)])
def test_encode_refuses(bad):
    with pytest.raises(ValueError, match="weights"):
        mxfp4.encode(bad)
