"""From logits to tokens: what a user asks for, the same as arrays by row, and the draw.

A draw is keyed by (seed, position), so that a request's tokens do not depend on its neighbours or on its row.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Raises ValueError naming the field, the value and what is allowed."""

    max_tokens: int = 64  # new tokens at most
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_p: float = 1.0  # keep the most likely tokens whose probabilities reach this sum; (0, 1]
    top_k: int = 0  # keep this many most likely tokens; 0 or -1 keeps all
    seed: int | None = None  # None draws one, so that calls differ
    stop_token_ids: tuple[int, ...] = ()  # end the request, beside the model's own end tokens
    ignore_eos: bool = False  # go on past the model's own end tokens

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        listed = isinstance(stops, Sequence | np.ndarray) and not isinstance(stops, str | bytes | bytearray)
        _require(listed, "stop_token_ids", stops, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer of 1 or more"
        )
        _require(
            _is_number(self.temperature) and 0 <= self.temperature < float("inf"),
            "temperature",
            self.temperature,
            "a number of 0 or more",
        )
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(
            _is_int(self.top_k) and self.top_k >= -1,
            "top_k",
            self.top_k,
            "an integer of 1 or more, or 0 or -1 for no limit",
        )
        seed_ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63)
        _require(seed_ok, "seed", self.seed, "an integer from 0 to 2**63-1, or None")
        _require(
            all(_is_int(i) and i >= 0 for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids"
        )
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        for field in ("max_tokens", "top_k"):  # NumPy's integers may be too narrow for what is added to them
            object.__setattr__(self, field, int(getattr(self, field)))


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _require(ok: bool, field: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: allowed is {allowed}")


class RowSampling(NamedTuple):
    """SamplingParams of B rows as arrays, none of them static."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]  # 0: no limit
    seed: UInt32[Array, "B 2"]
    max_tokens: Int[Array, "B"]
    stop_ids: Int[Array, "B Z"]  # padded with -1, which no token is


def by_row(params: Sequence[SamplingParams], end_ids: Sequence[int], rows: int) -> RowSampling:
    """Arrays for `rows` rows, of which the first len(params) are requests; `end_ids` are the model's own end tokens."""
    stops = [{*p.stop_token_ids, *(() if p.ignore_eos else end_ids)} for p in params]
    width = power_of_two(max([1, *map(len, stops)]))
    table = np.full((rows, width), -1, np.int32)
    for row, ids in zip(table, stops, strict=False):
        row[: len(ids)] = sorted(ids)
    seeds = [secrets.randbits(63) if p.seed is None else int(p.seed) for p in params] + [0] * (rows - len(params))
    pad = rows - len(params)
    return RowSampling(
        temperature=jnp.array([p.temperature for p in params] + [0] * pad, jnp.float32),
        top_p=jnp.array([p.top_p for p in params] + [1] * pad, jnp.float32),
        top_k=jnp.array([min(max(p.top_k, 0), _INT32_MAX) for p in params] + [0] * pad, jnp.int32),
        seed=jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32).reshape(rows, 2),
        max_tokens=jnp.array([p.max_tokens for p in params] + [0] * pad, jnp.int32),
        stop_ids=jnp.asarray(table),
    )


def power_of_two(n: int) -> int:
    """The next power of two from n >= 1: the sizes that programs are compiled for."""
    return 1 << (n - 1).bit_length()


def sample(logits: Float[Array, "B N"], positions: Int[Array, "B"], rows: RowSampling) -> Int[Array, "B"]:
    """The token of each row at `positions` (its index in the request): argmax at temperature 0, else one draw.

    Ties at temperature 0 go to the lowest id. top_k first, then top_p of what is left; the most likely token always stays.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
        limited = jnp.any(
            (rows.top_k > 0) | (rows.top_p < 1)
        )  # sorting a vocabulary is dear: only where it is asked for
        kept = jax.lax.cond(limited, lambda: _truncate(scaled, rows), lambda: scaled)
        drawn = jax.vmap(_draw)(kept, rows.seed, positions)
        return jnp.where(rows.temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy)


def _draw(logits: Float[Array, "N"], seed: UInt32[Array, "2"], position: Int[Array, ""]) -> Int[Array, ""]:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _truncate(logits: Float[Array, "B N"], rows: RowSampling) -> Float[Array, "B N"]:
    """-inf outside top_k and top_p."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, -1)
    rank = jnp.arange(logits.shape[-1])
    ranked = jnp.where((rank < rows.top_k[:, None]) | (rows.top_k[:, None] == 0), ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability  # of the tokens that are likelier
    ranked = jnp.where((before < rows.top_p[:, None]) | (rank == 0), ranked, -jnp.inf)
    return jnp.zeros_like(logits).at[jnp.arange(logits.shape[0])[:, None], order].set(ranked)
