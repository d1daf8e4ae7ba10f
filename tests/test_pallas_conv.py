"""The kernel of the short convolution over packed rows against float64, histories to the bit; on a CPU it is interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INTERPRET, QUICK, relative_error, same_bits

from k3jax.batch import NOWHERE
from k3jax.pallas.conv import Tuning, packed, refuse

H, K, V, W = 3, 16, 24, 4
LENGTHS = (3, 0, 65, 1, 200, 2, 4, 63, 5, 64, 0)  # rows shorter than the taps, empty ones, and about a run of tokens
BEGIN = (0, 3, 7)  # rows of requests that begin; the others continue
LOST = (5, 9)  # rows whose slots are out of range, above and below
SLOTS = 13
PADDING = 9


def draw(lengths=LENGTHS, H=H, K=K, V=V, width=W, dtype=np.float32, begin=BEGIN, lost=LOST, seed=0):
    """Arguments of `packed`. Whatever nothing may come from is NaN: padding, free slots, and slots of rows that begin."""
    rng = np.random.default_rng(seed)
    tokens, rows, C = sum(lengths) + PADDING, len(lengths), 2 * K + V
    qkv = rng.normal(size=(tokens, H, C))
    qkv[sum(lengths) :] = np.nan
    slots = rng.permutation(SLOTS)[:rows].astype(np.int32)
    computed = np.full(rows, 7, np.int32)
    computed[list(begin)] = 0
    pool = np.full((SLOTS, width - 1, H, C), np.nan)
    read = [row for row in range(rows) if row not in (*begin, *lost)]
    pool[slots[read]] = rng.normal(size=(len(read), *pool.shape[1:]))
    slots[list(lost)] = [NOWHERE, -1][: len(lost)]
    taps = rng.normal(size=(width, H, C)).astype(np.float32)
    q, k, v = np.split(qkv.astype(dtype), [K, 2 * K], axis=-1)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    return tuple(map(jnp.asarray, (q, k, v, taps, pool.astype(dtype), cu_seqlens, slots, computed)))


def exact(q, k, v, taps, pool, cu_seqlens, slots, computed):
    """Outputs side by side, and the pool."""
    x = np.concatenate([np.asarray(a, np.float64) for a in (q, k, v)], -1)
    taps, pool, y = np.asarray(taps, np.float64), np.array(pool), np.full(x.shape, np.nan)
    width = len(taps)
    for row, slot in enumerate(np.asarray(slots)):
        begin, end = cu_seqlens[row], cu_seqlens[row + 1]
        held = 0 <= slot < len(pool)
        past = np.asarray(pool[slot], np.float64) if held and computed[row] else np.zeros((width - 1, *x.shape[1:]))
        line = np.concatenate([past, x[begin:end]])
        for t in range(end - begin):
            z = (taps * line[t : t + width]).sum(0)
            y[begin + t] = z / (1 + np.exp(-z))
        if held and end > begin:
            pool[slot] = line[len(line) - width + 1 :].astype(pool.dtype)
    return y, pool


@functools.cache
def compiled(**fixed):
    """XLA, which interprets, must not leave out roundings between two operations in float32."""
    options = QUICK | {"xla_allow_excess_precision": False}
    return jax.jit(functools.partial(packed, interpret=INTERPRET, **fixed), compiler_options=options)


def kernel(*args, **fixed):
    *y, pool = compiled(**fixed)(*args)
    return np.concatenate([np.asarray(a) for a in y], -1), np.asarray(pool)


def assert_equal(args, **fixed):
    (y, pool), (want, want_pool) = kernel(*args, **fixed), exact(*args)
    end = args[5][-1]
    assert relative_error(y[:end], want[:end]) < 3e-7
    assert same_bits(y[end:], np.zeros_like(y[end:])), "tokens of no row, whose inputs are NaN"
    assert same_bits(pool, want_pool), "inputs, not outputs; what no row owns is as it was"


@pytest.mark.parametrize("seed", [0, 1])
def test_packed_rows_equal_the_equation(seed):
    rng = np.random.default_rng(seed)
    assert_equal(draw(rng.permutation(LENGTHS), seed=seed))


@pytest.mark.parametrize(("width", "tuning"), [(2, Tuning(8, 8, 64)), (5, Tuning(16, 4))])
def test_widths_and_runs(width, tuning):
    assert_equal(draw((3, 0, 17, 1, 2, 4, 16, 15), width=width, begin=(2,), lost=(5,)), tuning=tuning)


def test_heads_of_k3():
    """Four heads of 128 channels to a program of eight at most."""
    assert_equal(draw((1, 5, 70), H=12, K=128, V=128, begin=(1,), lost=()), tuning=Tuning(64, 4))


def test_bfloat16_is_rounded_once():
    """float32 taps and sum: the result is the nearest bfloat16, or its neighbour where two are equally near, to within the
    sum's own error: terms of up to 10 that cancel."""
    args = draw(dtype=jnp.bfloat16)
    (y, pool), (want, want_pool) = kernel(*args, tuning=Tuning(32, 4)), exact(*args)
    assert not np.asarray(y[args[5][-1] :], np.float32).any()
    y, want = y[: args[5][-1]], want[: args[5][-1]]
    assert y.dtype == jnp.bfloat16
    half_a_place = 2**-9 * np.exp2(np.ceil(np.log2(np.abs(want))))
    assert (np.abs(y.astype(np.float64) - want) <= half_a_place + 1e-6).all()
    assert same_bits(pool, want_pool)


