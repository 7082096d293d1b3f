"""The page in a real browser: questions, thinking that folds, stop, a closed tab, no network but ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.serve.conftest import idle, running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the network is cut
]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    """Chromium with a profile of its own, which resolves no host; what asks for one goes to `strangers`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, headless=True, args=FLAGS,
            viewport={"width": 1100, "height": 900},
        )  # fmt: skip
        context.set_default_timeout(30_000)
        context.strangers = []
        ours = ("http://127.0.0.1:", "data:", "blob:")
        context.on("request", lambda r: r.url.startswith(ours) or context.strangers.append(r.url))
        yield context
        context.close()


def visit(browser, url: str):
    """The chat page, once it listens to its box."""
    page = browser.new_page()
    page.goto(f"{url}/ui/")
    page.wait_for_selector("#box textarea")
    return page


@pytest.fixture
def page(browser, server) -> Iterator:
    """A freshly loaded chat page."""
    page = visit(browser, server.url)
    yield page
    page.close()
    assert browser.strangers == [], "the page asked somebody else"


def ask(page, question: str) -> None:
    """Type a question and send it, as soon as the box may be written in."""
    page.wait_for_selector("#box .submit-button")
    page.fill("#box textarea", question)
    page.press("#box textarea", "Enter")
    page.wait_for_function("document.querySelector('#box textarea').value === ''")


def test_a_question_is_thought_about_and_answered(page, scripted):
    assert "every reply is noise" in page.inner_text("#banner")
    ask(page, "What is a harbour?")
    page.wait_for_selector("#chat >> text=A sheltered place for ships — quiet.")
    page.wait_for_selector("#chat >> text=/\\d+ \\+ \\d+ tokens · first after .* tokens\\/s/")
    assert not page.is_visible("text=A word about ships."), "the thought is folded"
    page.click("#chat >> text=Thought")
    page.wait_for_selector("text=A word about ships.")
    idle(scripted)


def test_thinking_is_shown_while_it_goes_on_and_stop_frees_the_cache(page, scripted):
    ask(page, "Tell me a long story.")
    page.wait_for_selector("#chat >> text=Thinking")
    page.wait_for_selector("#chat >> text=All work and no play")
    assert running(scripted)["blocks_free"] < scripted.stats()["blocks_total"]
    page.click("#box .stop-button")
    idle(scripted, seconds=3)
    page.wait_for_selector("#chat >> text=(stopped)")
    page.wait_for_selector("#box .submit-button")
    ask(page, "What is a harbour?")
    page.wait_for_selector("#chat >> text=A sheltered place for ships — quiet.")


def test_a_closed_tab_frees_the_cache(browser, server, scripted):
    page = visit(browser, server.url)
    ask(page, "Tell me a long story.")
    page.wait_for_selector("#chat >> text=Thinking")
    running(scripted)
    page.close()
    idle(scripted)


def test_retry_edit_and_undo(page, scripted):
    ask(page, "What is a harbour?")
    page.wait_for_selector("#chat >> text=tokens/s")
    page.click("#chat [aria-label=Edit]")
    page.fill("#chat textarea", "Give me an object.")
    page.click("#chat [aria-label=Submit]")
    page.wait_for_selector('#chat >> text={"name": "Mira", "age": 34}')
    page.wait_for_selector("#chat >> text=tokens/s")
    page.click("#chat [aria-label=Retry]")
    page.wait_for_selector("#chat >> text=tokens/s", state="detached")
    page.wait_for_selector("#chat >> text=tokens/s")
    page.click("#chat [aria-label=Undo]")
    page.wait_for_selector("#chat >> text=Give me an object.", state="detached")
    assert page.input_value("#box textarea") == "Give me an object."


def test_a_limit_inside_the_thinking_offers_more_room(page):
    page.click("text=Settings")
    page.fill("#limit input[type=number]", "6")
    page.press("#limit input[type=number]", "Tab")
    page.wait_for_timeout(300)  # no hand is faster; the page hands its settings on in its next frame
    ask(page, "What is a harbour?")
    page.wait_for_selector("#chat >> text=Thought, ran out of tokens")
    for _ in range(4):  # 12, 24, 48, 96 tokens
        page.click("#again")
        page.wait_for_selector("#chat >> text=tokens/s", state="detached")
        page.wait_for_selector("#chat >> text=tokens/s")
    page.wait_for_selector("#chat >> text=A sheltered place for ships — quiet.")
    assert not page.is_visible("#again")


def test_a_refused_request_shows_its_reason(page):
    page.click("text=Settings")
    page.fill("#tools textarea", "[{}]")
    ask(page, "Hi")
    page.wait_for_selector("text=tools[0] needs a function with a name")


def test_a_tool_call_of_the_examples_and_its_result(browser, scripted, monkeypatch):
    """The page of the demo's folder, over the scripted LLM: a tool call and its result."""
    from dskit import serve
    from dskit.config import PRESETS_DIR
    from dskit.serve import ui

    monkeypatch.setattr(ui, "folder_of", lambda name: PRESETS_DIR / "demo")
    with serve.start(scripted, port=0) as server:
        page = visit(browser, server.url)
        page.click("#examples button >> text=A tool call")
        page.wait_for_selector("#chat >> text=Calls get_weather")
        page.wait_for_selector('#chat >> text=/"city": "Bergen"/')
        ask(page, "12 degrees")
        page.wait_for_selector("#chat >> text=It is sunny in Bergen.")
        page.close()


def test_the_page_answers_under_a_notebooks_cell(browser, server):
    cell = browser.new_page()
    cell.set_content(server._repr_html_())
    page = cell.frame_locator("iframe[title='dskit chat page']")
    page.locator("#box .submit-button").wait_for()
    page.locator("#box textarea").fill("What is a harbour?")
    page.locator("#box textarea").press("Enter")
    page.get_by_text("A sheltered place for ships").wait_for()
    cell.close()
