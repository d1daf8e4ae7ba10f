"""The rules of the house: imports, lint, types, versions, what may not stand in a file, and what is shipped."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import k3jax

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.glob("k3jax/**/*.py")
)


def run(*command, **kwargs):
    """Output of a command run at the root; the test fails with the output if the command does."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def tool(name, *args):
    return run(Path(sysconfig.get_path("scripts")) / name, *args)


def test_imports():
    tool("lint-imports", "--no-cache")


def test_lint():
    tool("ruff", "check", "--no-cache")


@pytest.mark.slow
def test_types():
    tool("basedpyright", "--pythonpath", sys.executable)


def test_the_changelog_names_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.group(1) == k3jax.__version__


# Directories of some machine, and hosts that packages come from. Brackets keep the patterns from finding themselves.
MACHINE = re.compile(r"(?<![\w.])/(?:[w]ork|[r]oot|[h]ome|[U]sers)/")
SCRATCH = re.compile(r"(?<![\w.])/[t]mp/")
HOSTS = re.compile(r"[p]ypi\.org|[p]ythonhosted|[n]pmjs|[d]ebian\.org")


def test_no_file_names_a_machine():
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    paths = [ROOT / name for name in names if (ROOT / name).is_file()]
    assert ROOT / "k3jax/model.py" in paths
    found = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and arrays
        patterns = [MACHINE, HOSTS] if path.is_relative_to(ROOT / "tests") else [MACHINE, HOSTS, SCRATCH]
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for pattern in patterns for hit in pattern.finditer(text)]
    assert not found


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The source archive, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_what_is_shipped(dist):
    sdist, wheel = dist
    package = {str(path.relative_to(ROOT)) for path in ROOT.glob("k3jax/**/*.py")} | {"k3jax/py.typed"}
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert package | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"} == shipped - {".gitignore"}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert package == shipped
    assert f"\nVersion: {k3jax.__version__}\n" in metadata
    base = {
        line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert {re.split(r"[<>=]", name)[0] for name in base} == {
        "flax", "jax", "jaxtyping", "jinja2", "ml-dtypes", "numpy", "orbax-checkpoint", "rich", "tiktoken", "tyro",
    }  # fmt: skip


@pytest.mark.slow
def test_the_wheel_installs_and_imports(dist, tmp_path):
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path, dist[1])
    imports = "\n".join(f"import {name}" for name in MODULES)
    code = (
        f"{imports}\nimport sys\nfor name, module in sys.modules.items():\n  if 'k3jax' in name: print(module.__file__)"
    )
    files = run(sys.executable, "-P", "-c", code, env={**os.environ, "PYTHONPATH": str(tmp_path)}).split()
    assert len(files) == len(MODULES)
    assert all(Path(file).is_relative_to(tmp_path) for file in files)
    assert (tmp_path / "bin" / "k3jax").is_file()
