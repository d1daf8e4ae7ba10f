"""What users pass, checked: each function returns it in one form, or raises ValueError saying what is allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import carry as carries
from k3jax.carry import PAGE, Carry, Conversation
from k3jax.config import K3Config
from k3jax.sampling import SamplingParams


def integers(what: str, ids: Any) -> list[int]:
    """A list of Python integers from a list or an array of integers."""
    if isinstance(ids, Mapping):
        raise ValueError(f"{what} is a mapping: allowed are text or token ids (vision is not supported)")
    if isinstance(ids, jax.Array | np.ndarray):
        if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"{what} is {ids.dtype} of shape {ids.shape}: allowed are integers of one axis")
        return np.asarray(ids).tolist()
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray):
        for i in ids:
            if not isinstance(i, int | np.integer) or isinstance(i, bool):
                raise ValueError(f"{what} holds {i!r}: allowed are integer token ids")
        return [int(i) for i in ids]
    raise ValueError(f"{what} is a {type(ids).__name__}: allowed are integer token ids")


def token_ids(what: str, ids: Any, config: K3Config, *, whole: bool = True) -> list[int]:
    """Token ids that the model can take as input; `whole`: in one sequence."""
    ids = integers(what, ids)
    if not ids:
        raise ValueError(f"{what} is empty: allowed is one token or more")
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise ValueError(f"{what} has id {int(i)}: allowed are 0 to {config.vocab_size - 1}")
        if i == config.media_placeholder_token_id:
            raise ValueError(f"{what} has id {int(i)}, an image part: vision is not supported")
    if whole and len(ids) > config.max_position_embeddings:
        raise ValueError(f"{what} has {len(ids)} tokens: allowed are {config.max_position_embeddings} (the context)")
    return ids


def path(what: str, value: Any) -> Path:
    """The path of a file or directory."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{what}={value!r}: allowed is a path")
    return Path(text)


def conversation(state: Any, config: K3Config, dtype: str) -> Conversation:
    """A conversation that a model of this architecture, with a trunk of this dtype, can go on with.

    That its token ids are those that the carry was computed from cannot be seen.
    """
    if not isinstance(state, Conversation):
        what = f"state is a {type(state).__name__}"
        raise ValueError(f"{what}: allowed is the state of a completion that was made with keep_state=True")
    ids = token_ids("state.token_ids", state.token_ids, config, whole=False)
    if not isinstance(state.carry, Carry) or any(not isinstance(a, jax.Array) for a in jax.tree.leaves(state.carry)):
        raise ValueError(f"state.carry is a {type(state.carry).__name__}: allowed is a Carry of arrays")
    if any(a.is_deleted() for a in jax.tree.leaves(state.carry)):
        raise ValueError("state.carry has arrays that were deleted: allowed is a state whose memory is there")
    carries.check(state.carry, config, dtype)
    tokens, pages = int(state.carry.lengths[0]), state.carry.mla[0].shape[0] if state.carry.mla else 0
    if not 1 <= tokens <= len(ids):
        raise ValueError(f"state.carry.lengths={tokens}: allowed are 1 to {len(ids)}, the state's tokens")
    if state.carry.mla and pages * PAGE < tokens:
        raise ValueError(f"state.carry has {pages} pages: allowed are {-(-tokens // PAGE)} or more for {tokens} tokens")
    return state


def text(what: str, value: str) -> str:
    """A text that has a size in bytes."""
    if not value:
        raise ValueError(f"{what} is empty: allowed is one byte or more")
    if any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise ValueError(f"{what} has a lone surrogate: allowed is what UTF-8 can hold")
    return value


def several(name: str, value: Any) -> Sequence[Any]:
    """A list of texts or of lists of token ids; a text alone counts as one."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 2:
        return list(np.asarray(value))
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray) or not len(value):
        raise ValueError(
            f"{name}={value!r}: allowed are a string, a list of strings or a list of lists of token ids, not empty"
        )
    if any(isinstance(entry, int | np.integer) for entry in value):
        raise ValueError(f"{name} is one list of token ids: allowed is a list of such lists")
    return value


def params(sampling: Any, count: int, max_new_tokens: int | None = None) -> list[SamplingParams]:
    """One SamplingParams a prompt; max_new_tokens alone stands for SamplingParams(max_tokens=...)."""
    if max_new_tokens is not None:
        if sampling is not None:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}: allowed without sampling, which has max_tokens")
        sampling = SamplingParams(max_tokens=max_new_tokens)
    if sampling is None:
        sampling = SamplingParams()
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    listed = isinstance(sampling, Sequence) and len(sampling) == count
    if listed and all(isinstance(p, SamplingParams) for p in sampling):
        return list(sampling)
    what = f"a list of {len(sampling)}" if isinstance(sampling, Sequence) else f"a {type(sampling).__name__}"
    raise ValueError(f"sampling is {what}: allowed are one SamplingParams or a list of {count}")


def fit(what: str, prompt: Sequence[int], p: SamplingParams, config: K3Config, has_text: bool) -> None:
    """That a request fits the model: its context, its vocabulary, its tokenizer."""
    if len(prompt) + p.max_tokens > config.max_position_embeddings:
        raise ValueError(
            f"{what} of {len(prompt)} tokens with max_tokens={p.max_tokens}: "
            f"allowed are {config.max_position_embeddings} tokens in all (the context)"
        )
    for field in ("stop_token_ids", "logit_bias"):
        for token in getattr(p, field):
            if token >= config.vocab_size:
                raise ValueError(f"{field} has {token}: allowed are 0 to {config.vocab_size - 1}")
    for field in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(p, field)) is not None and wanted > config.vocab_size:
            raise ValueError(f"{field}={wanted}: allowed are 0 to {config.vocab_size} (the vocabulary)")
    if p.stop and not has_text:
        raise ValueError(
            f"stop={p.stop!r}: allowed with a tokenizer, which this model directory lacks; use stop_token_ids"
        )


def routing(value: Any, sites: frozenset[str], config: K3Config, length: int) -> dict[str, np.ndarray]:
    """Forced experts by router_ids_L; other sites of the model, which a trace may hold, are left out."""
    if not isinstance(value, Mapping):
        raise ValueError(f"routing is a {type(value).__name__}: allowed is a mapping from router_ids_L to experts")
    known = {f"router_ids_{layer}" for layer in config.moe_layers}
    for name in value:
        if name not in known and name not in sites:
            raise ValueError(f"routing: {name!r} is not a mixture layer of this model")
    forced = {n: _experts(f"routing[{n!r}]", ids, config, length) for n, ids in value.items() if n in known}
    if not forced:
        raise ValueError("routing names no router_ids_L: allowed are the router_ids_L of a trace")
    return forced


def _experts(what: str, value: Any, config: K3Config, length: int) -> np.ndarray:
    experts, shape = config.num_experts, (length, config.num_experts_per_token)
    try:
        ids = np.asarray(value)
    except ValueError:
        raise ValueError(f"{what} is ragged: allowed is an array of shape {shape}") from None
    if ids.shape != shape or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{what} is {ids.dtype} of shape {ids.shape}: allowed are integers of shape {shape}")
    if ids.min() < 0 or ids.max() >= experts:
        raise ValueError(f"{what} has experts {ids.min()} to {ids.max()}: allowed are integers below {experts}")
    if (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any():
        raise ValueError(f"{what} names an expert twice for one token: allowed are distinct ones")
    return ids
