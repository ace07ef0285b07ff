"""Take screenshots of the viewer's pages for docs/viewer.md, in docs/images/viewer/.

    make quickstart
    python -m scripts.viewer_pages outputs                                 # docs/images/viewer/*.png
    python -m scripts.viewer_pages outputs --folder shots --all            # every width, light and dark, to look at

The folder needs an RL run, the newest of which is shown. Needs Chromium.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from alphaapollo.plugins.viewer.app import make_app, make_server
from alphaapollo.plugins.viewer.index import RunIndex
from scripts.images import FOLDER

PAGES = {  # name -> address below a run; an address that begins with / is complete
    "runs": "/",
    "overview": "",
    "iteration": "/step/{step}",
    "samples": "/step/{step}?view=samples",
    "sample": "/step/{step}/0",
    "health": "/health",
    "configuration": "/config",
    "compare": "/compare?run={run}&run={other}",
}
CHROMIUM_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-sync")
MAX_BYTES = 1_000_000  # of all images
NUM_COLORS = 96
SIZES = ((390, 844), (1280, 800), (1920, 1080))


@contextmanager
def serve_viewer(outputs: Path) -> Iterator[str]:
    """Serve the viewer of a folder, and give its address."""
    with tempfile.TemporaryDirectory() as folder:
        index = RunIndex(outputs, Path(folder, "index.sqlite"))
        with closing(index.connect()) as database:
            index.update(database)
        server = make_server(make_app(index, ["127.0.0.1"]), port=0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.05)
            if not thread.is_alive():
                raise RuntimeError("the viewer did not start; its error is above")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join()


def take_screenshot(page: Any, address: str, full: bool) -> bytes:
    """Take a screenshot of a page after its curves were drawn."""
    page.goto(address)
    for chart in page.locator(".chart").all():  # a curve is drawn when it is visible
        if chart.is_visible():
            chart.scroll_into_view_if_needed()
            chart.locator(".main-svg").first.wait_for()
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(100)
    screenshot: bytes = page.screenshot(full_page=full)
    return screenshot


def shrink(screenshot: bytes) -> bytes:
    """Reduce the colors of a PNG."""
    content = io.BytesIO()
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(NUM_COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(content, "PNG", optimize=True)
    return content.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", type=Path, help="folder with runs")
    parser.add_argument("--folder", type=Path, default=FOLDER / "viewer", help="folder to write to")
    parser.add_argument("--run", default="quickstart/grpo", help="name of the run that is shown")
    parser.add_argument("--other", default="quickstart/sft", help="name of the run that it is compared with")
    parser.add_argument("--step", type=int, default=10, help="iteration that is shown")
    parser.add_argument("--all", action="store_true", help="complete pages, each size, light and dark")
    parser.add_argument("--only", nargs="*", default=list(PAGES), help="names of pages")
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options.folder.mkdir(parents=True, exist_ok=True)
    total = 0
    with serve_viewer(options.outputs.absolute()) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        for size in SIZES if options.all else SIZES[1:2]:
            for scheme in ("light", "dark") if options.all else ("light",):
                viewport = {"width": size[0], "height": size[1]}
                page = browser.new_page(viewport=viewport, color_scheme=scheme)
                page.goto(address)
                links = dict(re.findall(r'href="(/runs/\d+)">([^<]+)</a>', page.content()))
                ids = {name: link.removeprefix("/runs/") for link, name in links.items()}
                names = {"run": ids[options.run], "other": ids[options.other], "step": options.step}
                for name in options.only:
                    path = PAGES[name].format(**names)
                    path = path if path.startswith(("/compare", "/?")) or path == "/" else f"/runs/{names['run']}{path}"
                    content = shrink(take_screenshot(page, address + path, options.all))
                    suffix = f"_{size[0]}_{scheme}" if options.all else ""
                    (options.folder / f"{name}{suffix}.png").write_bytes(content)
                    total += len(content)
                page.close()
        browser.close()
    print(f"{options.folder}: {total:,} bytes")
    if total > MAX_BYTES and not options.all:
        raise ValueError(f"{options.folder} has {total:,} bytes. The limit is {MAX_BYTES:,}.")


if __name__ == "__main__":
    main()
