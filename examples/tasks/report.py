"""Print what a run on local tasks learned: reward by kind of task, and the most frequent command of each kind.

python -m examples.tasks.report outputs/learn_tasks_0/grpo outputs/learn_tasks_1/grpo

For each run, the first iterations are compared with the last ones, and the first validation with the last one. In the
commands, W is a word of the tasks. The tasks are read from the folder `tasks` beside each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.curves import draw, table
from examples.gallery.runs import read_metrics
from examples.tasks.make_tasks import KINDS, WORDS

REWARD = "val/reward"
SHOWN_STEPS = 3  # iterations whose episodes count as the start and the end of training
COMMAND = re.compile(r'<bash>\{"command": "(.*?)"\}</bash>', re.DOTALL)
NAME = re.compile(rf"\b({'|'.join(WORDS)})\b")


def read_episodes(run: Path, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the episodes of files in RUN/rollouts by kind of task."""
    kinds = {
        file.read_text(encoding="utf-8").strip(): file.parent.name.partition("-")[0]
        for file in (run.parent / "tasks").glob("*/*/instruction.md")
    }
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for name in names:
        for line in (run / "rollouts" / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[kinds[record["row_prompt"][-1]["content"].strip()]].append(record)
    return found


def average_rewards(episodes: Iterable[dict[str, Any]]) -> str:
    """Return the mean reward, and the shares of solved and of partly solved tasks."""
    rewards = [one["reward"] for one in episodes if one["outcome"] == "scored"]
    if not rewards:
        return "-"
    solved, partly = (fmean(reward == value for reward in rewards) for value in (1, 0.5))
    return f"{fmean(rewards):.2f} ({solved:.0%}, {partly:.0%})"


def find_usual_command(episodes: Sequence[dict[str, Any]]) -> str:
    """Return the most frequent first command, with W for each word of the tasks, its share and its mean reward."""
    commands = [NAME.sub("W", "".join(COMMAND.findall(one["text"])[:1])) for one in episodes]
    if not commands:
        return "-"
    usual, count = Counter(commands).most_common(1)[0]
    reward = fmean(one["reward"] for one, command in zip(episodes, commands, strict=True) if command == usual)
    return f"`{usual or 'no command'}` ({count / len(commands):.0%}, reward {reward:.2f})"


def make_report(run: Path) -> str:
    """Return Markdown tables of a run."""
    files = sorted(path.name for path in (run / "rollouts").glob("*.jsonl"))
    steps, checks = ([name for name in files if name.startswith(prefix)] for prefix in ("step_", "val_0"))
    parts = [steps[:SHOWN_STEPS], steps[-SHOWN_STEPS:], checks[:1], checks[-1:]]
    columns = [read_episodes(run, part) for part in parts]
    rows = [["kind", "training: first", "training: last", "held-out: first", "held-out: last"], ["---"] * 5]
    rows += [[kind, *(average_rewards(column[kind]) for column in columns)] for kind in KINDS]
    rows.append(["all", *(average_rewards(itertools.chain(*column.values())) for column in columns)])
    commands = [["kind", "usual command at the start", "at the end"], ["---"] * 3]
    for kind in KINDS:
        usual = [find_usual_command([*one[kind], *two[kind]]) for one, two in (columns[::2], columns[1::2])]
        commands.append([kind, *(text.replace("|", "\\|") for text in usual)])
    metrics = read_metrics(run)
    failed = sum(one.get("outcome/failed", 0.0) * one.get("rollout/trajectories", 0.0) for one in metrics)
    minutes = sum(one.get("timing/step", 0.0) for one in metrics) / 60
    tables = ("\n".join(f"| {' | '.join(row)} |" for row in one) for one in (rows, commands))
    counts = f"{len(steps)} iterations, {minutes:.1f} minutes, {failed:.0f} failed episodes"
    return "\n\n".join([f"{run}: {counts}; mean reward (solved, partly solved)", *tables])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of GRPO runs")
    parser.add_argument("--svg", type=Path, help="plot the rewards of the held-out tasks")
    args = parser.parse_args()
    curves = [[line for line in read_metrics(run) if REWARD in line] for run in args.runs]
    seeds = [run.resolve().parent.name.rpartition("_")[2] for run in args.runs]
    for run in args.runs:
        print(make_report(run), end="\n\n")
    print(f"Mean reward of the held-out tasks by iteration:\n\n{table(curves, [REWARD], seeds)}")
    if args.svg:
        draw(curves, [REWARD], seeds, args.svg)


if __name__ == "__main__":
    main()
