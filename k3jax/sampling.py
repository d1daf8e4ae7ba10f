"""From logits to tokens: what a user asks for, the same as arrays by row, and the draw.

    logits -> + bias, penalties, min_tokens, mask ("edited") -> / temperature -> min_p, top_k, top_p ("kept") -> one draw

A draw is keyed by (seed, position), so that a request's tokens do not depend on its neighbours or on its row. Everything
about a request is an array: requests that ask for different things share one batch and one compiled program. Only asking
for logprobs at all, and a larger power of two of alternatives, is another program.

Each rank has the logits of its part of the vocabulary, and what depends on all of it is found by sums, maxima and each
rank's best candidates: no rank gathers a vocabulary, and nothing is sorted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from k3jax.ranks import Ranks

_INT32_MAX = 2**31 - 1
_SMALL = 1e-30  # a sum of probabilities; far below it float32 is 0
_LARGE = 1e9  # logits times this, over the smallest temperature, are still finite in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Raises ValueError naming the field, the value and what is allowed.

    Combinations that raise: n > 1 at temperature 0 (all samples would be one); min_tokens > max_tokens;
    logprobs_mode="processed" without logprobs; json_schema with regex. Whether a schema or a regex can be
    followed is found when a request is made of it.
    """

    max_tokens: int = 64  # new tokens at most
    min_tokens: int = 0  # nothing ends the request before this many
    n: int = 1  # samples of the prompt, each a completion of its own
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_p: float = 1.0  # keep the most likely tokens whose probabilities reach this sum; (0, 1]
    top_k: int = 0  # keep this many most likely tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this times as likely as the most likely one
    presence_penalty: float = 0.0  # subtracted from the logits of tokens generated before
    frequency_penalty: float = 0.0  # the same, once for each time
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt or output, multiplies negative ones
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # added, by token id; -inf forbids
    seed: int | None = None  # None draws one, so that calls differ
    stop: tuple[str, ...] = ()  # texts that end the request, and are left out of its text
    stop_token_ids: tuple[int, ...] = ()  # end the request, beside the model's own end tokens
    ignore_eos: bool = False  # go on past the model's own end tokens
    logprobs: int | None = None  # log-probability of each new token, and of this many most likely ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, always raw
    logprobs_mode: Literal["raw", "processed"] = "raw"  # of the model's own distribution, or of the one drawn from
    json_schema: str | None = None  # the text is JSON that fits this schema; JSON, or the same as a mapping
    regex: str | None = None  # the text as a whole matches this

    def __post_init__(self) -> None:
        for field, allowed in (("stop", "a list of texts"), ("stop_token_ids", "a list of token ids")):
            value = (self.stop,) if field == "stop" and isinstance(self.stop, str) else getattr(self, field)
            ok = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray)
            _require(ok, field, value, allowed)
            object.__setattr__(self, field, tuple(value))
        _require(
            all(map(_is_text, self.stop)), "stop", self.stop, "texts of one character or more, without lone surrogates"
        )
        _require(
            all(_is_int(i) and i >= 0 for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids"
        )
        for field, (ok, allowed) in _FIELDS.items():
            _require(ok(getattr(self, field)), field, getattr(self, field), allowed)
        _require(
            isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping from token ids to numbers"
        )
        bias = dict(self.logit_bias)
        ok = all(
            _is_int(i) and i >= 0 and _is_number(b) and (-_LARGE <= b <= _LARGE or b == -math.inf)
            for i, b in bias.items()
        )
        _require(ok, "logit_bias", bias, "token ids with numbers from -1e9 to 1e9, or -inf")
        object.__setattr__(self, "logit_bias", _Frozen((int(i), float(b)) for i, b in bias.items()))
        _require(
            self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"0 to max_tokens={self.max_tokens}"
        )
        _require(self.n == 1 or self.temperature > 0, "n", self.n, "1 at temperature 0: all samples would be one")
        processed_ok = self.logprobs_mode == "raw" or self.logprobs is not None
        _require(processed_ok, "logprobs_mode", self.logprobs_mode, "'raw' where logprobs is None")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema(self.json_schema))
        _require(self.regex is None or self.json_schema is None, "regex", self.regex, "None beside json_schema")
        for field in ("max_tokens", "min_tokens", "n", "top_k"):  # NumPy's may be too narrow for what is added to them
            object.__setattr__(self, field, int(getattr(self, field)))

    def samples(self) -> list[SamplingParams]:
        """The n requests that this one is, each with a seed: the first its own, the others made from it and their number."""
        seed = secrets.randbits(63) if self.seed is None else int(self.seed)
        seeds = [seed] + [
            int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0]) >> 1 for i in range(1, self.n)
        ]
        return [dataclasses.replace(self, n=1, seed=s) for s in seeds]


