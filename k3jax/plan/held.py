"""What one GPU holds of a model: bytes of parameters, slots and pages, from the code that makes them, traced without memory."""

from __future__ import annotations

import bisect
import functools
import math
import re
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from k3jax import carry as carries
from k3jax import generate, sharding
from k3jax.config import K3Config
from k3jax.model import K3

# Component of a parameter: the first whose pattern its path fits. The first one is ours alone, made from the others at load.
_COMPONENTS = (
    ("absorbed", r"W_UK_T|W_UV"),
    ("experts", r"\.experts\."),
    ("attention", r"\.self_attn\."),
    ("latent projections", r"routed_expert_"),
    ("shared experts", r"shared_experts"),
    ("router", r"\.gate\."),
    ("embed + head", r"^lm_head|^model\.(embed_tokens|norm|output_)"),
    ("dense + norms", r""),
)
RELEASED = tuple(name for name, _ in _COMPONENTS[1:])


class Parameter(NamedTuple):
    layer: int  # -1: of the whole model
    component: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int
    factors: int  # numbers that a token is multiplied by, for each one that is stored


@functools.lru_cache(maxsize=8)
def _parameters(config: K3Config, dtype: str, packed: bool) -> tuple[Parameter, ...]:
    """All that a loaded model holds."""
    model, found = jax.eval_shape(K3.absorb, K3.abstract(config, dtype=dtype, packed=packed)), []
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            names = list(map(str, path))
            name, layer = ".".join(names), int(names[2]) if names[1] == "layers" else -1
            component = next(component for component, pattern in _COMPONENTS if re.search(pattern, name))
            plain = (
                len(node.shape) > 1 and "embed_tokens" not in name
            )  # neither a vector nor a table of which rows are taken
            factors = {"weight_packed": 2, "weight_scale": 0}.get(names[-1], int(plain))
            found.append(Parameter(layer, component, node.shape, node.axes, node.dtype.itemsize, factors))
    return tuple(found)


@functools.lru_cache(maxsize=128)
def _pools(config: K3Config, dtype: str) -> tuple[tuple[Any, Any], ...]:
    """Arrays and axes of a slot's memory, of a slot's sampling and of a page."""
    carry = jax.eval_shape(functools.partial(carries.empty, config, slots=1, pages=1, dtype=dtype))
    sampling = jax.eval_shape(lambda: generate.rows([], [], [], (), 1, config.vocab_size))
    memory, axes = carry._replace(mla=()), carries.axes(carry)
    return (memory, axes._replace(mla=())), (sampling, generate.axes(sampling)), (carry.mla, axes.mla)


class Held(NamedTuple):
    """What one GPU holds of a model; `layers` are the first ones, None all."""

    config: K3Config
    dtype: str
    packed: bool
    ep: int
    tp: int

    def _sums(self, field: Literal["itemsize", "factors"], layers: int | None) -> dict[str, int]:
        sums = dict.fromkeys((name for name, _ in _COMPONENTS), 0)
        for p in _parameters(self.config, self.dtype, self.packed):
            if layers is None or p.layer < layers:
                sums[p.component] += math.prod(sharding.share(p.shape, p.axes, self.ep, self.tp)) * getattr(p, field)
        return sums

    def weights(self, layers: int | None = None) -> dict[str, int]:
        """Bytes by component."""
        return self._sums("itemsize", layers)

    def factors(self) -> dict[str, int]:
        """Numbers by component that a token is multiplied by where it meets all of them."""
        return self._sums("factors", None)

    def pools(self, layers: int | None = None) -> tuple[int, int, int]:
        """Bytes of a slot's memory, of a slot's sampling and of a page."""
        config = self.config if layers is None else self.config.slice(layers)
        state, sampling, page = (sharding.rank_bytes(*pool, self.ep, self.tp) for pool in _pools(config, self.dtype))
        return state, sampling, page

    def fits(self, room: int, layers: int | None = None) -> bool:
        """Whether ranks can share the model so, and weights, one slot and one page take at most `room` bytes."""
        try:
            sharding.check_split(self.config, self.ep, self.tp, self.packed)
        except ValueError:
            return False
        return sum(self.weights(layers).values()) + sum(self.pools(layers)) <= room

    def layers(self, room: int) -> int:
        """How many of the first layers fit."""
        every = range(1, self.config.num_hidden_layers + 1)
        return bisect.bisect_left(every, True, key=lambda layers: not self.fits(room, layers))
