"""Make the images of README.md in docs/images/ from a finished run with a reward and a validation.

    make quickstart
    python -m scripts.images outputs/quickstart/grpo     # the default; `make docs` runs it too

console.svg is the live view after two thirds of the iterations, with half of the next one generated. viewer.png is the
run's page in the viewer, taken by headless Chromium. An image is left as it is if the run or Chromium is missing.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from alphaapollo.observability.run_view import Phase, RunView, render_view
from alphaapollo.observability.terminal import get_last_message, shorten_text
from alphaapollo.viewer.app import make_app, make_server
from alphaapollo.viewer.index import RunIndex

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 200_000
COLUMNS, LINES = 88, 24  # of the terminal
FONT_FACE = re.compile(r"@font-face {[^}]*}\s*")  # would be loaded from another address
WHITE, BLACK = (255, 255, 255), (26, 29, 33)
COLORS = ("1a1d21", "b22222", "1a7f37", "8a5a00", "0b5cad", "8250df", "0072b2", "55606b")  # black, red, ..., gray
CHROMIUM_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-sync")
WIDTH, HEIGHT, SCALE = 1100, 815, 1.5  # of the browser's window, and its pixels per CSS pixel


def read_view(run: Path) -> tuple[RunView, float]:
    """The console's view of a run after two thirds of its iterations, and the elapsed seconds."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    total = records[-1]["step"]
    shown, elapsed = max(1, round(total * 2 / 3)), 0.0
    view = RunView(title=str(run), total_steps=total)
    for record in records:
        if (step := record.pop("step")) <= shown:
            elapsed += record.get("timing/step") or 0.0
            view.update(step, {name: value for name, value in record.items() if value is not None}, elapsed)
    samples = [json.loads(line) for line in (run / f"rollouts/step_{shown:06d}.jsonl").read_text().splitlines()]
    scored = sorted((one for one in samples if one["reward"] is not None), key=lambda one: one["reward"])
    sample = scored[len(scored) // 2]
    question, answer = (" ".join(text.split()) for text in (get_last_message(sample["prompt"]), sample["text"]))
    view.sample = "sample", f"reward {sample['reward']:.3f}   {shorten_text(question, 60)}", shorten_text(answer, 70)
    num_groups = len({sample["prompt_id"] for sample in samples})
    view.phase = Phase("generate", num_groups, elapsed, 0, done=num_groups // 2)
    return view, elapsed


def draw_console(run: Path) -> str:
    """The live console of a run, as SVG."""
    view, elapsed = read_view(run)
    terminal = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, color_system="truecolor")
    terminal.print(*render_view(view, elapsed, COLUMNS - 1, LINES), sep="\n")
    theme = TerminalTheme(WHITE, BLACK, [tuple(bytes.fromhex(color)) for color in COLORS])
    encoded_image = FONT_FACE.sub("", terminal.export_svg(title="alphaapollo rl", theme=theme, unique_id="console"))
    encoded_image = encoded_image.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    return encoded_image.replace('stroke="rgba(255,255,255,0.35)"', 'stroke="#d5dae0"')  # of the frame


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


def photograph_viewer(run: Path, chromium: str) -> bytes:
    """The first page of a run in the viewer, as PNG."""
    from playwright.sync_api import sync_playwright

    with serve_viewer(run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        page.goto(f"{address}/runs/1")
        for chart in page.locator(".chart").all():  # a chart is drawn when it is visible
            chart.scroll_into_view_if_needed()
            chart.locator(".main-svg").first.wait_for()
        page.evaluate("scrollTo(0, 0)")
        encoded_image = page.screenshot()
        browser.close()
    return encoded_image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("outputs/quickstart/grpo"), help="folder of the run")
    run = parser.parse_args().run
    if not (run / "metrics.jsonl").is_file():
        print(f"docs/images/ is unchanged: {run} has no metrics.jsonl. `make quickstart` makes a run.")
        return
    encoded_images = {"console.svg": draw_console(run).encode()}
    if chromium := next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None):
        encoded_images["viewer.png"] = photograph_viewer(run, chromium)
    else:
        print("docs/images/viewer.png is unchanged: Chromium is missing (Debian: apt-get install chromium).")
    for name, content in encoded_images.items():
        if len(content) > MAX_BYTES:
            raise ValueError(f"docs/images/{name} has {len(content):,} bytes. The limit is {MAX_BYTES:,}.")
        (FOLDER / name).write_bytes(content)
        print(f"docs/images/{name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