class _Frozen(dict[int, float]):
    """A mapping that a frozen dataclass can hash; nobody else holds it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and value == value  # not NaN


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and not any(0xD800 <= ord(c) < 0xE000 for c in value)


def _require(ok: bool, field: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}={' '.join(repr(value).split())[:200]}: allowed is {allowed}")


def _schema(value: Any) -> str:
    """A schema as one JSON text. Its keys stay in order: properties are written in that of the schema."""
    allowed = "a JSON schema: an object, or the JSON text of one"
    try:
        found = json.loads(value) if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
        text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()  # no lone surrogates
    except (ValueError, TypeError, RecursionError):
        found, text = None, ""
    _require(isinstance(found, dict), "json_schema", value, allowed)
    return text


def _count(value: Any, least: int, most: int = _INT32_MAX) -> bool:
    return _is_int(value) and least <= value <= most


_PENALTY = (lambda v: _is_number(v) and -2 <= v <= 2), "a number from -2 to 2"
_LOGPROBS = (lambda v: v is None or _count(v, 0)), "an integer of 0 or more (how many alternatives), or None"
# What each plain field may be: a test, and the same in words.
_FIELDS = {
    "max_tokens": (lambda v: _count(v, 1), "an integer from 1 to 2**31-1"),
    "min_tokens": (lambda v: _count(v, 0), "an integer from 0 to 2**31-1"),
    "n": (lambda v: _count(v, 1, 10_000), "an integer from 1 to 10000"),
    "temperature": (lambda v: _is_number(v) and (v == 0 or 1 / _LARGE <= v <= _LARGE), "0, or a number from 1e-9 to 1e9"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"),
    "top_k": (lambda v: _is_int(v) and v >= -1, "an integer of 1 or more, or 0 or -1 for no limit"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (lambda v: _is_number(v) and 1 / _LARGE <= v <= _LARGE, "a number from 1e-9 to 1e9; 1 changes nothing"),
    "seed": (lambda v: v is None or (_is_int(v) and 0 <= v < 2**63), "an integer from 0 to 2**63-1, or None"),
    "ignore_eos": (lambda v: isinstance(v, bool), "True or False"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "regex": (lambda v: v is None or _is_text(v), "a text of one character or more, without lone surrogates, or None"),
    "logprobs_mode": (lambda v: isinstance(v, str) and v in ("raw", "processed"), "'raw' or 'processed'"),
}  # fmt: skip


# How an assistant answers where nothing is said: temperature and top_p are those of the vendor's interface.
CHAT = SamplingParams(max_tokens=4096, temperature=1.0, top_p=0.95)


class RowSampling(NamedTuple):
    """SamplingParams by row, on the device. Nothing here changes during a request."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]  # 0: no limit
    min_p: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    repetition: Float[Array, "B"]
    seed: UInt32[Array, "B 2"]
    max_tokens: Int[Array, "B"]
    min_tokens: Int[Array, "B"]
    processed: Bool[Array, "B"]  # which logprobs
    edited: Bool[Array, "B"]  # whether bias, penalties or min_tokens have a say
    bias: Float[Array, "B N"]
    prompt: Bool[Array, "B N"]  # tokens of the prompt, where repetition matters
    ends: Bool[Array, "B N"]  # tokens that end the request


