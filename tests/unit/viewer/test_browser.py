"""The viewer in headless Chromium: nothing hostile runs, pages are accessible, live, and usable by keyboard."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.observability.metrics_file import JsonlTracker
from alphaapollo.viewer.app import make_app, make_server
from alphaapollo.viewer.index import RunIndex
from tests.unit.viewer.run_kit import HOSTILE, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (e.g. apt-get install chromium)"),
    pytest.mark.timeout(300),
]
PAGES = ("/", "/runs/1", "/runs/1/health", "/runs/1/step/1", "/runs/1/step/1/0", "/compare?run=1&run=2", "/runs/9")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a viewer, and its folder."""
    root = tmp_path_factory.mktemp("viewer") / "outputs"
    write_run(root / "first", text=HOSTILE)
    write_run(root / "second", seed=1)
    index = RunIndex(root, root.parent / "index.sqlite")
    with closing(index.connect()) as database:
        index.update(database)
    server = make_server(make_app(index, ["127.0.0.1"]), port=0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the viewer did not start"
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", root
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_are_accessible_and_fit_the_screen(
    browser: Any, address: tuple[str, Path], width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    for path in PAGES:
        page.goto(address[0] + path)
        violations = Axe().run(page).response["violations"]
        assert not violations, [(path, one["id"], [node["html"] for node in one["nodes"]]) for one in violations]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    page.close()


def test_curves_are_drawn_and_hostile_samples_do_nothing(browser: Any, address: tuple[str, Path]) -> None:
    page = browser.new_page()
    requests, dialogs = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.goto(f"{address[0]}/runs/1")
    page.wait_for_selector(".main-svg", timeout=20_000)
    page.goto(f"{address[0]}/runs/1/step/1/0")
    page.get_by_text("live", exact=True).wait_for()
    assert "hacked" not in page.title() and not dialogs
    assert HOSTILE in page.inner_text(".message.assistant")
    assert all(url.startswith((address[0], "data:")) for url in requests)
    page.close()


def test_tokens_by_keyboard(browser: Any, address: tuple[str, Path]) -> None:
    page = browser.new_page()
    page.goto(f"{address[0]}/runs/2/step/1/0")
    page.focus(".tokens")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "trainer -0.700" in " ".join(page.inner_text("#token").split())
    assert page.is_visible(".thought")
    page.focus("#show-thoughts")
    page.keyboard.press("Space")
    assert not page.is_visible(".thought")
    page.close()


def test_an_open_page_follows_the_run(browser: Any, address: tuple[str, Path]) -> None:
    page = browser.new_page()
    page.goto(address[0])
    page.get_by_text("live", exact=True).wait_for()
    JsonlTracker(address[1] / "second/metrics.jsonl", 3).log(7, {"timing/step": 1.0})
    page.get_by_text("7 of 9").wait_for(timeout=20_000)
    page.close()
