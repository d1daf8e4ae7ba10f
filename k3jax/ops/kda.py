"""Kimi Delta Attention: a matrix a head, decayed by channel and corrected by the delta rule.

For each token, with k and q divided by their lengths:

    S <- diag(exp g) S        u = beta (v - Sᵀ k)        S <- S + k uᵀ        o = K^-1/2 Sᵀ q

float32 throughout: the state outlives thousands of steps. States are held [.., H, V, K]; in that layout S k sums over the
innermost axis. The gate g is a log-decay per key channel, at most 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from k3jax.batch import PrefillRows
from k3jax.ops.linear import einsum

BLOCK = 16  # tokens a sub-block: pairs inside one take their decays from differences, pairs across from an anchor
_L2_EPS = 1e-6  # added to the sum of squares, inside the root

Impl = Literal["chunk", "scan"]


class Inputs(NamedTuple):
    """What the recurrence reads; `T` may be any leading axes."""

    q: Float[Array, "T H K"]  # after convolution and SiLU, any dtype; normalised here
    k: Float[Array, "T H K"]
    v: Float[Array, "T H V"]
    g: Float[Array, "T H K"]  # log-decay, float32, <= 0
    beta: Float[Array, "T H"]  # float32, in (0, 1)


# -- gates ---------------------------------------------------------------------------------------------------------


def log_decay(
    f: Float[Array, "*t H K"], A_log: Float[Array, "H"], dt_bias: Float[Array, "H K"], lower_bound: float | None
) -> Float[Array, "*t H K"]:
    """g = bound * sigmoid(exp(A_log) (f + dt_bias)), or without a bound -exp(A_log) softplus(f + dt_bias). float32."""
    rate = jnp.exp(A_log.astype(jnp.float32))[:, None]
    z = f.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    if lower_bound is None:
        return -rate * jax.nn.softplus(z)
    return lower_bound * jax.nn.sigmoid(rate * z)


def l2_normalise(x: Float[Array, "*t K"]) -> Float[Array, "*t K"]:
    """x / sqrt(sum(x²) + 1e-6), float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


# -- the recurrence ------------------------------------------------------------------------------------------------


def step(S_BHVK: Float[Array, "B H V K"], x: Inputs) -> tuple[Float[Array, "B H V K"], Float[Array, "B H V"]]:
    """One token for each of B rows: the new state and the float32 output."""
    q, k = l2_normalise(x.q), l2_normalise(x.k)
    S = S_BHVK * jnp.exp(x.g)[..., None, :]
    u = x.beta[..., None] * (x.v.astype(jnp.float32) - einsum("bhvk,bhk->bhv", S, k))
    S = S + u[..., None] * k[..., None, :]
    return S, einsum("bhvk,bhk->bhv", S, q) * q.shape[-1] ** -0.5


def plain(S_HVK: Float[Array, "H V K"], x: Inputs) -> tuple[Float[Array, "H V K"], Float[Array, "T H V"]]:
    """One sequence, token by token: the definition."""

    def one(S: Array, token: Inputs) -> tuple[Array, Array]:
        S, o = step(S[None], jax.tree.map(lambda a: a[None], token))
        return S[0], o[0]

    return jax.lax.scan(one, S_HVK, x)


def prefill(
    S_BHVK: Float[Array, "B H V K"], x: Inputs, rows: PrefillRows, impl: Impl
) -> tuple[Float[Array, "B H V K"], Float[Array, "T H V"]]:
    """Packed rows, each continuing its own state. A row of length 0 keeps its state; outputs of padding are 0."""
    match impl:
        case "scan":
            return _scan_packed(S_BHVK, x, rows)
        case "chunk":
            return _chunk_packed(S_BHVK, x, rows)
        case _:
            raise ValueError(f"kernels.kda={impl!r}: allowed are 'chunk' and 'scan'")


def _scan_packed(S_BHVK: Array, x: Inputs, rows: PrefillRows) -> tuple[Array, Array]:
    def one(S: Array, token: tuple[Array, Inputs]) -> tuple[Array, Array]:
        row, inputs = token
        new, o = step(S.at[row].get(mode="fill", fill_value=0)[None], jax.tree.map(lambda a: a[None], inputs))
        return S.at[row].set(new[0], mode="drop"), o[0]

    S_BHVK, o = jax.lax.scan(one, S_BHVK, (rows.row, x))
    return S_BHVK, jnp.where(rows.real[:, None, None], o, 0)