# How they are divided over ranks: axes by name, as a parameter's.
_BY_TOKEN: Any = dict.fromkeys(("bias", "prompt", "ends"), jax.P(None, "vocab"))
AXES = RowSampling(**(dict.fromkeys(RowSampling._fields, jax.P()) | _BY_TOKEN))


class Sampled(NamedTuple):
    """A token a row and, where they are asked for, log-probabilities: its own and those of the K most likely ones."""

    token: Int[Array, "B"]
    logprob: Float[Array, "B"] | None = None
    top_ids: Int[Array, "B K"] | None = None
    top_logprobs: Float[Array, "B K"] | None = None


def by_row(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    end_ids: Sequence[int],
    rows: int,
    vocabulary: int,
) -> RowSampling:
    """Arrays for `rows` rows, of which the first len(params) are requests; `end_ids` are the model's own end tokens.

    NumPy's: they go to the device together, as arguments of a program.
    """
    pad = rows - len(params)
    bias = np.zeros((rows, vocabulary), np.float32)
    seen, ends = (np.zeros((rows, vocabulary), bool) for _ in range(2))
    for row, (p, prompt) in enumerate(zip(params, prompts, strict=True)):
        bias[row, list(p.logit_bias)] = list(p.logit_bias.values())
        ends[row, stop_ids(p, end_ids)] = True
        if p.repetition_penalty != 1:
            seen[row, list(prompt)] = True
    seeds = [secrets.randbits(63) if p.seed is None else int(p.seed) for p in params] + [0] * pad

    def column(field: str, padding: float, dtype: type = np.float32) -> Any:
        return np.array([getattr(p, field) for p in params] + [padding] * pad, dtype)

    neutral = (
        ("logit_bias", {}),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1),
        ("min_tokens", 0),
    )
    arrays: dict[str, Any] = dict(
        temperature=column("temperature", 0),
        top_p=column("top_p", 1),
        top_k=np.array([min(max(p.top_k, 0), _INT32_MAX) for p in params] + [0] * pad, np.int32),
        min_p=column("min_p", 0),
        presence=column("presence_penalty", 0),
        frequency=column("frequency_penalty", 0),
        repetition=column("repetition_penalty", 1),
        seed=np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32).reshape(rows, 2),
        max_tokens=column("max_tokens", 0, np.int32),
        min_tokens=column("min_tokens", 0, np.int32),
        processed=np.array([p.logprobs_mode == "processed" for p in params] + [False] * pad, bool),
        edited=np.array([any(getattr(p, f) != v for f, v in neutral) for p in params] + [False] * pad, bool),
        bias=bias,
        prompt=seen,
        ends=ends,
    )
    return RowSampling(**arrays)


def stop_ids(params: SamplingParams, end_ids: Sequence[int]) -> list[int]:
    """The token ids that end a request."""
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else end_ids)})


def power_of_two(n: int) -> int:
    """The next power of two from n >= 1: the sizes that programs are compiled for."""
    return 1 << (n - 1).bit_length()


def sample(
    logits: Float[Array, "B N"],
    positions: Int[Array, "B"],
    counts: Int[Array, "B N"],
    rows: RowSampling,
    top: int | None = None,
    allowed: UInt32[Array, "B W"] | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  # frozen
) -> Sampled:
    """The token of each row at `positions` (its index in the request): argmax at temperature 0, else one draw.

    Ties at temperature 0 go to the lowest id; where every token is forbidden it is -1. counts: how often the row has
    generated each token. top: how many alternatives get log-probabilities; None: no log-probabilities at all. They are the
    model's own (raw), or those of the distribution drawn from (processed: truncated, renormalised; at temperature 0 certainty).
    allowed: a bit a token of the whole vocabulary, the lowest first, in words of 32; where it is 0 the row may not have the token.
    """
    sampled = rows.temperature > 0
    edited = jax.lax.cond(jnp.any(rows.edited), lambda: _edit(logits, counts, rows, ranks), lambda: logits)
    if allowed is not None:
        edited = jnp.where(_own(_unpack(allowed), logits, ranks), edited, -jnp.inf)
    greedy, best = _argmax(edited, ranks)
    scaled = edited / jnp.where(sampled, rows.temperature, 1)[:, None]
    # Sorting a vocabulary is dear: only where it is asked for.
    limited = jnp.any(sampled & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)))
    kept = jax.lax.cond(limited, lambda: _truncate(scaled, rows, ranks), lambda: scaled)
    drawn = jax.lax.cond(jnp.any(sampled), lambda: _draw(kept, rows.seed, positions, ranks), lambda: greedy)
    token = jnp.where(jnp.isfinite(best), jnp.where(sampled, drawn, greedy), -1)
    if top is None:
        return Sampled(token)
    certain = jnp.where(_ids(logits, ranks) == greedy[:, None], 0, -jnp.inf)
    drawn_from = jnp.where(sampled[:, None], kept, certain)
    of = jnp.where(rows.processed[:, None], drawn_from, logits)
    return Sampled(token, *logprobs(of, jnp.maximum(token, 0), top, ranks))