def test_any_split_gives_what_one_pass_gives():
    """Each row in two calls. A piece may be empty, or shorter than the taps: then part of the old history is kept."""
    lengths = (1, 2, 3, 7, 6, 4, 70)
    q, k, v, taps, pool, cu, slots, computed = args = draw(lengths, begin=(1, 3), lost=())
    y, want_pool = kernel(*args)
    cuts, end, got = np.array([0, 1, 2, 1, 5, 4, 66]), sum(lengths), np.full_like(y, np.nan)
    starts = np.asarray(cu[:-1])
    for first, last in ((starts, starts + cuts), (starts + cuts, starts + lengths)):
        places = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        packed_places = np.concatenate([places, np.full(len(y) - len(places), len(y) - 1)])  # padding holds NaN
        pieces = jnp.asarray(np.cumsum([0, *(last - first)]), jnp.int32)
        x = (jnp.asarray(np.asarray(a)[packed_places]) for a in (q, k, v))
        out, pool = kernel(*x, taps, pool, pieces, slots, computed)
        got[places], computed = out[: len(places)], computed + (last - first).astype(np.int32)
        pool = jnp.asarray(pool)
    assert relative_error(got[:end], y[:end]) < 3e-7
    assert same_bits(pool, want_pool)


def test_a_row_does_not_see_its_neighbours():
    q, *rest = args = draw()
    y, pool = kernel(*args)
    start, end = args[5][4], args[5][5]
    got, got_pool = kernel(q.at[start:end].set(jnp.nan), *rest)
    assert np.isnan(got[start:end, :, :K]).all()
    others = np.delete(np.arange(sum(LENGTHS)), np.arange(start, end))
    assert same_bits(got[others], y[others]) and same_bits(got[..., K:][: sum(LENGTHS)], y[..., K:][: sum(LENGTHS)])
    assert same_bits(np.delete(got_pool, args[6][4], 0), np.delete(pool, args[6][4], 0))


def test_what_is_refused():
    q, k, v, taps, pool, cu, slots, computed = args = draw((3, 5), begin=(), lost=())
    assert refuse(*args) is None
    cases = {
        r"q=\[17, 48\]: allowed is \[T, H, K\]": (q.reshape(17, 48), *args[1:]),
        r"k=float32\[17, 3, 15\]: allowed is float32\[17, 3, 16\]": (q, k[..., 1:], *args[2:]),
        r"v=bfloat16\[17, 3, 24\]: allowed is float32\[17, 3, 24\]": (q, k, v.astype(jnp.bfloat16), *args[3:]),
        r"taps=\[1, 3, 56\]: allowed is \[W, H, 2K\+V\] with W from 2 to 8": (q, k, v, taps[:1], *args[4:]),
        r"pool=float32\[13, 2, 3, 56\]: allowed is float32\[13, 3, 3, 56\]": (q, k, v, taps, pool[:, 1:], *args[5:]),
        r"cu_seqlens=int32\[2\]: allowed is int32\[3\]": (q, k, v, taps, pool, cu[1:], slots, computed),
        r"num_computed=float32\[2\]: allowed is int32\[2\]": (*args[:7], computed.astype(jnp.float32)),
        "q=float16: allowed are float32 and bfloat16": (q.astype(jnp.float16), *args[1:]),
    }
    for reason, case in cases.items():
        with pytest.raises(ValueError, match=reason):
            packed(*case, interpret=INTERPRET)
    with pytest.raises(ValueError, match=r"tuning\.tokens=12: allowed are multiples of tuning\.unroll=8"):
        packed(*args, tuning=Tuning(12, 8), interpret=INTERPRET)
