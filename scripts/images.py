"""Make docs/images/console.svg from a finished run with a reward and a validation.

    make quickstart
    python -m scripts.images outputs/quickstart/grpo     # the default; `make docs` runs this

It is the live view after two thirds of the iterations, with half of the next one generated. It is left as it is if the
run is missing. scripts/viewer_pages.py takes the screenshots of the viewer.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from alphaapollo.observability.console_view import ConsoleView, Phase, render_view
from alphaapollo.observability.terminal import get_last_message, shorten_text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 200_000
COLUMNS = 88  # of the terminal
FONT_FACE = re.compile(r"@font-face {[^}]*}\s*")  # would be loaded from another address
WHITE, BLACK = (255, 255, 255), (26, 29, 33)
COLORS = ("1a1d21", "b22222", "1a7f37", "8a5a00", "0b5cad", "8250df", "0072b2", "55606b")  # black, red, ..., gray


def read_view(run: Path) -> tuple[ConsoleView, float]:
    """The console's view of a run after two thirds of its iterations, and the elapsed seconds."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    total = records[-1]["step"]
    shown, elapsed = max(1, round(total * 2 / 3)), 0.0
    view = ConsoleView(title=str(run), total_steps=total)
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
    terminal.print(render_view(view, elapsed))
    theme = TerminalTheme(WHITE, BLACK, [tuple(bytes.fromhex(color)) for color in COLORS])
    encoded_image = FONT_FACE.sub("", terminal.export_svg(title="alphaapollo rl", theme=theme, unique_id="console"))
    encoded_image = encoded_image.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    return encoded_image.replace('stroke="rgba(255,255,255,0.35)"', 'stroke="#d5dae0"')  # of the frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("outputs/quickstart/grpo"), help="folder of the run")
    run = parser.parse_args().run
    if not (run / "metrics.jsonl").is_file():
        print(f"docs/images/ is unchanged: {run} has no metrics.jsonl. `make quickstart` makes a run.")
        return
    content = draw_console(run).encode()
    if len(content) > MAX_BYTES:
        raise ValueError(f"docs/images/console.svg has {len(content):,} bytes. The limit is {MAX_BYTES:,}.")
    (FOLDER / "console.svg").write_bytes(content)
    print(f"docs/images/console.svg: {len(content):,} bytes")


if __name__ == "__main__":
    main()
