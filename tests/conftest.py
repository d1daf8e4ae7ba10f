"""What must be set before jax or k3jax is imported: the platform, and where compiled programs are kept."""

import os
import tempfile

# Tests run on the CPU unless told otherwise: K3JAX_TEST_PLATFORM=cuda runs them on a card.
os.environ["JAX_PLATFORMS"] = os.environ.get("K3JAX_TEST_PLATFORM", "cpu")


def pytest_configure(config):
    """One directory of compiled programs for a whole run: its workers and the programs that tests start inherit it."""
    if not hasattr(config, "workerinput"):
        cache = tempfile.TemporaryDirectory(prefix="k3jax-tests-")
        config.add_cleanup(cache.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
