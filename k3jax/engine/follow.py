"""A job of several processes: what the processes do that do not lead, and what all do alike."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from k3jax import sharding
from k3jax.engine.runner import Runner
from k3jax.group import Group
from k3jax.io import conversation, hf, orbax
from k3jax.kernels import Kernels
from k3jax.lm import LM
from k3jax.model import K3
from k3jax.version import __version__


def follow(lm: LM, group: Group) -> int:
    """Do what the engine of process 0 does on its devices, on these of the same model; returns process 0's exit code.

    Nothing is decided here; its pools, too, are as large as process 0's, so that hosts are to be alike. Raises ScheduleError for a
    call that is not the next one.
    """
    fingerprint(lm)
    runner: Any = None
    for name, args in group.calls():
        if name == "begin":
            sizes, buckets = args
            runner = Runner(lm.model, lm.kernels, lm.end_ids, sizes, buckets, lm.mesh)
        else:
            getattr(runner, name)(*args)
    return group.code


def agree(group: Group, model: Path, dtype: str | None, kernels: str, mesh: Mesh) -> None:
    """Before a model is loaded: that all processes have the same one, and run it by the same programs. Raises ValueError."""
    config = (orbax if orbax.is_orbax(model) else hf).read_config(model)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    chosen = str(Kernels.resolve(kernels, config, mesh.devices.flat[0].platform))
    own = {**vars(config), "dtype": dtype or config.dtype, "kernels": chosen, "mesh": dict(mesh.shape)}
    group.agree(k3jax=__version__, **versions, **own)


def mesh(tp: int | None, ep: int | None, group: Group | None) -> Mesh | None:
    """Of all processes' devices, or of `tp` of this one's; None: one device. Raises ValueError."""
    if group is None and tp is None:
        if ep is not None:
            raise ValueError(f"ep={ep}: allowed beside tp, of which it is a divisor")
        return None
    if group is not None and tp not in (None, jax.device_count()):
        raise ValueError(f"tp={tp}: allowed is {jax.device_count()}, the devices of all processes")
    return sharding.make_mesh(tp=tp, ep=ep)


def fingerprint(lm: LM) -> str:
    """conversation.fingerprint of a model that may be divided over processes, all of which ask for it."""
    if lm.mesh is None or not lm.mesh.is_multi_process:
        return conversation.fingerprint(lm.model)

    def beginnings(model: K3) -> K3:
        return jax.tree.map(lambda a: a[(slice(1),) * (a.ndim - 1) + (slice(64),)], model)

    whole = jax.NamedSharding(lm.mesh, jax.P())
    return conversation.fingerprint(jax.jit(beginnings, out_shardings=whole)(lm.model))
