"""One request told by a run: what each step takes in, what the caches then stand for, what comes out.

Tokens are called A, B, C, ... by their place in the request. The claims of the table are measured in the carry, byte by
byte, and a run that breaks them is an error: after every step each cache stands for all tokens but the one just sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from k3jax import inputs
from k3jax.answers import failure
from k3jax.carry import PAGE, Carry
from k3jax.engine.batching import Buckets, Row, pack, powers
from k3jax.generate import PREFILL, Sampling, State, decode, empty, place, rows, step
from k3jax.ledger import aligned
from k3jax.lm import LM
from k3jax.model import K3, Context
from k3jax.sampling import Sampled, SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TOP = 3  # most likely tokens that a table shows
LISTED = 12  # tokens that a table lists before it leaves some out
WIDTH = 120  # columns


class Token(NamedTuple):
    letter: str
    id: int
    text: str | None  # None without a tokenizer

    def __str__(self) -> str:
        return f"{self.letter} = {_named(self.id, self.text)}"


class Moment(NamedTuple):
    """One step. What changed is measured in the carry, before the step against after it."""

    name: str  # "prefill", "decode #1", ...
    inputs: tuple[Token, ...]
    holds: tuple[Token, ...]  # what the caches stand for after the step
    latents: tuple[tuple[int, ...], ...]  # positions whose latents changed, for each MLA layer
    states: int  # KDA layers whose recurrent state changed
    histories: int  # KDA layers whose convolution history changed
    probabilities: Float[np.ndarray, "N"]  # of the next token, from the step's logits as they are
    top: tuple[tuple[int, str | None, float], ...]  # the most likely ones: id, text, probability
    sampled: Token

    @property
    def distribution(self) -> str:
        return f"p(next | {_span(self.holds)})"


class Item(NamedTuple):
    """One kind of thing that the request keeps."""

    name: str
    content: str  # of one group, with its shape
    groups: int  # layers that have one; 1 for the request's own
    stands_for: str
    error: float | None  # distance in norms from one pass over the same tokens, largest of all groups; None: no array


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """What `timeline` saw. `tokens`: all of the request, the last of which is in no cache."""

    tokens: tuple[Token, ...]
    moments: tuple[Moment, ...]
    snapshot: tuple[Item, ...]  # after the prefill
    kda: int  # layers
    mla: int

    def __str__(self) -> str:
        return render(self)


def timeline(lm: LM, prompt_ids: Sequence[int], sampling: SamplingParams | None = None, steps: int = 3) -> Timeline:
    """Run a prompt and the decode steps that follow it, `steps` tokens in all, and say what happened.

    sampling: None takes the most likely token and goes past end tokens; else a stop token ends the run early, and `steps`
    stands for max_tokens. Distributions are the model's own, whatever the sampling. Caches are copied to the host at each step.
    Raises ValueError for what cannot be asked for, RuntimeError where the caches do not stand for what they should.
    """
    if lm.mesh is not None:
        raise ValueError(f"model on {lm.mesh.size} devices: allowed is one, whose caches are looked at")
    ids = inputs.token_ids("prompt_ids", prompt_ids, lm.config)
    params = _params(lm, ids, GREEDY if sampling is None else sampling, steps)
    ctx, computed, snapshot, moments = Context(lm.kernels), 0, (), []
    state, table = _begin(lm, ids, params)
    before = _memory(state.carry, table)
    for number in range(steps):
        name = f"decode #{number}" if number else "prefill"
        state, new = _decode(lm.model, state, table, ctx) if number else _prefill(lm.model, state, ids, table, ctx)
        after = _memory(state.carry, table)
        if new.token < 0:
            raise RuntimeError(f"{name}: {failure(int(state.bad_layer[0]), lm.config.num_hidden_layers)}")
        latents = tuple(_changed_slots(a, b) for a, b in zip(before.latents, after.latents, strict=True))
        _verify(name, after.length, dict(zip(lm.config.mla_layers, latents, strict=True)), computed, len(ids))
        if not number:
            snapshot = _snapshot(lm, ids, after, table)
        *known, sampled = _tokens(lm, [*ids, new.token])
        moments.append(
            Moment(
                name=name,
                inputs=tuple(known[computed:]),
                holds=tuple(known),
                latents=latents,
                states=_changed(before.S, after.S),
                histories=_changed(before.conv, after.conv),
                probabilities=new.probabilities,
                top=tuple((i, _text(lm, i), float(new.probabilities[i])) for i in new.best),
                sampled=sampled,
            )
        )
        computed, before, ids = len(ids), after, [*ids, new.token]
        if state.done[0]:
            break
    return Timeline(_tokens(lm, ids), tuple(moments), snapshot, len(lm.config.kda_layers), len(lm.config.mla_layers))


def _params(lm: LM, ids: list[int], sampling: SamplingParams, steps: int) -> SamplingParams:
    """The sampling of the run. ValueError for what a timeline has no place for."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps={steps!r}: allowed is an integer of 1 or more")
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling={sampling!r}: allowed are one SamplingParams or None")
    for field in ("n", "stop", "logprobs", "prompt_logprobs"):
        value, plain = getattr(sampling, field), getattr(GREEDY, field)
        if value != plain:
            raise ValueError(f"{field}={value!r}: allowed is {plain!r} in a timeline")
    params = dataclasses.replace(sampling, max_tokens=steps)
    inputs.fit("prompt_ids", ids, params, lm.config, lm.tokenizer is not None)
    return params


