"""Scoring text: overlapping windows, so that every token is judged once and with a long past."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track

from k3jax import sharding
from k3jax.batch import single
from k3jax.model import K3, Context, forward
from k3jax.sampling import logprobs

_SHOW_PROGRESS = 16  # windows from which scoring draws a bar


class Window(NamedTuple):
    """`inputs` predict `targets` one by one; only the last `fresh` targets count, the others were judged before."""

    inputs: np.ndarray
    targets: np.ndarray
    fresh: int


def windows(ids: Sequence[int], first: int, window: int, stride: int) -> list[Window]:
    """Cut a text into windows of at most `window` tokens, `stride` apart; `first` (the BOS id) precedes the text.

    Raises ValueError unless 1 <= stride <= window.
    """
    if not isinstance(stride, int) or isinstance(stride, bool) or not 1 <= stride <= window:
        raise ValueError(f"stride={stride!r}: allowed is 1 to window={window}")
    sequence = np.array([first, *ids], np.int32)
    found, judged = [], 0  # targets [0, judged) are done
    for start in range(0, max(len(ids), 1), stride):
        end = min(start + window, len(ids))
        if end <= judged:
            break
        found.append(Window(sequence[start:end], sequence[start + 1 : end + 1], end - judged))
        judged = end
    return found


def token_logprobs(model: K3, cut: Sequence[Window], window: int, ctx: Context) -> list[float]:
    """Natural log-probability of every target that counts, in order."""
    found: list[float] = []
    quiet, console = len(cut) < _SHOW_PROGRESS, Console(stderr=True)
    for w in track(cut, "scoring", disable=quiet, transient=True, console=console):
        inputs, targets = (np.pad(ids, (0, window - len(ids))).astype(np.int32) for ids in w[:2])
        count = len(w.targets)
        found += np.asarray(_judge(model, inputs, targets, np.int32(count), ctx))[count - w.fresh : count].tolist()
    return found


@functools.partial(jax.jit, static_argnames="ctx")
def _judge(
    model: K3, inputs: Int[Array, "T"], targets: Int[Array, "T"], length: Int[Array, ""], ctx: Context
) -> Float[Array, "T"]:
    def of_rank(model: K3, inputs: Array, targets: Array, length: Array) -> Array:
        return logprobs(forward(model, single(inputs, length), None, ctx).logits, targets, 0, ctx.ranks)[0]

    specs = (sharding.of_model(model), *(jax.P(),) * 3)
    return sharding.per_rank(of_rank, ctx.mesh, specs, jax.P())(model, inputs, targets, length)
