"""Latent attention: plain, prefill, decode and continuation from cached latents, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, Row, assert_directions, pack, relative_error, same_bits

from k3jax.batch import NOWHERE, DecodeRows, prepare
from k3jax.ops import mla

H, NOPE, ROPE, V, C = 3, 5, 2, 7, 6  # no two alike
PAGE, PAGES = 8, 16
# (cached, new) tokens of each row. The first three may be decoded; then fresh, empty and continued rows.
ROWS = ((3, 1), (16, 1), (0, 1), (0, 5), (5, 0), (8, 3), (0, 0), (13, 11), (0, 17))
ONES = 3
TOKENS = 41  # two of padding


def oracle(q, c, k_r, kv_b):
    """float64, expanded: outputs [T, H, V] of the last T tokens of one sequence of S."""
    q, c, k_r, kv_b = (np.asarray(a, np.float64) for a in (q, c, k_r, kv_b))
    k, v = np.split(np.einsum("sc,hoc->sho", c, kv_b.reshape(H, NOPE + V, C)), [NOPE], axis=-1)
    o = np.zeros((len(q), H, V))
    for t, seen in enumerate(range(len(c) - len(q) + 1, len(c) + 1)):
        score = np.einsum("hn,shn->hs", q[t, :, :NOPE], k[:seen]) + q[t, :, NOPE:] @ k_r[:seen].T
        score = score / np.sqrt(NOPE + ROPE)
        weight = np.exp(score - score.max(-1, keepdims=True))
        o[t] = np.einsum("hs,shv->hv", weight / weight.sum(-1, keepdims=True), v[:seen])
    return o


@partial(jax.jit, static_argnames="decode", compiler_options=QUICK)
def attend(q, c, k_r, kv_b, pages, batch, decode=0):
    """What a layer does with a batch whose first `decode` rows hold one token each."""
    step = prepare(batch, decode, PAGE, 4)
    pages = mla.write(pages, jnp.concatenate([c, k_r], -1), step)
    o = mla.prefill(q[decode:], c[decode:], k_r[decode:], kv_b, pages, step.prefill)
    if decode:
        absorbed = mla.absorb(kv_b, heads=H, nope=NOPE)
        o = jnp.concatenate([mla.decode(q[:decode], pages, step.decode, *absorbed), o])
    return o, pages


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sequences(rows, scale=1.0):
    """For each row the queries of its new tokens, and c and k_r of all its tokens."""
    return [
        (
            scale * normal(new, H, NOPE + ROPE, seed=i),
            normal(past + new, C, seed=i + 50),
            normal(past + new, ROPE, seed=i + 90),
        )
        for i, (past, new) in enumerate(rows)
    ]


def packed(rows, found, tokens, order, fill=0.0):
    """q, c, k_r of the new tokens, the pages with the cached ones, and the batch; all else is `fill`."""
    new = [(q, c[past:], k_r[past:]) for (past, _), (q, c, k_r) in zip(rows, found, strict=True)]
    arrays = [np.concatenate(part) for part in zip(*new, strict=True)]
    arrays = [np.concatenate([a, np.full((tokens - len(a), *a.shape[1:]), fill, np.float32)]) for a in arrays]
    pages, free, batch = np.full((len(order), PAGE, C + ROPE), fill, np.float32), iter(order), []
    for (past, length), (_, c, k_r) in zip(rows, found, strict=True):
        own = [next(free) for _ in range(-(-(past + length) // PAGE))]
        for position in range(past):
            pages[own[position // PAGE], position % PAGE] = np.concatenate([c[position], k_r[position]])
        batch.append(Row([0] * length, past, 0, own))
    return *arrays, pages, pack(batch, tokens, max(len(row.pages) for row in batch))


KV_B = normal(H * (NOPE + V), C, seed=999)


def run(rows, tokens, order, decode=0, fill=0.0, scale=1.0):
    """Real outputs, pages after the step, the oracle's outputs, and the batch."""
    found = sequences(rows, scale)
    q, c, k_r, pages, batch = packed(rows, found, tokens, order, fill)
    o, pages = attend(q, c, k_r, KV_B, pages, batch, decode=decode)
    want = np.concatenate([oracle(*row, KV_B) for row in found])
    return np.asarray(o)[: len(want)], np.asarray(pages), want, batch


# float32 was seen within 2e-7 of float64, and within 6e-7 where scores reach 100.
BOUND = 1e-6


