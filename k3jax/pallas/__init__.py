"""GPU kernels. They see arrays and numbers alone; k3jax.ops decides when they run."""
