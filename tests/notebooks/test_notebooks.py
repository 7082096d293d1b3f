"""Notebooks: in step with their .py twins, without outputs, run top to bottom in time, solved as well."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SHORT = ("00_start",)  # run by default; the others with the slow tests
SECONDS = 60  # of one notebook on two cores


def read(name: str) -> nbformat.NotebookNode:
    """The notebook as its .py twin writes it: the source of truth."""
    return jupytext.read(FOLDER / f"{name}.py")


def exercises(notebook: nbformat.NotebookNode) -> dict[str, nbformat.NotebookNode]:
    """Cells that a reader works on, by tag."""
    tags = {tag: cell for cell in notebook.cells for tag in cell.metadata.get("tags", [])}
    return {tag: cell for tag, cell in tags.items() if tag.startswith("exercise-")}


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell wrote to stdout."""
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def html_of(cell: nbformat.NotebookNode) -> str:
    """What a cell displayed as HTML."""
    return "".join(out.data.get("text/html", "") for out in cell.outputs if "data" in out)


def test_every_notebook_has_its_twin_and_its_solutions():
    assert NAMES and sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    assert sorted(path.stem for path in (FOLDER / "solutions").glob("*.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ipynb_is_what_jupytext_writes_from_the_py(name):
    wanted, found = read(name), nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert [(c.cell_type, c.source, c.metadata.get("tags")) for c in found.cells] == [
        (c.cell_type, c.source, c.metadata.get("tags")) for c in wanted.cells
    ], "make notebooks writes the .ipynb anew"
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "committed without outputs"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.slow) for name in NAMES]
)
def test_runs_top_to_bottom_and_the_solutions_solve_it(name, tmp_path, capsys):
    """Exercises as given say `not yet`; then the solutions, in the same kernel, say `pass`."""
    notebook = read(name)
    asked, length = exercises(notebook), len(notebook.cells)
    solved = exercises(jupytext.read(FOLDER / "solutions" / f"{name}.py"))
    assert len(asked) == 3 and asked.keys() == solved.keys()
    notebook.cells += solved.values()
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    start = time.perf_counter()
    client.execute(env=environment)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{name}: {seconds:.1f} s with its solutions")
    assert [printed(cell)[:7] for cell in asked.values()] == ["not yet"] * 3
    assert [printed(cell).strip() for cell in solved.values()] == ["pass"] * 3
    assert seconds < SECONDS
    shown = [html_of(cell) for cell in notebook.cells[:length] if cell.cell_type == "code"]
    assert sum("<img " in page for page in shown) >= 3, "picture, panel and the panel's picture"
    assert all('alt="' in page for page in shown if "<img " in page)


OFFLINE = """
import socket
real = socket.socket.connect, socket.getaddrinfo
def connect(self, address):
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), f"network used: {address}"
    return real[0](self, address)
def look_up(host, *args, **kwargs):
    assert host in (None, "", "localhost", "127.0.0.1", "0.0.0.0", "::1"), f"network used: {host}"
    return real[1](host, *args, **kwargs)
socket.socket.connect, socket.getaddrinfo = connect, look_up
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_twice_in_one_kernel_without_a_network_and_becomes_a_page(name, tmp_path):
    """Run all, and run all again; the page that nbconvert writes has the static figures and their words."""
    notebook, again = read(name), read(name)
    length = len(notebook.cells)
    notebook.cells = [nbformat.v4.new_code_cell(OFFLINE), *notebook.cells, *again.cells]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    client = NotebookClient(notebook, timeout=2 * SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    notebook.cells = notebook.cells[: length + 1]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    pictures = re.findall(r"<img [^>]*>", page)
    worded = [re.search(r'alt=\\?"[^"]{40}', picture) for picture in pictures]  # escaped in a widget's state
    assert len(pictures) >= 3 and all(worded)
