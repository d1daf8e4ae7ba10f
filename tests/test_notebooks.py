"""The notebooks: each is its Python file, and runs."""

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))


def name(path):
    return path.stem


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["01_one_request"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_is_its_python_file(path):
    pair = [jupytext.read(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4)]
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in pair]
    assert cells[0] == cells[1], "make notebooks writes it anew"
    assert all(cell.outputs or "print" not in cell.source for cell in pair[1].cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_runs(path):
    """With its own assertions."""
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": path.parent}}).execute()