@pytest.mark.parametrize("decode", [0, ONES])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_packed_rows_equal_the_equation(decode, scale):
    """Rows with and without a past together, decoded and prefilled; the scale is that of the expanded key."""
    o, _, want, _ = run(ROWS, TOKENS, range(PAGES), decode, scale=scale)
    assert relative_error(o, want) < BOUND


def test_plain_equals_the_equation():
    q, c, k_r = sequences([(0, 17)])[0]
    assert relative_error(mla.plain(q, c, k_r, KV_B), oracle(q, c, k_r, KV_B)) < BOUND


def test_more_queries_than_a_block():
    rows = ((20, 130), (0, 150), (9, 1))
    assert sum(new for _, new in rows) > mla.QUERIES
    o, _, want, _ = run(rows, 290, range(40))
    assert relative_error(o, want) < BOUND


def test_without_a_cache_rows_have_no_past():
    """No pages, as in training, and a batch whose page lists are empty."""
    rows = ((0, 5), (0, 0), (0, 17), (0, 1))
    found = sequences(rows)
    q, c, k_r, pages, batch = packed(rows, found, 25, range(PAGES))
    want = np.concatenate([oracle(*row, KV_B) for row in found])
    listless = batch._replace(block_table=jnp.zeros((4, 0), jnp.int32))
    for memory, each in ((None, batch), (pages, listless)):
        step = jax.jit(lambda batch: prepare(batch, 0, PAGE, 4))(each)
        o = jax.jit(mla.prefill)(q, c, k_r, KV_B, memory, step.prefill)
        assert relative_error(o[: len(want)], want) < BOUND
        if memory is not None:
            assert same_bits(mla.write(jnp.asarray(pages), np.concatenate([c, k_r], -1), step), pages)


@pytest.mark.parametrize("decode", [0, ONES])
def test_page_order_does_not_matter(decode):
    want = run(ROWS, TOKENS, range(PAGES), decode)[0]
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(PAGES)
        assert same_bits(run(ROWS, TOKENS, order, decode)[0], want)


@pytest.mark.parametrize("decode", [0, ONES])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_padding_and_what_a_row_does_not_own_change_nothing(decode, poison):
    """Poisoned: padding tokens, pages of nobody, and the end of each row's last page."""
    want_o, want_pages, _, _ = run(ROWS, TOKENS, range(PAGES), decode)
    o, pages, _, _ = run(ROWS, TOKENS, range(PAGES), decode, fill=poison)
    assert same_bits(o, want_o)
    written = want_pages != 0
    assert same_bits(pages[written], want_pages[written]) and same_bits(
        pages[~written], np.full_like(pages[~written], poison)
    )


