"""Context: all that is static about a step."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from k3jax.kernels import Kernels
from k3jax.probe import Probe
from k3jax.ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Context:
    """Rows [0, decode_rows) hold one token each, at the packed position of their index.

    mesh: that of the arrays, which shard_map divides; None on one device. Layers see the ranks alone.
    """

    kernels: Kernels
    decode_rows: int = 0
    probe: Probe = Probe()
    mesh: Mesh | None = None

    @property
    def ranks(self) -> Ranks:
        """What the code of one rank knows of the others."""
        return Ranks(divided=self.mesh is not None)
