"""load(): a model directory to an LM."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from k3jax import inputs, sharding
from k3jax.config import ConfigError, K3Config
from k3jax.io import hf, orbax
from k3jax.io.tokenizer import Tokenizer
from k3jax.kernels import Kernels
from k3jax.lm import LM


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    kernels: Kernels | str = "auto",
    mesh: Mesh | None = None,
    experts: str = "decoded",
    cache: str | os.PathLike[str] | None = None,
) -> LM:
    """Load a model directory: a Hugging Face one (K3 or Kimi-Linear, safetensors) or an Orbax one of ours.

    dtype: "bfloat16", "float32", or None to keep what is stored. kernels: "auto", "xla" (no GPU kernels) or a Kernels.
    experts: "decoded", or "packed" to keep MXFP4 experts at 4.25 bits a weight in memory. mesh: of k3jax.make_mesh, whose
    devices share it. cache: a local directory for the bytes of a directory on a slow disk, where an interrupted load goes on next time.
    Raises ConfigError, CheckpointError, TokenizerError or, for an option, plain ValueError. Options, configuration, tokenizer
    and the tensors' names, shapes and dtypes are checked before any weight is read.
    """
    if not isinstance(experts, str) or experts not in ("decoded", "packed"):
        raise ValueError(f"experts={experts!r}: allowed are 'decoded' and 'packed'")
    directory, cache = inputs.path("path", path), None if cache is None else inputs.path("cache", cache)
    if not directory.is_dir():
        raise ValueError(f"path={str(path)!r}: no such directory; allowed is a model's directory on disk")
    if cache is not None and cache.resolve() == directory.resolve():
        raise ValueError(f"cache={str(cache)!r}: allowed is another directory than the model's")
    in_orbax = orbax.is_orbax(directory)
    if in_orbax and cache is not None:
        raise ValueError(f"cache={str(cache)!r}: allowed is None for an Orbax directory")
    if in_orbax and experts == "packed":
        raise ValueError("experts='packed': an Orbax directory keeps its experts as they were saved")
    config = (orbax if in_orbax else hf).read_config(directory)
    tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    end_ids = _end_ids(directory, config, tokenizer)
    if mesh is not None:
        sharding.check(config, mesh, packed=experts == "packed")
    kernels = Kernels.resolve(kernels, config, None if mesh is None else mesh.devices.flat[0].platform)
    _keep_compiled_programs()
    if in_orbax:
        loaded = orbax.load(directory, dtype=dtype, mesh=mesh)
    else:
        loaded = hf.load(directory, dtype=dtype, packed=experts == "packed", mesh=mesh, cache=cache)
    return LM(loaded.model, loaded.config, tokenizer, kernels, end_ids, loaded.ignored, directory, mesh)


def _end_ids(directory: Path, config: K3Config, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens that end a generation: the union of what the configuration, the generation defaults and the tokenizer say."""
    ends = [] if config.eos_token_id is None else [config.eos_token_id]
    defaults = directory / "generation_config.json"
    if defaults.exists():
        eos = hf.read_json(defaults).get("eos_token_id")
        ends += eos if isinstance(eos, list) else [] if eos is None else [eos]
    for end in ends:
        if type(end) is not int or not 0 <= end < config.vocab_size:
            raise ConfigError(f"eos_token_id has {end!r}: allowed are token ids, 0 to {config.vocab_size - 1}")
    special = {} if tokenizer is None else tokenizer.special_ids
    return sorted({*ends, *(special[name] for name in ("[EOS]", "<|end_of_msg|>", "<|im_end|>") if name in special)})


def cache_directory() -> Path:
    """Where compiled programs are kept: what jax was told, or a place in the user's cache."""
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "k3jax" / "compiled")


def _keep_compiled_programs() -> None:
    """Compiled programs outlive the process, unless the user has chosen a cache. Programs of any size and speed are kept."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
