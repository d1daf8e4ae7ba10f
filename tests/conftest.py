"""What must be set before jax or k3jax is imported: the platform, and where compiled programs are kept."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

# Tests run on the CPU unless told otherwise: K3JAX_TEST_PLATFORM=cuda runs them on a card, where tests/gpu always runs.
ON_GPU = any("tests/gpu" in argument for argument in sys.argv)
collect_ignore = [] if ON_GPU else ["gpu"]
os.environ["JAX_PLATFORMS"] = os.environ.get("K3JAX_TEST_PLATFORM", "cuda" if ON_GPU else "cpu")
# Eight devices for what is sharded; the rest runs on the first, as it would alone.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


def pytest_configure(config):
    """One directory of compiled programs for a whole run: its workers and the programs that tests start inherit it."""
    if not hasattr(config, "workerinput"):
        cache = tempfile.TemporaryDirectory(prefix="k3jax-tests-")
        config.add_cleanup(cache.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


_kept = 5_000  # memory maps after the last time that programs were dropped


@pytest.fixture(autouse=True)
def _room_for_programs():
    """A program on a CPU takes dozens of memory maps, and a process may have 65,530: a worker drops its old ones in time."""
    yield
    global _kept
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _kept + 20_000:
        import jax

        jax.clear_caches()
        _kept = maps.read_bytes().count(b"\n")


TINY = Path(__file__).parents[1] / "checkpoints" / "k3-tiny"


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """A directory with the first five layers of k3-tiny, which hold all its parts: what compiles takes a third of the time."""
    directory = tmp_path_factory.mktemp("short")
    for file in TINY.iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = 5  # what lies past them is ignored
    for name in ("kda_layers", "full_attn_layers"):
        text["linear_attn_config"][name] = [layer for layer in text["linear_attn_config"][name] if layer <= 5]
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def pair(short):
    """An LM of two layers of k3-tiny, one of each kind of mixer and of feed-forward: what compiles takes a second."""
    import k3jax
    from k3jax.io.hf import parameters_of
    from k3jax.model import K3

    config = k3jax.K3Config.tiny(num_hidden_layers=2, kda_layers=(0,))
    with k3jax.load(short, dtype="float32") as source:
        held = parameters_of(source.model)
        model = K3.abstract(config, dtype="float32")
        for name, parameter in parameters_of(model).items():
            parameter.set_value(held[name.replace("layers.1.", "layers.3.")][...].copy())
        with k3jax.LM(model.absorb(), config, source.tokenizer, source.kernels, source.end_ids, directory=short) as lm:
            yield lm


@pytest.fixture(scope="session")
def pair_directory(pair, tmp_path_factory):
    """The same as a directory."""
    directory = tmp_path_factory.mktemp("pair") / "model"
    pair.save(directory)
    return directory
