"""The notebook of docs/ runs from its first cell to its last."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.wide]


def test_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    book = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=500, kernel_name="python3", resources=resources).execute()
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    assert "finished" in outputs[3][-1].data["text/plain"]
    assert "my_parts" in outputs[6][-1].data["text/plain"]
