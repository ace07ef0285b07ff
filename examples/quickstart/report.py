"""Print the quickstart's results: the curve, two held-out prompts before and after, and what to try next."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from alphaapollo.observability.curve import plot_curves, plot_curves_as_figure, read_curves, save_figure
from alphaapollo.observability.terminal import Terminal, shorten_text

CURVES = ("val/accuracy", "val/accuracy_greedy")
ANSWER_CHARS = 400


def read_validation(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """Greedy answers of one validation by question."""
    lines = (folder / f"rollouts/val_greedy_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {record["prompt"][-1]["content"]: record for record in records}


def panel(record: dict[str, Any], title: str) -> Panel:
    right = record["reward"] == 1
    style = "green" if right else "red"
    answer = Text(f"{shorten_text(record['text'], ANSWER_CHARS)}\n")
    return Panel(answer.append("right" if right else "wrong", style), title=title, width=34)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seconds", type=int, required=True, help="since the start")
    args = parser.parse_args()
    run, terminal = args.out / "grpo", Terminal(highlight=False, soft_wrap=True)
    curves = read_curves(run / "metrics.jsonl", CURVES)
    terminal.print("\nheld-out accuracy over GRPO iterations", style="bold")
    terminal.print(plot_curves(curves))
    save_figure(plot_curves_as_figure(curves, "the forgotten carry"), run / "curve.png")

    last = int(curves["val/accuracy"].steps[-1])
    before, after = read_validation(run, 0), read_validation(run, last)
    learned = [q for q in before if before[q]["reward"] == 0 and after[q]["reward"] == 1]
    for question in learned[:2]:
        terminal.print(f"\n[bold]{question}[/] (held out)")
        terminal.print(Columns([panel(before[question], "after the warm-up"), panel(after[question], "after GRPO")]))

    terminal.print(f"""
The quickstart took {args.seconds} s and wrote to {args.out}. To try next, besides the commands above:

  source .venv/bin/activate                                    # once in a shell
  alphaapollo rl --config examples/quickstart/grpo.yaml algorithm.adv_estimator=rloo \\
      trainer.experiment_name=rloo   # the same with RLOO: takes minutes again
  alphaapollo explain algorithm.adv_estimator actor_rollout_ref.actor.clip_ratio_high""")


if __name__ == "__main__":
    main()
