"""An example on many seeds, one after the other, and a table of what came of it.

python -m examples.seeds quickstart --seeds 0 1 2 3 4 5 6 7 8 9

A seed that has ended is not run again, so what was cut short goes on. Each run lies in outputs/seeds/EXAMPLE_SEED, the
table in outputs/seeds/EXAMPLE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Example:
    """experiment: the folder of its RL run; solved: the sampled accuracy at the end that counts as learned."""

    experiment: str
    solved: float


EXAMPLES = {
    "quickstart": Example("grpo", 0.95),
    "informal_math": Example("grpo", 0.9),
    "guessing_game": Example("grpo", 0.9),
    "grid_world": Example("gigpo", 0.95),
    "code": Example("grpo", 0.9),
    "reasoning_gym": Example("grpo", 0.95),
}


@dataclass(frozen=True)
class SeedRun:
    """One run that has ended: step -> accuracy, sampled and (where the recipe asks for it) greedy."""

    seed: int
    sampled: dict[int, float]
    greedy: dict[int, float]
    seconds: float  # of run.sh, from the task to the end

    @property
    def end(self) -> float:
        return self.sampled[max(self.sampled)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(EXAMPLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--out", type=Path, default=Path("outputs/seeds"))
    args = parser.parse_args()
    example, failed = EXAMPLES[args.example], []
    for seed in args.seeds:
        folder = args.out / f"{args.example}_{seed}"
        if not has_ended(folder):
            print(f"== {args.example}, seed {seed}", flush=True)
            if code := run(args.example, seed, folder):
                failed.append(f"seed {seed}: exit code {code}")
        runs = [read(args.out / f"{args.example}_{one}", one, example) for one in args.seeds
                if has_ended(args.out / f"{args.example}_{one}")]  # fmt: skip
        if runs:
            (args.out / f"{args.example}.md").write_text(table(runs, example.solved))
    if runs:
        print(table(runs, example.solved), end="")
    for line in failed:
        print(line)
    return 1 if failed else 0


def has_ended(folder: Path) -> bool:
    return (folder / "seconds.json").exists()


def run(name: str, seed: int, folder: Path) -> int:
    """The example's run.sh with its output in FOLDER/run.log; its exit code. The seconds are written at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, started = folder.with_suffix(".log"), time.monotonic()
    with log.open("w") as file:
        words = ["bash", f"examples/{name}/run.sh", str(seed), os.path.relpath(folder)]
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code == 0:
        (folder / "seconds.json").write_text(json.dumps(time.monotonic() - started))
    else:
        print(f"exit code {code}, see {log}", flush=True)
    return code


def read(folder: Path, seed: int, example: Example) -> SeedRun:
    """A run that has ended."""
    lines = [json.loads(line) for line in (folder / example.experiment / "metrics.jsonl").read_text().splitlines()]
    sampled, greedy = (
        {line["step"]: line[name] for line in lines if line.get(name) is not None}
        for name in ("val/accuracy", "val/accuracy_greedy")
    )
    return SeedRun(seed, sampled, greedy, json.loads((folder / "seconds.json").read_text()))


def table(runs: Sequence[SeedRun], solved: float) -> str:
    """Markdown: a row a seed, sampled / greedy accuracy at each validation, and how many seeds solved it."""
    steps = sorted(runs[0].sampled)
    head = ["seed", "start", *(str(step) for step in steps[1:]), "seconds"]
    rows = [[str(one.seed), *(cell(one, step) for step in steps), f"{one.seconds:.0f}"] for one in runs]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    good = sum(one.end >= solved for one in runs)
    return "\n".join(lines) + f"\n\n{good} of {len(runs)} seeds end at {solved} or above (sampled).\n"


def cell(one: SeedRun, step: int) -> str:
    """`.246 / .324`, or `.246` where there is no greedy one."""
    values = [side[step] for side in (one.sampled, one.greedy) if step in side]
    return " / ".join(f"{value:.3f}".removeprefix("0") for value in values)


if __name__ == "__main__":
    raise SystemExit(main())
