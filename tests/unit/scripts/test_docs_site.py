"""Documentation site: complete navigation, links between copies of the pages, formulas, and the strict build."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from scripts import docs_site
from scripts.config_pages import render_pages as render_config_pages
from scripts.docs_site import GENERATED, ROOT, Pages, build, finish_html, list_pages, main_pages
from tests.page_commands import HAS_PLUGINS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_navigation_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    places = [Pages(ROOT, Path()).find_place(page) for page in main_pages(ROOT)]
    assert sorted(list_pages(nav)) == sorted([*map(str, places), *GENERATED, *render_config_pages()])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = {
        "README.md": "[a](docs/a.md#part) [s](src) [web](https://x.y/z.md)\n",
        "CONTRIBUTING.md": "[home](README.md)\n",
        "docs/a.md": "[b](b/README.md) ![](c.svg) [f](../src/f.py) `[x](x)`\n\n    [x](x)\n\n"
        "```\n<!-- -->\n[x](x)\n```\n",
        "docs/c.svg": "<svg/>",
        "docs/b/README.md": "Run:\n\n<!-- not run: x -->\n    [e](e)\n\n[e](../../examples/e)\n\n```math\nx < y\n```\n",
        "examples/e/README.md": "[home](../../README.md)\n",
        "src/f.py": "print(1)\n",
    }
    for name, text in files.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "repository"


def test_links_lead_to_the_copies(repository: Path, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    Pages(repository, pages).write()
    text = {str(path.relative_to(pages)): path.read_text() for path in pages.rglob("*.*")}
    assert text["index.md"].split() == ["[a](docs/a.md#part)", "[s](src/index.md)", "[web](https://x.y/z.md)"]
    assert text["CONTRIBUTING.md"] == "[home](index.md)\n"
    assert text["docs/a.md"].startswith("[b](b/index.md) ![](c.svg) [f](../src/f.py.md) `[x](x)`\n\n    [x](x)\n")
    assert text["docs/a.md"].endswith("```\n<!-- -->\n[x](x)\n```\n")
    assert "Run:\n\n\n    [e](e)\n\n[e](../../examples/e/index.md)\n" in text["docs/b/index.md"]
    assert text["docs/b/index.md"].endswith("\n$$\nx < y\n$$\n")
    assert text["docs/c.svg"] == "<svg/>"
    assert "[f.py](f.py.md)" in text["src/index.md"]
    assert "`````python\nprint(1)\n" in text["src/f.py.md"]


def test_a_broken_link_is_an_error(repository: Path, tmp_path: Path) -> None:
    (repository / "docs" / "a.md").write_text("[gone](gone.md) [outside](../../pages)\n")
    with pytest.raises(ValueError, match=r"docs/a.md: gone.md\ndocs/a.md: ../../pages"):
        Pages(repository, tmp_path / "pages").write()


def test_formulas_become_mathml() -> None:
    html = finish_html(
        '<p><span class="arithmatex">\\(a &lt; b\\)</span></p><div class="arithmatex">\\[x\\]</div><table>'
    )
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in html
    assert '<div class="formula" tabindex="0"><math' in html and 'display="block"' in html
    assert html.endswith('<table tabindex="0">')
    assert "arithmatex" not in html


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_PLUGINS:
        pytest.skip("pages link files of plug-ins")
    return build(tmp_path_factory.mktemp("site"))


def test_the_site_has_every_page(site: Path) -> None:
    for page in main_pages(ROOT):
        relative = page.relative_to(ROOT)
        folder = relative.parent if page.name == "README.md" else relative.with_suffix("")
        html = (site / folder / "index.html").read_text()
        assert 'src="http' not in html and '<link rel="stylesheet" href="http' not in html
        assert "arithmatex" not in html


def test_llms_txt_describes_every_page(site: Path) -> None:
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# alphaapollo" and lines[2].startswith("> Reinforcement-learning post-training")
    found = [line.partition("](")[2].partition("): ") for line in lines if line.startswith("- [")]
    assert len(found) >= len(main_pages(ROOT))
    assert [address for address, _, text in found if not ((site / address / "index.html").is_file() and text)] == []


def test_earlier_addresses_lead_to_a_section(site: Path) -> None:
    moved = yaml.safe_load((ROOT / "docs" / "redirects.yaml").read_text())
    for old in moved:
        page = site / old.removesuffix(".md") / "index.html"
        path, _, anchor = page.read_text().partition("url=")[2].partition('"')[0].partition("#")
        assert not anchor or f'id="{anchor}"' in (page.parent / path / "index.html").read_text(), old
    assert moved


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (e.g. apt-get install chromium)")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_site_in_a_browser(site: Path, width: int, scheme: str) -> None:
    """Pages load nothing from other addresses, are accessible, and fit the screen; the search works."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.set_default_timeout(200_000)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        for path in ("", "alphaapollo/trainer/loop.py/", "docs/algorithms/grpo/", "docs/start/"):
            page.goto(address + path)
            violations = Axe().run(page).response["violations"]
            found = [
                (one["id"], one["nodes"][0]["html"]) for one in violations if one["impact"] in ("serious", "critical")
            ]
            assert not found, path
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        page.wait_for_load_state("networkidle")
        page.keyboard.press("Control+k")
        page.get_by_placeholder("Search").fill("ppo_mini_batch_size")
        page.get_by_role("status").get_by_text("results").wait_for()
        assert [url for url in requests if not url.startswith((address, "data:"))] == []
        browser.close()
    server.shutdown()
    server.server_close()


def test_a_broken_anchor_fails_the_build(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "mkdocs.yml").write_text("site_name: test\ndocs_dir: pages\nsite_dir: site\n")
    (repository / "docs" / "site.css").write_text("")
    monkeypatch.setattr(docs_site, "ROOT", repository)
    with pytest.raises(SystemExit, match="anchor does not exist"):
        build(tmp_path)  # docs/a.md has no heading "part"
