"""Checkpoints of this package: the parameters as held in memory, and the configuration beside them.

A directory is one Orbax checkpoint of a flat `{attribute path: array}`, whose custom metadata hold the format's version
and every field of K3Config by name. Absorbed arrays are not stored: loading makes them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from k3jax import sharding
from k3jax.config import K3Config
from k3jax.io.hf import Loaded, check_dtype, files_beside, held_dtype, parameters_of
from k3jax.io.safetensors import CheckpointError
from k3jax.model import K3

FORMAT = 1  # to be raised when directories of before cannot be read any more


def save(directory: str | Path, model: K3, config: K3Config, source: str | Path | None = None) -> None:
    """Write a new directory, which appears whole or not at all. Raises FileExistsError.

    source: a directory whose tokenizer, chat template and generation defaults are copied into it.
    """
    path = Path(os.path.abspath(directory))
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: exists, and is not written over")
    beside = files_beside(source)
    arrays = {name: parameter[...] for name, parameter in parameters_of(model).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        partial = Path(scratch) / path.name
        ocp.save(str(partial), arrays, custom_metadata={"k3jax_format": FORMAT, "config": dataclasses.asdict(config)})
        for file in beside:
            shutil.copyfile(file, partial / file.name)
        partial.rename(path)


def is_orbax(directory: str | Path) -> bool:
    """Whether the directory is an Orbax checkpoint; Orbax's own test also takes safetensors for one."""
    return (Path(directory) / "_CHECKPOINT_METADATA").is_file()


def load(directory: str | Path, dtype: str | None = None, mesh: Mesh | None = None) -> Loaded:
    """Read a directory that `save` wrote, onto the default device or a mesh; experts are packed if they were saved so.

    dtype: as in k3jax.io.hf.load. Raises ConfigError and CheckpointError; a changed byte of an array goes unnoticed.
    """
    check_dtype(dtype)
    path = os.path.abspath(directory)
    config, stored = _metadata(path)
    packed = any(name.endswith("_packed") for name in stored)
    if mesh is not None:
        sharding.check(config, mesh, packed)
    model = K3.abstract(config, dtype=dtype or config.dtype, packed=packed)
    parameters = parameters_of(model)
    arrays, wanted = ({(name, tuple(a.shape)) for name, a in group.items()} for group in (stored, parameters))
    for name, shape in sorted(arrays ^ wanted):
        raise CheckpointError(f"{path}: {name} {list(shape)} is in its arrays or in its config, not in both")
    default = jnp.zeros(()).sharding  # of the default device

    def abstract(name: str, p: nnx.Param) -> jax.ShapeDtypeStruct:
        where = default if mesh is None else NamedSharding(mesh, sharding.spec(p.axes))
        return jax.ShapeDtypeStruct(p.shape, held_dtype(stored[name].dtype, p.dtype, dtype), sharding=where)

    abstract_arrays = {name: abstract(name, p) for name, p in parameters.items()}
    with reading(path):
        for name, array in ocp.load(path, abstract_arrays).items():
            parameters[name].set_value(array)
    model.absorb()
    return Loaded(sharding.placed(model, mesh, sharding.of_model(model)), config)


def read_config(directory: str | Path) -> K3Config:
    """The architecture that was saved with the arrays. Raises ConfigError and CheckpointError."""
    return _metadata(os.path.abspath(directory))[0]


def _metadata(path: str) -> tuple[K3Config, dict[str, Any]]:
    """The config, and by name what is known of each array without reading it."""
    if not is_orbax(path):
        raise CheckpointError(f"{path}: not an Orbax checkpoint")
    with reading(path):
        found = ocp.metadata(path)
    return _config(found.custom_metadata, path), found.metadata or {}


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises this very class for missing and short data
        raise CheckpointError(f"{path}: damaged: {' '.join(str(error).split())[:300]}") from error


def _config(metadata: Any, path: str) -> K3Config:
    match metadata:
        case {"k3jax_format": version} if version != FORMAT:
            raise CheckpointError(f"{path}: format {version!r}, allowed is {FORMAT}")
        case {"k3jax_format": _, "config": dict(values)}:
            fields = {field.name for field in dataclasses.fields(K3Config)}
        case _:
            raise CheckpointError(f"{path}: not a checkpoint of k3jax, or its metadata are damaged")
    if fields != set(values):
        unknown, missing = sorted(set(values) - fields), sorted(fields - set(values))
        raise CheckpointError(f"{path}: config has unknown fields {unknown}, and lacks {missing}")
    values["kda_layers"] = tuple(values["kda_layers"])
    return K3Config(**values)