def logprobs(
    logits: Float[Array, "B N"],
    token: Int[Array, "B"],
    top: int,
    ranks: Ranks = Ranks(),  # noqa: B008  # frozen
) -> tuple[Float[Array, "B"], Int[Array, "B K"], Float[Array, "B K"]]:
    """Log-probability of `token`, and ids and log-probabilities of the `top` most likely tokens, best first."""
    log_p = _log_softmax(logits, ranks)
    ids = _ids(logits, ranks)
    own = ranks.sum(jnp.where(ids == token[:, None], log_p, 0).sum(-1))
    best, index = jax.lax.top_k(log_p, min(top, logits.shape[-1]))
    # The best of each rank hold the best of all; of equal ones the lowest ids come first, within and between ranks.
    best, candidates = (_side_by_side(ranks.gather(a)) for a in (best, ids.at[index].get(mode="clip")))
    best, index = jax.lax.top_k(best, top)
    return own, jnp.take_along_axis(candidates, index, -1), best


def _ids(logits: Float[Array, "B N"], ranks: Ranks) -> Int[Array, "N"]:
    """The tokens whose logits these are."""
    return ranks.first(logits.shape[-1]) + jnp.arange(logits.shape[-1], dtype=jnp.int32)


def _own(a: Array, logits: Float[Array, "B N"], ranks: Ranks) -> Array:
    """The part [B, N] that is of the tokens whose logits these are, of something over the whole vocabulary."""
    return jax.lax.dynamic_slice_in_dim(a, ranks.first(logits.shape[-1]), logits.shape[-1], axis=1)


def _side_by_side(a: Array) -> Array:
    """[R, B, n] -> [B, R * n]"""
    return jnp.swapaxes(a, 0, 1).reshape(a.shape[1], -1)


