"""Probe: named sites inside the forward pass, and the one way to read them.

A module calls `x = tap("site", x)` where something worth seeing exists. Outside a trace the call returns `x` unchanged;
what a probe saves leaves the compiled step as one more output.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from k3jax.config import K3Config

Tap = Callable[[str, Array], Array]

# Sites of the pass as a whole, and of each kind of layer (written site_L with the zero-based layer).
_GLOBAL = ("embed", "hidden", "final_hidden")
_KDA = ("kda_core", "kda_out", "kda_log_decay", "kda_beta", "kda_state", "kda_conv_q", "kda_conv_k", "kda_conv_v")
INSIDE_KDA = tuple(site for site in _KDA if site != "kda_out")  # what a kernel does not show
_MLA = ("mla_latent", "mla_krope", "mla_out")
_MOE = ("router_ids", "router_weights", "moe_out")


# Of those sites that are divided over ranks: axes by name, as a parameter's.
_DIVIDED = dict.fromkeys(_KDA, jax.P(None, "heads")) | {"kda_out": jax.P()}


def axes(site: str) -> jax.P:
    """How what is saved at a site is divided over ranks."""
    return _DIVIDED.get(site.rpartition("_")[0], jax.P())


def sites(config: K3Config) -> tuple[str, ...]:
    """Every name that can be traced in this model."""
    names: list[str] = list(_GLOBAL)
    for layer in range(config.num_hidden_layers):
        of_layer: list[str] = list(_KDA if config.mixer(layer) == "kda" else _MLA)
        if config.is_moe(layer):
            of_layer += _MOE
        if config.attn_res_block_size is not None:
            of_layer += ["attnres_attn"] * (layer > 0) + ["attnres_mlp", "attnres_R", "attnres_R_attn"]
        names += [f"{site}_{layer}" for site in of_layer]
    if config.attn_res_block_size is not None:
        names.append("attnres_out")
    return tuple(names)


def expand(config: K3Config, wanted: Iterable[str]) -> tuple[str, ...]:
    """Site names for `wanted`, each a name or a shell pattern (`router_ids_*`). Raises ValueError on one that fits nothing."""
    known = sites(config)
    found: list[str] = []
    for pattern in wanted:
        fits = fnmatch.filter(known, pattern)
        if not fits:
            raise ValueError(f"site {pattern!r} names nothing in this model; {_what_there_is(pattern, known)}")
        found += [name for name in fits if name not in found]
    return tuple(found)


def _what_there_is(pattern: str, known: Iterable[str]) -> str:
    """The layers of the site meant, or else all kinds of sites."""
    layers: dict[str, list[str]] = {}
    for name in known:
        kind, _, layer = name.rpartition("_") if name[-1].isdigit() else (name, "", "")
        layers.setdefault(kind, []).append(layer)
    kind = pattern.rpartition("_")[0]
    if kind in layers:
        return f"layers of {kind} are {', '.join(layers[kind])}"
    return f"kinds are {', '.join(sorted(layers))} (with _LAYER)"


@dataclasses.dataclass(frozen=True)
class Probe:
    """What to save: site names, hashable, part of the static context of a step."""

    save: frozenset[str] = frozenset()

    def wants(self, *kinds: str) -> bool:
        """Whether a site of one of these kinds is saved, in whatever layer."""
        return any(site.rpartition("_")[0] in kinds for site in self.save)


class Taps:
    """The values saved while one step is traced. Lives only as long as the trace."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.values: dict[str, Any] = {}

    def __call__(self, site: str, value: Array) -> Array:
        if site in self.probe.save:
            self.values[site] = value
        return value

    def at(self, layer: int) -> Tap:
        """The tap of one layer: `tap("kda_beta", x)` saves as `kda_beta_3` in layer 3."""
        return lambda site, value: self(f"{site}_{layer}", value)


def as_traced(config: K3Config, name: str, value: np.ndarray, length: int) -> np.ndarray:
    """What a site tapped in a pass over one prompt: without its padding, in the golden data's axis order."""
    if value.dtype == jnp.bfloat16:
        value = value.astype(np.float32)
    if name.startswith("kda_state"):
        return value[0]
    if name.startswith("attnres_R"):
        return value
    if name.startswith("kda_conv"):
        width = config.short_conv_kernel_size
        return np.concatenate([np.zeros((width, *value.shape[1:]), value.dtype), value[:length]])[-width:]
    return value[:, :length] if name == "hidden" else value[:length]
