"""Requests under way on disk: taken out of an engine here, gone on with in another process.

A directory holds request.json, what was asked for and what has come so far, and for each sample that has begun a conversation
(io/conversation.py) with its memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from k3jax import inputs
from k3jax.carry import Conversation
from k3jax.config import K3Config
from k3jax.engine.live import Loaded
from k3jax.io import conversation
from k3jax.io.safetensors import CheckpointError
from k3jax.requests import Request, Sample, Suspended, Token
from k3jax.sampling import SamplingParams

FORMAT = 1  # to be raised when directories of before cannot be read any more
_FILE = "request.json"


def save(directory: str | os.PathLike[str], suspended: Suspended, lm: Loaded) -> None:
    """Write a new directory, whole or not at all. Raises FileExistsError."""
    path = inputs.path("directory", directory).absolute()
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists, and is not written over")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        weights = conversation.fingerprint(lm.model)
        for sample in suspended.samples:
            if sample.carry is not None:
                ids = (*sample.request.token_ids, *(token.token for token in sample.made))
                told = Conversation(tuple(ids), sample.carry)
                conversation.save(unfinished / f"sample-{sample.number}", told, lm.config, weights=weights)
        record = {
            "k3jax_request": FORMAT,
            "priority": suspended.priority,
            "salt": suspended.salt,
            "samples": [_record(sample) for sample in suspended.samples],
        }
        (unfinished / _FILE).write_text(json.dumps(record), "utf-8")
        os.chmod(unfinished, 0o755)  # mkdtemp's is for its owner alone
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def load(directory: str | os.PathLike[str], lm: Loaded) -> Suspended:
    """Read a directory that `save` wrote, for a model of the same weights. Raises CheckpointError naming what does not fit."""
    path = inputs.path("directory", directory)
    try:
        record = json.loads((path / _FILE).read_bytes())
        if record["k3jax_request"] != FORMAT:
            raise CheckpointError(f"{path}: k3jax_request={record['k3jax_request']!r}: allowed is {FORMAT}")
        samples = [_sample(entry, lm.config) for entry in record["samples"]]
        suspended = Suspended((), int(record["priority"]), str(record["salt"]))
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a saved request ({error})") from None
    weights, found = conversation.fingerprint(lm.model), []
    for sample, begun in samples:
        carry = None
        if begun:
            place = path / f"sample-{sample.number}"
            told = conversation.load(place, lm.config, str(lm.model.dtype), weights=weights)
            ids = (*sample.request.token_ids, *(token.token for token in sample.made))
            if told.token_ids != ids:
                raise CheckpointError(f"{place}: its tokens are not those of {_FILE}")
            carry = told.carry
        found.append(sample._replace(carry=carry))
    return suspended._replace(samples=tuple(found))


def _record(sample: Sample) -> dict[str, Any]:
    request = sample.request
    return {
        "number": sample.number,
        "begun": sample.carry is not None,
        "token_ids": [int(i) for i in request.token_ids],
        "sampling": dataclasses.asdict(request.params) | {"logit_bias": list(request.params.logit_bias.items())},
        "thinking": request.thinking,
        "calls": request.calls,
        "keep_state": sample.keep,
        "made": [[token.token, token.logprob, list(token.top.items())] for token in sample.made],
        "prompt": [[logprob, list(top.items())] for logprob, top in sample.prompt],
    }


def _sample(entry: dict[str, Any], config: K3Config) -> tuple[Sample, bool]:
    """A sample without its memory, and whether there is one."""
    params = SamplingParams(**entry["sampling"] | {"logit_bias": dict(entry["sampling"]["logit_bias"])})
    ids = inputs.token_ids("token_ids", entry["token_ids"], config)
    made = tuple(Token(int(i), logprob, dict(top)) for i, logprob, top in entry["made"])
    inputs.token_ids("made", [*ids, *(token.token for token in made)], config)
    request = Request(ids, params, thinking=entry["thinking"], calls=bool(entry["calls"]))
    prompt = [(float(logprob), dict(top)) for logprob, top in entry["prompt"]]
    sample = Sample(int(entry["number"]), request, made, prompt, None, bool(entry["keep_state"]))
    return sample, bool(entry["begun"])