# -- the run -------------------------------------------------------------------------------------------------------------


class _Out(NamedTuple):
    """What comes out of a step: a token (-1: none) and the model's distribution."""

    token: int
    best: list[int]  # TOP most likely tokens
    probabilities: Float[np.ndarray, "N"]


def _begin(lm: LM, ids: list[int], params: SamplingParams) -> tuple[State, Int[np.ndarray, "1 P"]]:
    """Pools of one slot and just enough pages, the request placed in them."""
    pages = -(-(len(ids) + params.max_tokens) // PAGE)
    new = rows([params], [ids], [0], lm.end_ids, 1, lm.config.vocab_size)
    slot, table = np.zeros(1, np.int32), np.arange(pages, dtype=np.int32)[None]
    return place(empty(lm.model, slots=1, pages=pages), slot, new), table


def _prefill(
    model: K3, state: State, ids: list[int], table: Int[np.ndarray, "1 P"], ctx: Context
) -> tuple[State, _Out]:
    """All pieces of the prompt."""
    buckets, found = Buckets((1,), powers(2, 16, PREFILL), (table.shape[1],)), None
    for first in range(0, len(ids), PREFILL):
        end = min(first + PREFILL, len(ids))
        packed = pack([Row(ids[first:end], first, 0, table[0].tolist(), sampled=end == len(ids))], buckets)
        ctx = dataclasses.replace(ctx, decode_rows=packed.bucket.decodes)
        state, found = step(model, state, packed.batch, packed.sampled, ctx, Sampling(model.config.vocab_size))
    assert found is not None  # a prompt is not empty
    return state, _out(found.new, (0,))


def _decode(model: K3, state: State, table: Int[np.ndarray, "1 P"], ctx: Context) -> tuple[State, _Out]:
    """One step."""
    slot = np.zeros(1, np.int32)
    state, found = decode(model, state, slot, table, np.int32(1), ctx, Sampling(model.config.vocab_size))
    return state, _out(found.new, (0, 0))


def _out(sampled: Sampled, place: tuple[int, ...]) -> _Out:
    """The entry at `place`; every token is among the most likely ones that were asked for."""
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    ids, log_p = np.asarray(sampled.top_ids)[place], np.asarray(sampled.top_logprobs)[place]
    probabilities = np.zeros(len(ids))
    probabilities[ids] = np.exp(log_p.astype(np.float64))
    return _Out(int(np.asarray(sampled.token)[place]), ids[:TOP].tolist(), probabilities)


class _Memory(NamedTuple):
    """A request's carry on the host, a copy: the next step takes the arrays away."""

    length: int
    S: list[np.ndarray]  # [H, V, K] of each KDA layer
    conv: list[np.ndarray]  # [W-1, H, 2K+V] of each KDA layer
    latents: list[np.ndarray]  # [P * page, latent] of each MLA layer, in the order of positions


def _memory(carry: Carry | None, table: Int[np.ndarray, "1 P"]) -> _Memory:
    assert carry is not None
    return _Memory(
        length=int(carry.lengths[0]),
        S=[np.array(state.S[0]) for state in carry.kda],
        conv=[np.array(state.conv[0]) for state in carry.kda],
        latents=[np.array(pages[table[0]]).reshape(-1, pages.shape[-1]) for pages in carry.mla],
    )


def _changed(before: list[np.ndarray], after: list[np.ndarray]) -> int:
    """How many arrays differ in any byte."""
    return sum(a.tobytes() != b.tobytes() for a, b in zip(before, after, strict=True))


def _changed_slots(before: np.ndarray, after: np.ndarray) -> tuple[int, ...]:
    """Rows that differ in any byte."""
    return tuple(np.flatnonzero((before.view(np.uint8) != after.view(np.uint8)).any(-1)).tolist())


def _verify(name: str, length: int, latents: dict[int, tuple[int, ...]], computed: int, known: int) -> None:
    """The invariant: a step takes the tokens that were not computed, and the caches then stand for all that were known."""
    if length != known:
        raise RuntimeError(f"{name}: the carry stands for {length} tokens, not for the {known} that were computed")
    for layer, positions in latents.items():
        if positions != tuple(range(computed, known)):
            raise RuntimeError(f"{name}: layer {layer} wrote latents {positions}, not {computed} to {known - 1}")


# -- what is kept --------------------------------------------------------------------------------------------------------

_STREAMS = ("kda_conv_q", "kda_conv_k", "kda_conv_v")
_LATENT = ("mla_latent", "mla_krope")


def _snapshot(lm: LM, ids: list[int], memory: _Memory, table: Int[np.ndarray, "1 P"]) -> tuple[Item, ...]:
    """What is kept after the prefill, against one pass over the same tokens without a carry."""
    c, tokens, n = lm.config, _tokens(lm, ids), len(ids)
    sites = [f"{site}_{layer}" for layer in c.kda_layers for site in ("kda_state", *_STREAMS)]
    sites += [f"{site}_{layer}" for layer in c.mla_layers for site in _LATENT]
    seen = lm.trace(ids, sites)
    items = []
    if memory.S:
        kept = c.short_conv_kernel_size - 1
        states = [
            (np.swapaxes(S, -1, -2), seen[f"kda_state_{layer}"])
            for layer, S in zip(c.kda_layers, memory.S, strict=True)
        ]
        histories = [  # a trace has the last W inputs, of which W-1 are kept
            (np.split(conv, 3, axis=-1), [seen[f"{site}_{layer}"][1:] for site in _STREAMS])
            for layer, conv in zip(c.kda_layers, memory.conv, strict=True)
        ]
        last = ", ".join(["zeros"] * (n < kept) + [token.letter for token in tokens[-kept:]])
        stored, channels = _shape(memory.conv[0]), math.prod(memory.conv[0].shape[1:])
        items += [
            Item("KDA recurrent state", _shape(memory.S[0]), len(states), _span(tokens), _distance(states)),
            Item("KDA conv history", f"[{channels}, {kept}] as {stored}", len(histories), last, _distance(histories)),
        ]
    if memory.latents:
        latents = [
            (latents[:n], np.concatenate([seen[f"{site}_{layer}"] for site in _LATENT], axis=-1))
            for layer, latents in zip(c.mla_layers, memory.latents, strict=True)
        ]
        each = _span(tokens, "c_")
        items.append(Item("MLA latents", _shape(memory.latents[0][:n]), len(latents), each, _distance(latents)))
    page, offset = divmod(n, PAGE)
    pages = ", ".join(map(str, table[0, : -(-n // PAGE)]))
    items += [
        Item("length", str(memory.length), 1, _span(tokens), None),
        Item("token list", f"[{n + 1}]", 1, f"{_span(tokens)} and {_letter(n)}, which is in no cache", None),
        Item("block table", f"pages {pages}", 1, f"{_letter(n)} goes to page {table[0, page]}, place {offset}", None),
    ]
    return tuple(items)


def _distance(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Of what is kept from what is wanted, in norms of what is wanted: the largest of all layers."""

    def flat(a: Any) -> np.ndarray:
        return np.asarray(a, np.float64).reshape(-1)

    return max(float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))) for a, b in pairs)


# -- as text -------------------------------------------------------------------------------------------------------------


def render(timeline: Timeline) -> str:
    """Plain text of at most WIDTH columns: the tokens, the steps, what they changed, what is kept after the prefill."""
    t, last = timeline, timeline.tokens[-1].letter
    steps = [
        (
            moment.name,
            ", ".join(t.letter for t in moment.inputs) if len(moment.inputs) <= 6 else _span(moment.inputs),
            _span(moment.holds),
            "\n".join([moment.distribution, *(f"{p:.4f} {_named(i, text)}" for i, text, p in moment.top)]),
            str(moment.sampled),
        )
        for moment in t.moments
    ]
    changes = [
        (m.name, _places(m.latents), f"{m.states} of {t.kda} layers", f"{m.histories} of {t.kda} layers")
        for m in t.moments
    ]
    kept = [
        (i.name, i.content, str(i.groups), i.stands_for, "" if i.error is None else f"{i.error:.1e}")
        for i in t.snapshot
    ]
    names = [(token.letter, str(token.id), "" if token.text is None else repr(token.text)) for token in t.tokens]
    if len(names) > LISTED:
        names = [*names[: LISTED // 2], ("...", "", ""), *names[-LISTED // 2 :]]
    parts = [
        f"One request through {t.kda + t.mla} layers, {t.kda} KDA and {t.mla} MLA. {last} is in no cache.",
        aligned(("token", "id", "text"), names, WIDTH, right={"id"}),
        aligned(("step", "input", "caches then hold", "the model gives", "sampled"), steps, WIDTH),
        aligned(("step", "latents written", "KDA states changed", "conv histories changed"), changes, WIDTH),
        "After the prefill (error: distance from one pass without a cache, in norms, largest of all groups)",
        aligned(("kept", "content of one", "groups", "stands for", "error"), kept, WIDTH, right={"groups"}),
    ]
    return "\n\n".join(parts) + "\n"


def _places(latents: tuple[tuple[int, ...], ...]) -> str:
    """Positions, which are the same in all layers."""
    if not latents:
        return ""
    first, last = latents[0][0], latents[0][-1]
    return f"{first if first == last else f'{first}...{last}'} in {len(latents)} of {len(latents)} layers"


def _tokens(lm: LM, ids: Sequence[int]) -> tuple[Token, ...]:
    return tuple(Token(_letter(place), i, _text(lm, i)) for place, i in enumerate(ids))


def _text(lm: LM, token: int) -> str | None:
    return None if lm.tokenizer is None else lm.decode([token])


def _letter(place: int) -> str:
    """A to Z, then AA, AB, ..."""
    letters = ""
    while place >= 0:
        place, letter = divmod(place, 26)
        letters, place = chr(ord("A") + letter) + letters, place - 1
    return letters


def _span(tokens: Sequence[Token], prefix: str = "") -> str:
    first, last = (prefix + tokens[end].letter for end in (0, -1))
    return first if len(tokens) == 1 else f"{first}...{last}"


def _named(token: int, text: str | None) -> str:
    return str(token) if text is None else f"{token} {text!r}"


def _shape(array: np.ndarray) -> str:
    return f"[{', '.join(map(str, array.shape))}] {array.dtype}"
