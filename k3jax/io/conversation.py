"""Conversations on disk: the carry of one request and its tokens, to go on from in another process.

A directory is one Orbax checkpoint of a flat `{layers.L.conv, layers.L.S, layers.L.latents: array}` over the pages in use.
Its custom metadata are a manifest: what the arrays mean, and the tokens. All of it is checked before an array is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from k3jax import carry as carries
from k3jax.carry import PAGE, Carry, Conversation, KDAState
from k3jax.config import DTYPES, K3Config, require
from k3jax.io.hf import parameters_of
from k3jax.io.orbax import is_orbax, reading
from k3jax.io.safetensors import CheckpointError
from k3jax.model import K3
from k3jax.version import __version__

FORMAT = 1  # to be raised when directories of before cannot be read any more
LAYOUT = {
    "conv": "1, W-1 inputs before the convolution with the oldest first, H heads, 2K+V channels: q then k then v",
    "S": "1, H heads, V value channels, K key channels",
    "latents": "pages in order, tokens of a page, channels: normed latent then shared key",
    "page": PAGE,
}
# Parts of the manifest that the model must agree with, and how a difference is told.
_DIFFERS = {
    "config": "{name}: saved {saved!r}, this model has {own!r}",
    "layout": "layout of {name}: saved {saved!r}, allowed is {own!r}",
    "dtype": "dtype: saved {saved} {name}, this model holds {own}",
    "weights": "weights: saved with those of {name} {saved}, this model's have {own}",
}


def fingerprint(model: K3) -> str:
    """Tells the weights of models of one architecture apart: a sum over the beginning of every parameter but the experts'.

    Experts are left out, so that a conversation held with packed experts goes on with decoded ones.
    """
    crc = 0
    for path, parameter in sorted(parameters_of(model).items()):
        if ".experts." not in path:
            value = parameter[...]
            row = value[(0,) * (value.ndim - 1)][:64].astype(jnp.float32)
            crc = zlib.crc32(np.asarray(row).tobytes(), crc)
    return f"{crc:08x}"


def save(directory: str | Path, conversation: Conversation, config: K3Config, *, weights: str = "") -> None:
    """Write a new directory. `config`, `weights`: of the model that the conversation was held with, and its fingerprint.

    Raises FileExistsError, and ValueError for a carry that is not of one slot of such a model or stands for no token or
    for more tokens than there are.
    """
    path = os.path.abspath(directory)
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists, and is not written over")
    ids, carry = [int(token) for token in conversation.token_ids], conversation.carry
    dtype = str(next((a.dtype for a in (*carry.mla, *(state.conv for state in carry.kda))), config.dtype))
    carries.check(carry, config, dtype)
    tokens = int(carry.lengths[0])
    require(1 <= tokens <= len(ids), "carry.lengths", tokens, f"1 to {len(ids)}, the tokens of the conversation")
    unknown = [token for token in ids if not 0 <= token < config.vocab_size]
    require(not unknown, "token_ids", unknown[:1], f"0 to {config.vocab_size - 1}")
    pages = -(-tokens // PAGE)
    held = carry.mla[0].shape[0] if carry.mla else pages
    require(held >= pages, "carry", f"{held} pages", f"{pages} or more for {tokens} tokens")
    carry = carry._replace(mla=tuple(latents[:pages] for latents in carry.mla))
    arrays = {name: _host(array) for name, array in _by_name(config, carry).items()}
    meaning = _meaning(config, dtype, weights)
    manifest = {
        "k3jax_conversation": FORMAT,
        "k3jax_version": __version__,
        "config_sha256": _sha256(meaning["config"]),
        "tokens": tokens,
        "token_ids": ids,
        "crc32": {name: _crc32(array) for name, array in arrays.items()} | {"tokens": _crc32(np.array([tokens, *ids]))},
    }
    ocp.save(path, arrays, custom_metadata=manifest | meaning)


def load(directory: str | Path, config: K3Config, dtype: str, *, weights: str = "") -> Conversation:
    """Read a directory that `save` wrote, onto the default device, for a model with this configuration and fingerprint.

    All fields of the configuration must be those of the saved one but `dtype`, which says how a directory stores the
    trunk. The version of the package need not be the same. dtype: of the model's trunk, as held. A carry of another
    dtype is refused, even where widening it would be exact: what follows would be neither model's answer, and whoever
    wants this one's can run the token ids through it anew.

    Raises CheckpointError naming all that differs, or the damage.
    """
    require(dtype in DTYPES, "dtype", dtype, " or ".join(map(repr, DTYPES)))
    path = os.path.abspath(directory)
    if not is_orbax(path):
        raise CheckpointError(f"{path}: not a conversation of k3jax")
    with reading(path):
        found = ocp.metadata(path)
    tokens, ids, sums = _check(found.custom_metadata, _meaning(config, dtype, weights), config.vocab_size, path)
    wanted = _by_name(config, _abstract(config, -(-tokens // PAGE), dtype))
    entries = [{(n, tuple(a.shape), str(a.dtype)) for n, a in part.items()} for part in (found.metadata or {}, wanted)]
    for name, shape, kind in sorted(entries[0] ^ entries[1]):
        raise CheckpointError(f"{path}: {name} {kind}{list(shape)} is in its arrays or its manifest, not in both")
    with reading(path):
        arrays = ocp.load(path, wanted)
    for name, array in arrays.items():
        if sums.get(name) != _crc32(_host(array)):
            raise CheckpointError(f"{path}: damaged: {name} is not what was saved")
    carry = Carry(
        kda=tuple(KDAState(*(arrays[f"layers.{layer}.{f}"] for f in KDAState._fields)) for layer in _kda(config)),
        mla=tuple(arrays[f"layers.{layer}.latents"] for layer in config.mla_layers),
        lengths=jnp.array([tokens], jnp.int32),
    )
    return Conversation(tuple(ids), carry)


def _meaning(config: K3Config, dtype: str, weights: str) -> dict[str, dict[str, Any]]:
    """What the arrays mean, as JSON gives it back: the parts of the manifest that _DIFFERS lists."""
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name != "dtype"}
    dtypes = {"latents": dtype, "conv": dtype, "S": "float32"}
    sums = {"fingerprint": weights}
    return json.loads(json.dumps({"config": fields, "layout": LAYOUT, "dtype": dtypes, "weights": sums}))


def _sha256(fields: dict[str, Any]) -> str:
    """Of the fields as JSON with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _host(array: Any) -> np.ndarray:
    """By way of a copy: an array keeps for good what it has once sent to the host."""
    return np.asarray(jnp.copy(array))


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _check(
    manifest: Any, meaning: dict[str, dict[str, Any]], vocabulary: int, path: str
) -> tuple[int, list[int], dict[str, int]]:
    """Of a manifest that fits the model: the tokens that the carry stands for, all token ids, and the arrays' sums."""
    match manifest:
        case {"k3jax_conversation": version} if version != FORMAT:
            raise CheckpointError(f"{path}: format {version!r}: allowed is {FORMAT}")
        case {
            "k3jax_conversation": _, "config": dict(), "layout": dict(), "dtype": dict(), "weights": dict(),
            "config_sha256": digest, "tokens": int(tokens), "token_ids": [*ids], "crc32": dict(sums),
        }:  # fmt: skip
            pass
        case _:
            raise CheckpointError(f"{path}: not a conversation of k3jax, or its manifest is damaged")
    if _sha256(manifest["config"]) != digest:
        raise CheckpointError(f"{path}: damaged: its configuration is not the one of its hash")
    problems, none = [], "nothing"
    for part, own in meaning.items():
        saved = manifest[part]
        for name in (*own, *sorted(set(saved) - set(own))):
            a, b = saved.get(name, none), own.get(name, none)
            problems += [_DIFFERS[part].format(name=name, saved=a, own=b)] if a != b else []
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    fit = 1 <= tokens <= len(ids) and all(type(i) is int and 0 <= i < vocabulary for i in ids)
    if not fit or sums.get("tokens") != _crc32(np.array([tokens, *ids])):
        raise CheckpointError(f"{path}: damaged: its {tokens} tokens and {len(ids)} ids are not what was saved")
    return tokens, ids, sums


def _kda(config: K3Config) -> list[int]:
    return sorted(config.kda_layers)


def _by_name(config: K3Config, carry: Carry) -> dict[str, Any]:
    named = {f"layers.{layer}.latents": a for layer, a in zip(config.mla_layers, carry.mla, strict=True)}
    for layer, state in zip(_kda(config), carry.kda, strict=True):
        named |= {f"layers.{layer}.{field}": a for field, a in state._asdict().items()}
    return named


def _abstract(config: K3Config, pages: int, dtype: str) -> Carry:
    """Shapes, dtypes and the default device's sharding of the carry of one request."""
    sharding = jnp.zeros(()).sharding
    carry = jax.eval_shape(lambda: carries.empty(config, slots=1, pages=pages, dtype=dtype))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), carry)
