"""GPU kernels. They see arrays and numbers alone; `k3jax.kernels` decides when they run, `k3jax.ops` calls them.

Most are Pallas-Triton. `*_mosaic` are second forms of the heaviest in Mosaic GPU, for Hopper, whose matrix instructions and memory
barriers they use; the function that both serve takes one by what it is given. `all_reduce` is Mosaic GPU alone. No step calls `kda_verify`,
`all_reduce` or the snapshots of `kda_prefill` yet.
"""

import jax


def cannot_compile() -> str | None:
    """Why kernels cannot be compiled here whatever the model, or None. Interpreted they run on older versions of jax too."""
    version = tuple(map(int, jax.__version__.split(".")[:2]))
    return None if version >= (0, 11) else f"jax={jax.__version__}: allowed are 0.11 and newer"


def no_mosaic() -> str | None:
    """Why the forms in Mosaic GPU can neither be compiled nor interpreted here, or None. Where no GPU is, Hopper is meant."""
    if reason := cannot_compile():
        return reason
    capability = getattr(jax.devices()[0], "compute_capability", "9.0") if jax.default_backend() == "gpu" else "9.0"
    return None if capability == "9.0" else f"compute_capability={capability}: allowed is 9.0 (Hopper)"
