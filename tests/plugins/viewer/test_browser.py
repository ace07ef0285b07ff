"""The viewer in headless Chromium: nothing hostile runs, pages are accessible, live, and usable by keyboard."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.plugins.viewer.app import make_app, make_server
from alphaapollo.plugins.viewer.report import make_report
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.runs.metrics_file import JsonlTracker
from alphaapollo.runs.run_status import RunStatus, write_run_status
from tests.plugins.viewer.run_kit import HOSTILE, PAGES, update_index, write_every_kind

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (e.g. apt-get install chromium)")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a viewer, and its folder."""
    root = tmp_path_factory.mktemp("viewer") / "outputs"
    write_every_kind(root, HOSTILE)
    server = make_server(make_app(update_index(root), ["127.0.0.1"]), port=0)
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


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1920, "light"), (1280, "light"), (390, "dark")])
def test_pages_are_accessible_and_fit_the_screen(
    browser: Any, address: tuple[str, Path], width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    for path in PAGES:
        page.goto(address[0] + path)
        if page.query_selector(".chart"):
            page.locator(".chart").first.scroll_into_view_if_needed()
            page.wait_for_selector(".main-svg", timeout=20_000)
        if page.query_selector(".more"):
            page.locator(".more").first.click()
            page.wait_for_selector("tr.detail .facts, tr.detail table")
        violations = Axe().run(page).response["violations"]
        assert not violations, [(path, one["id"], [node["html"] for node in one["nodes"]]) for one in violations]
        assert page.evaluate("document.documentElement.scrollWidth") <= width and "hacked" not in page.title(), path
    page.close()
    assert all(url.startswith((address[0], "data:")) for url in requests)
    assert [error for error in errors if "404 (Not Found)" not in error] == []


def test_tokens_by_keyboard(page: Any, address: tuple[str, Path]) -> None:
    page.goto(f"{address[0]}/runs/2/step/1/0")
    page.focus(".tokens")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "trainer -0.700" in " ".join(page.inner_text("#token").split())
    assert page.is_visible(".thought")
    page.focus("#show-thoughts")
    page.keyboard.press("Space")
    assert not page.is_visible(".thought")


def test_keys_open_rows_and_move_between_samples_and_iterations(page: Any, address: tuple[str, Path]) -> None:
    page.goto(f"{address[0]}/runs/2/step/2")
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("tr.detail .more")
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("tr.detail tr.detail .message.assistant")
    page.keyboard.press("Enter")
    page.wait_for_selector("tr.detail tr.detail", state="detached")
    page.goto(f"{address[0]}/runs/2/step/2/0")
    for key, target in {"j": "/step/2/1", "k": "/step/2/0", "]": "/step/3", "[": "/step/2"}.items():
        with page.expect_navigation():
            page.keyboard.press(key)
        assert page.url.partition("?")[0].endswith(f"/runs/2{target}")
    page.keyboard.press("/")
    page.keyboard.type("7")
    page.keyboard.press("?")
    assert page.input_value("input[type=search]") == "7?" and not page.is_visible("#keys")


def test_an_open_page_follows_the_run(page: Any, address: tuple[str, Path]) -> None:
    page.goto(address[0])
    page.get_by_text("live", exact=True).wait_for()
    JsonlTracker(address[1] / "second/metrics.jsonl", 3).log(7, {"timing/step": 1.0})
    page.get_by_text("7 of 9").wait_for(timeout=20_000)
    page.goto(f"{address[0]}/runs/2")
    page.get_by_text("live", exact=True).wait_for()
    page.wait_for_selector(".main-svg", timeout=20_000)
    page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [1, 2]})")
    page.get_by_text("Settings").click()
    page.evaluate("document.activeElement.blur()")
    JsonlTracker(address[1] / "second/metrics.jsonl", 7).log(8, {"timing/step": 1.0})
    page.get_by_text("iteration 8 of 9").wait_for(timeout=20_000)
    page.wait_for_function("document.querySelector('.plot').data[0].x.length == 3")
    assert page.evaluate("document.querySelector('.plot').layout.xaxis.range") == [1, 2], "the zoom stays"
    assert page.get_by_text("iterations", exact=True).is_visible(), "an open section stays open"
    with lock_folder(address[1] / "second"):
        page.get_by_text(f"process {os.getpid()}").wait_for(timeout=20_000)
        write_run_status(address[1] / "second", RunStatus("update", "policy 0", pid=os.getpid()))
        page.get_by_text("update policy 0").wait_for(timeout=20_000)
    page.get_by_text("update policy 0").wait_for(timeout=20_000, state="detached")


def test_report_is_accessible_and_loads_nothing(browser: Any, address: tuple[str, Path], tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    file = tmp_path / "report.html"
    file.write_bytes(make_report([address[1] / "first"]))
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    requests, messages = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.goto(file.as_uri())
    assert page.title() == "Report of first" and not messages
    assert HOSTILE in page.inner_text("main")
    assert all(url == file.as_uri() or url.startswith("data:image/svg+xml") for url in requests)
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not Axe().run(page).response["violations"]
    page.close()
