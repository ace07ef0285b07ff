"""Print the demo's results: the curve, the accuracy of each kind of instruction, answers before and after, and what to
try next."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.columns import Columns
from rich.table import Table

from alphaapollo.observability.curve import plot_curves, plot_curves_as_figure, read_curves, save_figure
from alphaapollo.observability.terminal import Terminal
from examples.quickstart.report import panel

CURVE = "val/accuracy"
SHOWN = ("actor/entropy", "response_length/mean")
NUM_PAIRS = 6


def read_answers(run: Path, step: int) -> list[dict[str, Any]]:
    """Records of one validation, one per held-out prompt, in the order of the data."""
    lines = (run / f"rollouts/val_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda record: record["prompt_id"])


def make_table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    """Accuracy of each kind of instruction."""
    rewards = defaultdict[str, list[tuple[float, float]]](list)
    for one, other in zip(before, after, strict=True):
        rewards[one["data_source"].partition("/")[2]].append((one["reward"], other["reward"]))
    table = Table("kind of instruction", "prompts", "before", "after", title="held-out accuracy", title_justify="left")
    for kind, pairs in rewards.items():
        table.add_row(kind, str(len(pairs)), *(f"{fmean(values):.2f}" for values in zip(*pairs, strict=True)))
    return table


def pick_pairs(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Answers to the first prompt of each of several kinds: five that were learned, and one that was not."""
    pairs = list(zip(before, after, strict=True))
    learned = {one["data_source"]: (one, other) for one, other in reversed(pairs) if one["reward"] < other["reward"]}
    missed = [(one, other) for one, other in pairs if other["reward"] == 0]
    return [*list(learned.values())[: NUM_PAIRS - 1], *missed[:1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("outputs/demo/grpo"))
    parser.add_argument("--model", type=Path, default=Path("outputs/demo/model"), help="the model before training")
    parser.add_argument("--seconds", type=int, required=True, help="since the start")
    args = parser.parse_args()
    run, terminal = args.run, Terminal(highlight=False, soft_wrap=True)
    curves = read_curves(run / "metrics.jsonl", (CURVE, *SHOWN))
    accuracy = {CURVE: curves[CURVE]}
    terminal.print("\nheld-out accuracy over GRPO iterations", style="bold")
    terminal.print(plot_curves(accuracy))
    figure = plot_curves_as_figure(accuracy, "SmolLM2-135M-Instruct learns to follow instructions")
    save_figure(figure, run / "curve.png")
    before, after = (read_answers(run, int(curves[CURVE].steps[index])) for index in (0, -1))
    terminal.print(make_table(before, after))
    for name in SHOWN:
        terminal.print(
            f"{name}: {curves[name].values[0]:.2f} in the first iteration, {curves[name].values[-1]:.2f} in the last"
        )
    for one, other in pick_pairs(before, after):
        terminal.print(f"\n[bold]{one['prompt'][-1]['content']}[/] (held out)")
        terminal.print(Columns([panel(one, "before"), panel(other, "after GRPO")]))
    terminal.print(f"\nThe demo took {args.seconds} s and wrote to {run}. To try next:\n")
    commands = {
        "source .venv/bin/activate": "once in a shell",
        f"alphaapollo chat {args.model} rollout.temperature=0.7": "chat with the model before training",
        f"alphaapollo chat {run}": "and after it",
        f"alphaapollo samples {run} --val": "all held-out answers",
        f"alphaapollo view {run}": "curves and samples in the browser",
        f"alphaapollo report {run} -o report.html": "all in one file",
        f"alphaapollo serve {run}": "OpenAI server",
    }
    width = max(map(len, commands))
    for command, purpose in commands.items():
        terminal.print(f"  {command:<{width}}   # {purpose}")


if __name__ == "__main__":
    main()