# -- the chunked form ----------------------------------------------------------------------------------------------
# Within a chunk of C tokens, with G the running sum of g (s < r are rows of the chunk):
#
#     A_rs = beta_r sum_k k_r k_s exp(G_r - G_s)  (s < r)        [W U] = (I + A)^-1 diag(beta) [k exp G, v]
#     delta = U - W S        O = K^-1/2 ((q exp G) S + tril(Q) delta)        S <- exp(G_C) S + (k exp(G_C - G))ᵀ delta
#
# with Q_rs as A_rs but for q_r, without beta, diagonal included. Axes of this part: n chunks, C rows of a chunk, N chunks
# times heads, I, J and M sub-blocks, R rows of a sub-block. Every exponent that is used is <= 0, whatever the gate.
# Sums run within sub-blocks of 16 rows and are put together from there: a difference of two sums over the chunk, which
# may reach -320, would lose what two near tokens have between them.


class Decay(NamedTuple):
    """Sums of g within one chunk (any number at once, N), by sub-blocks I, J and M of R rows."""

    G: Float[Array, "N I R K"]  # from the block's start, own row included
    rest: Float[Array, "N I R K"]  # after the row to the block's end
    before: Float[Array, "N I 1 K"]  # of the blocks before
    after: Float[Array, "N I 1 K"]  # of the blocks after
    between: Float[Array, "N I J 1 K"]  # of the blocks after J and before I


def decay_sums(g: Float[Array, "N I R K"]) -> Decay:
    G = jnp.cumsum(g, axis=2)
    total = G[:, :, -1]
    block = jnp.arange(g.shape[1])
    to, source, at = block[:, None, None], block[:, None], block  # I, J and M

    def summed(which: Array, spec: str) -> Array:
        return einsum(spec, which.astype(jnp.float32), total)[..., None, :]

    return Decay(
        G=G,
        rest=total[:, :, None] - G,
        before=summed(at < source, "JM,NMK->NJK"),
        after=summed(at > source, "JM,NMK->NJK"),
        between=summed((source < at) & (at < to), "IJM,NMK->NIJK"),
    )


class Chunk(NamedTuple):
    """What a chunk contributes, all but the state: `n` chunks at once."""

    W: Float[Array, "n H C K"]
    U: Float[Array, "n H C V"]
    qG: Float[Array, "n H C K"]  # q exp G
    Q: Float[Array, "n H C C"]  # lower triangle, diagonal included
    kG: Float[Array, "n H C K"]  # k exp(G_C - G)
    decay: Float[Array, "n H K"]  # exp G_C


