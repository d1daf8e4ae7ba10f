"""GPU kernels. They see arrays and numbers alone; `k3jax.kernels` decides when they run, `k3jax.ops` calls them.

No step calls `kda_verify`, `all_reduce` or the snapshots of `kda_prefill` yet.
"""

import jax


def cannot_compile() -> str | None:
    """Why kernels cannot be compiled here whatever the model, or None. Interpreted they run on older versions of jax too."""
    version = tuple(map(int, jax.__version__.split(".")[:2]))
    return None if version >= (0, 11) else f"jax={jax.__version__}: allowed are 0.11 and newer"
