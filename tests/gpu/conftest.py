"""`pytest tests/gpu` on a machine with a GPU; the rest of the suite leaves this folder alone."""

import jax
import pytest

try:
    jax.devices("gpu")
except (RuntimeError, AssertionError) as error:  # what jax raises differs by what is installed
    pytest.exit(f"tests/gpu needs a GPU: {error}", returncode=2)
