"""The short convolution: every implementation against float64, histories, splits, and gradients of short pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_directions, lengths_batch, relative_error, same_bits

from k3jax.batch import prepare
from k3jax.ops import conv

H, C, W = 2, 5, 4
LENGTHS = (0, 5, 0, 1, 2, 3, 4, 0)  # empty rows first, in between and last; rows shorter than the taps
TOKENS = 17  # two of padding


def oracle(x, weight, history, lengths):
    """float64 outputs [T, H, C] and histories [B, W-1, H, C] of packed rows."""
    x, weight, history = (np.asarray(a, np.float64) for a in (x, weight, history))
    y, kept, start = np.zeros(x.shape), [], 0
    for row, length in enumerate(lengths):
        line = np.concatenate([history[row], x[start : start + length]])
        for t in range(length):
            z = np.einsum("whc,hcw->hc", line[t : t + weight.shape[-1]], weight)
            y[start + t] = z / (1 + np.exp(-z))
        kept.append(line[length:])
        start += length
    return y, np.stack(kept)


# The implementations, all as (x, weight, history, lengths) -> (y, history).


def packed_rows(x, weight, history, batch):
    return conv.packed(x, weight, history, prepare(batch, 0, 8, weight.shape[-1]).prefill)


packed_compiled = jax.jit(packed_rows)


def packed(x, weight, history, lengths):
    return packed_compiled(x, weight, history, lengths_batch(lengths, len(x)))


def by_row(one):
    """An implementation for one sequence, row by row."""

    def implementation(x, weight, history, lengths):
        parts = np.split(np.asarray(x), np.cumsum(lengths))[:-1]
        found = [one(jnp.asarray(part), weight, jnp.asarray(past)) for part, past in zip(parts, history, strict=True)]
        y = np.concatenate([np.asarray(y) for y, _ in found])
        return np.concatenate([y, np.zeros_like(x[len(y) :])]), np.stack([kept for _, kept in found])

    return implementation


one_step = jax.jit(conv.step)


def steps(x, weight, history):
    y = [np.zeros_like(x[:0])]
    for token in x:
        out, history = one_step(token[None], weight, history[None])
        y, history = [*y, out], history[0]
    return np.concatenate(y), history


IMPLS = {"plain": by_row(jax.jit(conv.plain)), "step": by_row(steps), "packed": packed}


def arrays(seed=0, width=W, tokens=TOKENS, rows=8, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (tokens, H, C), (H, C, width), (rows, width - 1, H, C)
    x, weight, history = (rng.normal(size=shape) for shape in shapes)
    return x.astype(dtype), weight.astype(np.float32), history.astype(dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_packed_rows_equal_the_equation(impl, width):
    x, weight, history = arrays(width=width)
    end = sum(LENGTHS)
    (y, kept), (want_y, want_kept) = (f(x, weight, history, LENGTHS) for f in (IMPLS[impl], oracle))
    assert relative_error(y[:end], want_y[:end]) < 2e-7
    assert same_bits(np.asarray(kept), want_kept.astype(np.float32)), "the history is inputs, not outputs"


@pytest.mark.parametrize("impl", IMPLS)
def test_exact_integers(impl):
    """Tap 3 is the current token: 2 gives 2000; then 3 gives 3200 and the history is 0, 2, 3. SiLU of these is exact."""
    weight = jnp.broadcast_to(jnp.float32([1, 10, 100, 1000]), (1, 1, 4))
    x, history = jnp.float32([2, 3, 4, 5, 6]).reshape(5, 1, 1), jnp.zeros((1, 3, 1, 1))
    want = [2000, 3200, 4320, 5432, 6543]
    for cuts in ([], [1, 2], [4]):
        kept, y = history, []
        for part in np.split(np.asarray(x), cuts):
            out, kept = IMPLS[impl](part, weight, kept, (len(part),))
            y += np.ravel(out).tolist()
        assert y == want and np.ravel(kept).tolist() == [4, 5, 6], cuts
    first, kept = IMPLS[impl](x[:1], weight, history, (1,))
    assert np.ravel(first).tolist() == [2000] and np.ravel(kept).tolist() == [0, 0, 2]
    assert np.ravel(IMPLS[impl](x[:2], weight, history, (2,))[1]).tolist() == [0, 2, 3]


@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_padding_and_empty_rows_touch_nothing(poison):
    x, weight, history = arrays()
    end, empty = sum(LENGTHS), np.array(LENGTHS) == 0
    clean_y, clean = packed(x, weight, history, LENGTHS)
    x[end:] = poison
    history[empty] = poison
    y, kept = packed(x, weight, history, LENGTHS)
    assert same_bits(y[:end], clean_y[:end])
    assert same_bits(kept[~empty], clean[~empty]) and same_bits(kept[empty], history[empty])


def test_a_row_does_not_see_its_neighbours():
    x, weight, history = arrays()
    want_y, want = packed(x, weight, history, LENGTHS)
    row, tokens = 5, slice(8, 11)
    x[tokens] = np.nan
    history[row] = np.nan
    y, kept = packed(x, weight, history, LENGTHS)
    assert same_bits(np.delete(y, tokens, 0), np.delete(want_y, tokens, 0)) and np.isnan(y[tokens]).all()
    assert same_bits(np.delete(kept, row, 0), np.delete(want, row, 0))


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_is_rounded_once(impl):
    """float32 taps and sum: the result is the nearest bfloat16, or its neighbour where two are equally near."""
    x, weight, history = arrays(dtype=jnp.bfloat16)
    want, end = oracle(x, weight, history, LENGTHS)[0], sum(LENGTHS)
    y, kept = IMPLS[impl](x, weight, history, LENGTHS)
    assert np.asarray(y).dtype == np.asarray(kept).dtype == jnp.bfloat16
    assert (
        np.abs(np.asarray(y, np.float64) - want)[:end] <= 2**-9 * 1.0001 * np.exp2(np.ceil(np.log2(np.abs(want[:end]))))
    ).all()


def test_gradients_of_every_split_equal_those_of_one_call():
    """Pieces shorter than the taps keep part of the old history, and its gradient."""
    x, weight, history = arrays(tokens=5, rows=1)
    seen = np.random.default_rng(3).normal(size=(5 + W - 1, H, C)).astype(np.float32)

    def gradients(cuts):
        def loss(x, weight, history):
            y, start = [], 0
            for stop in (*cuts, 5):
                out, history = packed_rows(x[start:stop], weight, history, lengths_batch((stop - start,), stop - start))
                y, start = [*y, out], stop
            return (jnp.concatenate([*y, history[0]]) * seen).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)(x, weight, history)

    def exact(x, weight, history):
        y, kept = oracle(x, weight, history, (5,))
        return (np.concatenate([y, kept[0]]) * seen).sum()

    whole = gradients(())
    assert_directions(exact, (x, weight, history), whole, 1e-6)
    for cuts in ((1, 2), (4,)):
        assert max(map(relative_error, gradients(cuts), whole)) < 1e-6, cuts