def chunk_terms(x: Inputs) -> Chunk:
    """The state-free part of chunks [n, H, C, ...]; padding tokens must have k = 0, g = 0 and beta = 0."""

    def blocks(a: Array) -> Array:
        return a.reshape(-1, a.shape[-2] // BLOCK, BLOCK, a.shape[-1])

    k, q = l2_normalise(jnp.stack([x.k, x.q]))
    q, v = q * q.shape[-1] ** -0.5, x.v.astype(jnp.float32)
    sums = decay_sums(blocks(x.g))
    from_start, to_end = (jnp.exp(g).reshape(x.g.shape) for g in (sums.G + sums.before, sums.rest + sums.after))
    kk, qk = (a.reshape(*x.g.shape[:-1], -1) for a in _decayed_products(blocks(k), blocks(q), sums))
    # Forward substitution in float32, reading the strict lower triangle. Powers of A (the doubling product) lose
    # everything once keys are nearly equal.
    right = x.beta[..., None] * jnp.concatenate([k * from_start, v], axis=-1)
    solved = _solved(x.beta[..., None] * kk, right)
    W, U = jnp.split(solved, [k.shape[-1]], axis=-1)
    return Chunk(W, U, q * from_start, qk, k * to_end, from_start[..., -1, :])


def _solved(A: Float[Array, "n H C C"], right: Float[Array, "n H C M"]) -> Float[Array, "n H C M"]:
    """x of (I + tril(A, -1)) x = right, by forward substitution."""

    def by_library(A: Array, right: Array) -> Array:
        return jax.lax.linalg.triangular_solve(A, right, left_side=True, lower=True, unit_diagonal=True)

    def by_rows(A: Array, right: Array) -> Array:
        lower = jnp.tril(A, -1)
        return jax.lax.custom_linear_solve(
            lambda x: x + einsum("nhrs,nhsm->nhrm", lower, x),
            right,
            solve=lambda _, b: _substitute(lower, b),
            # The transposed system, read backwards, is lower again.
            transpose_solve=lambda _, b: jnp.flip(
                _substitute(jnp.flip(jnp.swapaxes(lower, -1, -2), (-1, -2)), jnp.flip(b, -2)), -2
            ),
        )

    # On a CPU the library takes one matrix at a time, in threads of its own: 650 times as long where others want the cores.
    return jax.lax.platform_dependent(A, right, cpu=by_rows, default=by_library)


def _substitute(lower: Float[Array, "n H C C"], x: Float[Array, "n H C M"]) -> Float[Array, "n H C M"]:
    """A row of all systems at a time; `lower` is 0 from the diagonal on."""

    def row(i: Array, x: Array) -> Array:
        return x.at[:, :, i].add(-einsum("nhs,nhsm->nhm", lower[:, :, i], x))

    return jax.lax.fori_loop(0, lower.shape[-1], row, x)


def _decayed_products(
    k: Float[Array, "N I R K"], q: Float[Array, "N I R K"], g: Decay
) -> tuple[Float[Array, "N C C"], Float[Array, "N C C"]]:
    """sum_k a_r k_s exp(G_r - G_s) for s <= r, else 0, with a = k and with a = q."""
    count = k.shape[1]
    rows = jnp.stack([k, q], axis=2)
    # Inside a block: differences, masked before the exponential, which could overflow above the diagonal.
    lower = np.tril(np.ones((BLOCK, BLOCK), bool))[..., None]
    decay = jnp.exp(jnp.where(lower, g.G[..., :, None, :] - g.G[..., None, :, :], -jnp.inf))
    inside = jnp.sum(rows[..., :, None, :] * (k[..., None, :, :] * decay)[:, :, None], axis=-1)
    # Blocks before: from each row to its block's end, through the blocks between, into block I. No factor exceeds 1.
    earlier = np.tri(count, k=-1, dtype=bool)[..., None, None]
    past = k[:, None] * jnp.exp(jnp.where(earlier, g.rest[:, None] + g.between, -jnp.inf))
    rows = (rows * jnp.exp(g.G)[:, :, None]).reshape(*k.shape[:2], 2 * BLOCK, -1)
    across = einsum("NIrK,NIsK->NIrs", rows, past.reshape(*k.shape[:2], count * BLOCK, -1))
    across = across.reshape(-1, count, 2, BLOCK, count, BLOCK)
    diagonal = np.eye(count, dtype=bool)[:, None, None, :, None]
    products = jnp.where(diagonal, inside[..., None, :], across)
    kk, qk = jnp.moveaxis(products, 2, 0).reshape(2, -1, count * BLOCK, count * BLOCK)
    return kk, qk


def _through_chunk(S_HVK: Array, c: Chunk) -> tuple[Array, Array]:
    """Advance the state by one chunk; outputs [H, C, V]."""
    delta = c.U - einsum("hck,hvk->hcv", c.W, S_HVK)
    o = einsum("hck,hvk->hcv", c.qG, S_HVK) + einsum("hcs,hsv->hcv", c.Q, delta)
    return S_HVK * c.decay[:, None, :] + einsum("hck,hcv->hvk", c.kG, delta), o


def _chunk_packed(S_BHVK: Array, x: Inputs, rows: PrefillRows) -> tuple[Array, Array]:
    def take(a: Array) -> Array:
        """[T, H, c] to [n, H, C, c]; places without a token hold 0 (padding may be NaN)."""
        return jnp.moveaxis(a.at[rows.tile_token].get(mode="fill", fill_value=0), 1, 2)

    # Two gathers, one for each dtype.
    q, k, v = jnp.split(take(jnp.concatenate([x.q, x.k, x.v], -1)), np.cumsum([x.q.shape[-1], x.k.shape[-1]]), axis=-1)
    g, beta = jnp.split(take(jnp.concatenate([x.g, x.beta[..., None]], -1)), [x.g.shape[-1]], axis=-1)
    chunks = chunk_terms(Inputs(q, k, v, g, beta[..., 0]))

    def one(carry: tuple[Array, Array], tile: tuple[Array, Array, Chunk]) -> tuple[tuple[Array, Array], Array]:
        S, S_BHVK = carry
        row, first, terms = tile
        S, o = _through_chunk(jnp.where(first, S_BHVK.at[row].get(mode="clip"), S), terms)
        return (S, S_BHVK.at[row].set(S, mode="drop")), o

    (_, S_BHVK), o = jax.lax.scan(one, (jnp.zeros_like(S_BHVK[0]), S_BHVK), (rows.tile_row, rows.tile_first, chunks))
    flat = jnp.moveaxis(o, 1, 2).reshape(-1, o.shape[1], o.shape[-1])
    return S_BHVK, flat.at[rows.token_place].get(mode="fill", fill_value=0)
