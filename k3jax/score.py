"""Scoring text: overlapping windows, so that every token is judged once and with a long past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Window(NamedTuple):
    """`inputs` predict `targets` one by one; only the last `fresh` targets count, the others were judged before."""

    inputs: np.ndarray
    targets: np.ndarray
    fresh: int


def windows(ids: Sequence[int], first: int, window: int, stride: int) -> list[Window]:
    """Cut a text into windows of at most `window` tokens, `stride` apart; `first` (the BOS id) precedes the text.

    Raises ValueError unless 1 <= stride <= window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride}: allowed is 1 to window={window}")
    sequence = np.array([first, *ids], np.int32)
    found, judged = [], 0  # targets [0, judged) are done
    for start in range(0, max(len(ids), 1), stride):
        end = min(start + window, len(ids))
        if end <= judged:
            break
        found.append(Window(sequence[start:end], sequence[start + 1 : end + 1], end - judged))
        judged = end
    return found
