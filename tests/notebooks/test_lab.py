"""JupyterLab in a real browser: the swap panel of notebook 06 is clicked, its table and picture change."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import nbformat
import pytest

from tests.serve.test_browser import CHROMIUM, FLAGS

FOLDER = Path(__file__).parents[2] / "notebooks"
NAME = "06_kernel_swap_and_profile.ipynb"
PATIENCE_MS = 150_000
WHOLE_PAGE = {"windowingMode": "none"}  # every cell is on the page, whether or not it is in sight
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)"),
]


def until_the_panel() -> nbformat.NotebookNode:
    """Notebook 06 as far as the cell that shows the panel; what follows clicks by code."""
    notebook = nbformat.read(FOLDER / NAME, as_version=4)
    (last,) = [i for i, cell in enumerate(notebook.cells) if cell.source.endswith("\npanel")]
    notebook.cells = notebook.cells[: last + 1]
    return notebook


@pytest.fixture
def lab(tmp_path) -> Iterator[str]:
    """A JupyterLab of its own on a free port; gives the notebook's address."""
    nbformat.write(until_the_panel(), tmp_path / NAME)
    settings = tmp_path / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps(WHOLE_PAGE))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(8)
    own = {f"JUPYTER_{what}_DIR": str(tmp_path / what.lower()) for what in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"PYTHONPATH": str(FOLDER.parent), "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", f"--ServerApp.port={port}"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
        *(f"--ServerApp.root_dir={tmp_path}", f"--LabApp.user_settings_dir={tmp_path / 'settings'}"),
        *("--LabApp.news_url=", "--LabApp.extension_manager=readonly", "--ServerApp.allow_root=True"),
    ]
    with (tmp_path / "lab.log").open("w") as log:
        running = subprocess.Popen(command, cwd=tmp_path, env=os.environ | own, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/api?token={token}", running)
        yield f"{url}/lab/tree/{NAME}?token={token}"
    finally:
        running.terminate()  # it ends its kernels
        running.wait(timeout=30)


def wait_for(url: str, running: subprocess.Popen, seconds: float = 90) -> None:
    """Return once the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and running.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail("JupyterLab did not start")


@pytest.fixture
def page(lab, tmp_path) -> Iterator:
    """The notebook in chromium, its kernel ready."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, headless=True, args=FLAGS,
            viewport={"width": 1300, "height": 1000},
        )  # fmt: skip
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(lab)
        page.wait_for_selector("#jp-main-statusbar >> text=/ipykernel.*Idle/")  # else a dialog asks for one
        yield page
        context.close()


def test_a_click_in_the_swap_panel_changes_its_table_and_redraws_its_figure(page, tmp_path):
    page.click(".lm-MenuBar-itemLabel >> text=Run")
    page.click(".lm-Menu-itemLabel >> text=/^Run All Cells$/")
    line = page.locator(".widget-hbox", has=page.locator(".widget-label >> text=/^norm$/")).last
    line.wait_for()
    figure = page.locator(".widget-html img[alt^='What each group of ops runs']").first
    figure.wait_for()
    table, picture, said = line.inner_text(), figure.get_attribute("src"), figure.get_attribute("alt")
    assert "torch in use" in table and "norm = torch" in said

    line.locator("button >> text=/^triton$/").click()
    page.wait_for_selector(".widget-html img[alt*='norm = triton, triton in use']")
    page.wait_for_selector("code >> text=dskit.use(norm='triton')")
    assert "triton in use" in line.inner_text() != table
    assert figure.get_attribute("src") != picture
    page.screenshot(path=tmp_path / "swap.png")

    page.locator("button >> text=/^reset$/").click()
    page.wait_for_selector(".widget-html img[alt*='norm = torch, torch in use']")
    assert figure.get_attribute("src") != ""
