"""Multi-head latent attention without positions, in its two equal forms.

Every token leaves one latent c (normed, shared by the heads) and one key part k_r (shared, as projected). Expanded:

    [k_n v] = W_kv c        score = (q_n k_n + q_r k_r) / sqrt(nope + rope)        o = softmax(score) v

Absorbed, with W_kv split a head into W_UK and W_UV, no key or value is made for the past:

    q_c = q_n W_UK          score = (q_c c + q_r k_r) / sqrt(nope + rope)          o = W_UV sum_s softmax(score)_s c_s

Softmax in float32. Latents lie in pages [pages, page, latent]; what a row does not own is selected away, never multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from k3jax.batch import DecodeRows, PrefillRows, Step
from k3jax.ops.linear import einsum, linear
from k3jax.ops.pool import filled, put

QUERIES = 256  # queries whose scores exist at once
_LOWEST = -1e30  # stands for -inf where a difference of two must stay a number
_TINY = 1e-30


class Partial(NamedTuple):
    """Attention over some of the keys: the weighted sum of values and the log of the sum of weights."""

    o: Float[Array, "T H V"]  # float32, normalised over these keys; 0 where there are none
    lse: Float[Array, "T H"]  # very low where there are none


def plain(
    q: Float[Array, "T H Q"], c: Float[Array, "T C"], k_r: Float[Array, "T R"], kv_b: Float[Array, "HO C"]
) -> Float[Array, "T H V"]:
    """One sequence from its start, as the expanded equations stand."""
    k, v = expand(c, k_r, kv_b, heads=q.shape[1], nope=q.shape[2] - k_r.shape[1])
    score = einsum("thq,shq->hts", q, k) * q.shape[-1] ** -0.5
    score = jnp.where(jnp.tril(jnp.ones(score.shape[1:], bool)), score, -jnp.inf)
    return einsum("hts,shv->thv", jax.nn.softmax(score, -1).astype(v.dtype), v).astype(q.dtype)


def expand(
    c: Float[Array, "S C"], k_r: Float[Array, "S R"], kv_b: Float[Array, "HO C"], *, heads: int, nope: int
) -> tuple[Float[Array, "S H Q"], Float[Array, "S H V"]]:
    """Keys and values of every head from latents."""
    kv = linear(c, kv_b).reshape(c.shape[0], heads, -1)
    shared = jnp.broadcast_to(k_r[:, None], (*kv.shape[:2], k_r.shape[-1]))
    return jnp.concatenate([kv[..., :nope], shared], -1), kv[..., nope:]


def absorb(kv_b: Float[Array, "HO C"], *, heads: int, nope: int) -> tuple[Float[Array, "H N C"], Float[Array, "H C V"]]:
    """W_UK_T and W_UV, the two halves of kv_b_proj in the layouts that decoding reads. Made once, at load."""
    kv_b = kv_b.reshape(heads, -1, kv_b.shape[-1])
    return kv_b[:, :nope], jnp.swapaxes(kv_b[:, nope:], 1, 2)


def write(pages: Float[Array, "P page L"], latents: Float[Array, "T L"], step: Step) -> Float[Array, "P page L"]:
    """Each token's latent at its slot; padding goes nowhere."""
    return put(pages, (step.latent_page, step.latent_offset), latents.astype(pages.dtype))


def _gather(pages: Array, table: Array, length: Array) -> tuple[Array, Array]:
    """Cached latents [.., S, L] of rows with page lists `table` [.., P], and which of them count."""
    c = pages.at[table].get(mode="fill", fill_value=0)
    c = c.reshape(*table.shape[:-1], -1, pages.shape[-1])
    valid = jnp.arange(c.shape[-2]) < length[..., None]
    return jnp.where(valid[..., None], c, 0), valid


# -- decode: absorbed ------------------------------------------------------------------------------------------------


def decode(
    q: Float[Array, "B H Q"], pages: Float[Array, "P page L"], rows: DecodeRows,
    W_UK_T: Float[Array, "H N C"], W_UV: Float[Array, "H C V"],
) -> Float[Array, "B H V"]:  # fmt: skip
    """One query for each of B rows over its cached latents, its own included (written before)."""
    nope, latent = W_UK_T.shape[1:]
    c, valid = _gather(pages, rows.block_table, rows.seq_lens)
    # Heads first, by hand: left to itself XLA makes a product in bfloat16 that a CPU has not (jax 0.10 and 0.11).
    q_c = jnp.swapaxes(einsum("hbn,hnc->hbc", jnp.swapaxes(q[..., :nope], 0, 1), W_UK_T).astype(q.dtype), 0, 1)
    score = einsum("bhc,bsc->bhs", jnp.concatenate([q_c, q[..., nope:]], -1), c.astype(q.dtype)) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(valid[:, None], score, _LOWEST), -1)
    o_c = einsum("bhs,bsc->bhc", weights.astype(q.dtype), c[..., :latent].astype(q.dtype)).astype(q.dtype)
    return jnp.swapaxes(einsum("hbc,hcv->hbv", jnp.swapaxes(o_c, 0, 1), W_UV).astype(q.dtype), 0, 1)


