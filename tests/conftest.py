"""What must be set before jax or k3jax is imported: the platform, shape checks, and where compiled programs are kept."""

import os
import tempfile

# Tests run on the CPU unless told otherwise: K3JAX_TEST_PLATFORM=cuda runs them on a card.
PLATFORM = os.environ.get("K3JAX_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = PLATFORM

# Modules whose array annotations are checked at every call. Those that read users' input refuse what is wrong by
# themselves, and their tests hand them just that.
SHAPE_CHECKED = []
if PLATFORM == "cpu":
    from jaxtyping import install_import_hook

    install_import_hook([f"k3jax.{name}" for name in SHAPE_CHECKED], "beartype.beartype")


def pytest_configure(config):
    """One directory of compiled programs for a whole run: its workers and the programs that tests start inherit it."""
    if not hasattr(config, "workerinput"):
        cache = tempfile.TemporaryDirectory(prefix="k3jax-tests-")
        config.add_cleanup(cache.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