def _argmax(x: Float[Array, "B N"], ranks: Ranks) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The token of the highest value, of equal ones the lowest, and the value. NaN counts as the highest."""
    index = jnp.argmax(x, axis=-1)
    ids, best = _ids(x, ranks).at[index].get(mode="clip"), jnp.take_along_axis(x, index[:, None], -1)[:, 0]
    ids, best = ranks.gather(ids), ranks.gather(best)
    rank = jnp.argmax(best, axis=0)[None]
    return jnp.take_along_axis(ids, rank, 0)[0], jnp.take_along_axis(best, rank, 0)[0]


def _log_softmax(logits: Float[Array, "B N"], ranks: Ranks) -> Float[Array, "B N"]:
    shifted = logits - ranks.max(jax.lax.stop_gradient(logits).max(-1))[:, None]
    return shifted - jnp.log(ranks.sum(jnp.exp(shifted).sum(-1)))[:, None]


def _edit(
    logits: Float[Array, "B N"], counts: Int[Array, "B N"], rows: RowSampling, ranks: Ranks
) -> Float[Array, "B N"]:
    """Bias, then the penalties; what would end a request is out of reach below min_tokens."""
    logits = logits + rows.bias
    repetition = jnp.where(rows.prompt | (counts > 0), rows.repetition[:, None], 1)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)
    early = ranks.sum(counts.sum(-1)) < rows.min_tokens
    return jnp.where(rows.ends & early[:, None], -jnp.inf, logits)


def _unpack(allowed: UInt32[Array, "B W"]) -> Bool[Array, "B 32*W"]:
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(allowed.shape[0], -1) == 1


def _draw(
    logits: Float[Array, "B N"], seed: UInt32[Array, "B 2"], position: Int[Array, "B"], ranks: Ranks
) -> Int[Array, "B"]:
    """A token in proportion to exp(logits): the highest sum of logit and Gumbel noise, which is that of the whole vocabulary."""

    def noise(seed: UInt32[Array, "2"], position: Int[Array, ""]) -> Float[Array, "N"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (ranks.count * logits.shape[-1],), logits.dtype)

    return _argmax(logits + _own(jax.vmap(noise)(seed, position), logits, ranks), ranks)[0]


def _truncate(logits: Float[Array, "B N"], rows: RowSampling, ranks: Ranks) -> Float[Array, "B N"]:
    """-inf outside min_p, then top_k, then top_p of what is left; the most likely token always stays."""
    highest = ranks.max(logits.max(-1))[:, None]
    kept = jnp.where(logits >= highest + jnp.log(rows.min_p)[:, None], logits, -jnp.inf)

    def by_count(kept: Array) -> Array:
        most = jnp.where(rows.top_k == 0, jnp.inf, rows.top_k.astype(jnp.float32))
        return _likeliest(kept, jnp.ones_like(kept), most, ranks)

    def by_mass(kept: Array) -> Array:
        mass = jnp.exp(_log_softmax(kept, ranks))
        return _likeliest(kept, mass, jnp.where(rows.top_p == 1, jnp.inf, jnp.maximum(rows.top_p, _SMALL)), ranks)

    kept = jax.lax.cond(jnp.any(rows.top_k > 0), by_count, lambda kept: kept, kept)
    return jax.lax.cond(jnp.any(rows.top_p < 1), by_mass, lambda kept: kept, kept)


def _likeliest(
    logits: Float[Array, "B N"], weight: Float[Array, "B N"], limit: Float[Array, "B"], ranks: Ranks
) -> Float[Array, "B N"]:
    """-inf but for tokens whose likelier ones weigh less than `limit` (> 0) together; of equal ones the lower ids are likelier.

    weight: the same for equal logits.

    The lowest logit that stays is found by its bits, four at a time from the top: 15 sums each, in one exchange of the ranks.
    """
    key = _ordered(logits)
    digits = jnp.arange(16, dtype=jnp.uint32)

    def above(threshold: UInt32[Array, "B n"]) -> Float[Array, "B n"]:
        return ranks.sum(jnp.where(key[:, None] > threshold[:, :, None], weight[:, None], 0).sum(-1))

    def narrow(i: Int[Array, ""], lowest: UInt32[Array, "B"]) -> UInt32[Array, "B"]:
        shift = (28 - 4 * i).astype(jnp.uint32)
        rest = (jnp.uint32(1) << shift) - 1
        candidates = lowest[:, None] | (digits[:15] << shift) | rest  # the sixteenth is known to be high enough
        digit = (above(candidates) >= limit[:, None]).sum(-1).astype(jnp.uint32)
        return lowest | (digit << shift)

    lowest = jax.lax.fori_loop(0, 8, narrow, jnp.zeros(key.shape[:1], jnp.uint32))[:, None]
    equal = (key == lowest).astype(jnp.int32)  # they weigh the same
    before = jnp.cumsum(equal, -1) - equal + ranks.before(equal.sum(-1))[:, None]
    stays = (key > lowest) | ((equal == 1) & (above(lowest) + before * weight < limit[:, None]))
    return jnp.where(stays, logits, -jnp.inf)


def _ordered(x: Float[Array, "B N"]) -> UInt32[Array, "B N"]:
    """Integers in the order of these float32 numbers; the two zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