# -- prefill: expanded -------------------------------------------------------------------------------------------------


def prefill(
    q: Float[Array, "T H Q"], c: Float[Array, "T C"], k_r: Float[Array, "T R"], kv_b: Float[Array, "HO C"],
    pages: Float[Array, "P page L"] | None, rows: PrefillRows,
) -> Float[Array, "T H V"]:  # fmt: skip
    """Packed rows: each token over its row's cached past (`pages`, or no past) and over the row's new tokens up to itself."""
    heads, nope = q.shape[1], q.shape[2] - k_r.shape[1]
    row, real = rows.row, rows.real
    k, v = expand(jnp.where(real[:, None], c, 0), jnp.where(real[:, None], k_r, 0), kv_b, heads=heads, nope=nope)
    index = jnp.arange(q.shape[0])
    new = _attend(q, k, v, lambda t: (row[t][:, None] == row) & (index <= t[:, None]) & real)
    if pages is None or rows.block_table.shape[1] == 0:
        return new.o.astype(q.dtype)

    def of_row(r: Array, past: Partial) -> Partial:
        def attend(past: Partial) -> Partial:
            cached, valid = _gather(pages, rows.block_table[r], rows.num_computed[r])
            past_c, past_k_r = jnp.split(cached.astype(q.dtype), [c.shape[-1]], -1)
            k, v = expand(past_c, past_k_r, kv_b, heads=heads, nope=nope)
            found = _attend(q, k, v, lambda t: (row[t] == r)[:, None] & valid)
            return jax.tree.map(lambda a, b: jnp.where((row == r).reshape(-1, *(1,) * (a.ndim - 1)), a, b), found, past)

        has_past = (rows.num_computed[r] > 0) & (rows.length[r] > 0)
        return jax.lax.cond(has_past, attend, lambda past: past, past)

    past = jax.lax.fori_loop(0, rows.num_computed.shape[0], of_row, _nothing(new.o, v.shape[-1]))
    return _merge(past, new).astype(q.dtype)


def _attend(q: Array, k: Array, v: Array, mask_of) -> Partial:
    """Attention of all T queries over S keys, a block of queries at a time; `mask_of(t)` says [t, S] which keys count."""
    # A value that is not finite reaches the queries that may see it and no others: a product would give them 0 * NaN.
    bad = ~jnp.isfinite(v).all((1, 2))
    v = jnp.where(bad[:, None, None], 0, v)

    def block(t: Array) -> Partial:
        mask: Bool[Array, "t S"] = mask_of(t)
        score = einsum("thq,shq->ths", q[t], k) * q.shape[-1] ** -0.5
        score = jnp.where(mask[:, None], score, _LOWEST)  # before the exponential: what is masked must not overflow it
        highest = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
        weights = jnp.where(mask[:, None], jnp.exp(score - highest), 0)
        total = jnp.maximum(jnp.sum(weights, axis=-1), _TINY)  # a query without keys has weights of 0 and lse near -inf
        o = einsum("ths,shv->thv", weights.astype(v.dtype), v) / total[..., None]
        o = jnp.where((mask & bad).any(-1)[:, None, None], jnp.nan, o)
        return Partial(o, highest[..., 0] + jnp.log(total))

    tokens = q.shape[0]
    if tokens <= QUERIES:
        return block(jnp.arange(tokens))

    def fill(held: Partial, start: Array) -> tuple[Partial, None]:
        found = block(start + jnp.arange(QUERIES))
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0), held, found), None

    # Not lax.map: what it fills would be a constant, see `filled`. The last block may begin within the one before.
    starts = jnp.minimum(jnp.arange(0, tokens, QUERIES), tokens - QUERIES)
    return jax.lax.scan(fill, _nothing(q, v.shape[-1]), starts)[0]


def _nothing(when: Float[Array, "T H _"], width: int) -> Partial:
    """Attention over no keys, made when this array is there."""
    shape = when.shape[:2]
    return Partial(filled((*shape, width), 0, jnp.float32, when), filled(shape, _LOWEST, jnp.float32, when))


def _merge(a: Partial, b: Partial) -> Float[Array, "T H V"]:
    """Attention over the union of two disjoint sets of keys."""
    lse = jnp.logaddexp(a.lse, b.lse)[..., None]
    return jnp.exp(a.lse[..., None] - lse) * a.o + jnp.exp(b.lse[..., None] - lse) * b.o