def test_latents_are_written_where_the_row_keeps_them():
    """Nothing else in the pool changes, and what is written is what came in, bit by bit."""
    found, order = sequences(ROWS), np.random.default_rng(1).permutation(PAGES)
    q, c, k_r, pages, batch = packed(ROWS, found, TOKENS, order)
    want = pages.copy()
    for (past, new), own, (_, c_row, k_row) in zip(ROWS, np.asarray(batch.block_table), found, strict=True):
        for position in range(past, past + new):
            want[own[position // PAGE], position % PAGE] = np.concatenate([c_row[position], k_row[position]])
    assert same_bits(attend(q, c, k_r, KV_B, pages, batch)[1], want)


@pytest.mark.parametrize("decode", [0, ONES])
def test_rows_without_pages_leave_no_trace(decode):
    found = sequences(ROWS)
    q, c, k_r, pages, batch = packed(ROWS, found, TOKENS, range(PAGES), np.nan)
    nowhere = batch._replace(block_table=jnp.full_like(batch.block_table, NOWHERE))
    o, after = attend(q, c, k_r, KV_B, pages, nowhere, decode=decode)
    assert same_bits(after, pages) and np.isfinite(o[:39]).all()


def test_absorbed_weights_are_the_two_halves():
    W_UK_T, W_UV = mla.absorb(jnp.asarray(KV_B), heads=H, nope=NOPE)
    assert W_UK_T.shape == (H, NOPE, C) and W_UV.shape == (H, C, V)
    expanded = np.einsum("sc,oc->so", normal(4, C), KV_B).reshape(4, H, NOPE + V)
    np.testing.assert_allclose(np.einsum("sc,hnc->shn", normal(4, C), W_UK_T), expanded[..., :NOPE], atol=1e-5)
    np.testing.assert_allclose(np.einsum("sc,hcv->shv", normal(4, C), W_UV), expanded[..., NOPE:], atol=1e-5)


# Gradients.


def gradients(loss, *arguments):
    return jax.jit(jax.grad(loss, argnums=range(len(arguments))), compiler_options=QUICK)(*arguments)


def weighted(o):
    return (o * np.random.default_rng(5).normal(size=o.shape)).sum()


def fresh_rows(lengths):
    """A loss over fresh packed rows, its float64 form, and the arguments."""
    rows = [(0, n) for n in lengths]
    q, c, k_r, _, batch = packed(rows, sequences(rows), sum(lengths), range(PAGES))
    step, cuts = jax.jit(lambda batch: prepare(batch, 0, PAGE, 4))(batch), np.cumsum(lengths)[:-1]

    def exact(*arguments):
        rows = zip(*(np.split(a, cuts) for a in arguments[:3]), strict=True)
        return weighted(np.concatenate([oracle(*row, arguments[3]) for row in rows]))

    return lambda *a: weighted(mla.prefill(*a, None, step.prefill)), exact, (q, c, k_r, KV_B)


def test_gradients():
    loss, exact, arguments = fresh_rows((5, 0, 1, 6))
    assert_directions(exact, arguments, gradients(loss, *arguments), 1e-5)


def test_gradients_where_later_tokens_score_far_higher():
    """A masked score 88 above the highest that counts overflows the exponential, and 0 * inf is NaN in the gradient."""
    loss, exact, (q, c, k_r, kv_b) = fresh_rows((5, 0, 1, 6))
    assert_directions(exact, (20 * q, c, k_r, kv_b), gradients(loss, 20 * q, c, k_r, kv_b), 1e-5)


def test_gradients_through_a_cached_past():
    """A sequence in two steps has the gradients of the sequence in one."""
    q, c, k_r = sequences([(0, 10)])[0]
    cut, batch = 4, pack([Row([0] * 6, 4, 0, (0, 1))], 6, 2)

    def loss(q, c, k_r, kv_b):
        pages = jnp.zeros((2, PAGE, C + ROPE)).at[0, :cut].set(jnp.concatenate([c, k_r], -1)[:cut])
        return weighted(attend.__wrapped__(q[cut:], c[cut:], k_r[cut:], kv_b, pages, batch)[0])

    found = gradients(loss, q, c, k_r, KV_B)
    assert_directions(lambda q, c, k_r, kv_b: weighted(oracle(q[cut:], c, k_r, kv_b)), (q, c, k_r, KV_B), found, 1e-5)


# bfloat16: what is rounded are keys, values, weights and the output; 8 bits each.


def test_bfloat16_decode_agrees_with_prefill():
    rows = (*ROWS[:ONES], (0, 1))
    narrow = [tuple(jnp.asarray(a, jnp.bfloat16) for a in row) for row in sequences(rows)]
    q, c, k_r, pages, batch = packed(
        rows, [tuple(np.asarray(a, np.float32) for a in row) for row in narrow], 4, range(PAGES)
    )
    kv_b = jnp.asarray(KV_B, jnp.bfloat16)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in (q, c, k_r)]
    want = np.concatenate([oracle(*row, kv_b) for row in narrow])
    for decode in (0, ONES):
        o, _ = attend(*arrays, kv_b, jnp.asarray(pages, jnp.bfloat16), batch, decode=decode)
        assert o.dtype == jnp.bfloat16
        assert relative_error(o, want) < 6e-3, relative_error(o, want)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_bfloat16_decode_of_several_rows_runs_anywhere(rows):
    """XLA's CPU has no bfloat16 product of some layouts (jax 0.10 and 0.11): weights as arguments, as in a model."""
    h, nope, rope, latent, v = 8, 32, 16, 64, 32
    q, pages, W_UK_T, W_UV = (
        normal(*shape, seed=i)
        for i, shape in enumerate(
            ((rows, h, nope + rope), (rows, PAGE, latent + rope), (h, nope, latent), (h, latent, v))
        )
    )
    rows_ = DecodeRows(jnp.full(rows, 5), jnp.arange(rows)[:, None])
    run = jax.jit(lambda *a: mla.decode(*a[:2], rows_, *a[2:]))
    want = run(q, pages, W_UK_T, W_UV)
    got = run(*(jnp.asarray(a, jnp.bfloat16) for a in (q, pages, W_UK_T, W_UV)))
    assert relative_error(got, want) < 2e-2
