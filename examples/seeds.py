"""Run an example with many seeds, one after the other, and write a table of the results.

python -m examples.seeds quickstart --seeds 0 1 2 3 4 5 6 7 8 9

Finished seeds are skipped, so an interrupted command continues with the next one. Each run is written to
outputs/seeds/EXAMPLE_SEED, with its output in EXAMPLE_SEED.log; the table is outputs/seeds/EXAMPLE.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.curves import table
from examples.gallery.runs import read_metrics

KEYS = ("val/accuracy", "val/accuracy_greedy")


@dataclass(frozen=True)
class Example:
    """experiment: the folder of its last training; solved: the sampled accuracy at the end that counts as learned;
    words: of the command, with the places {seed} and {out} (default: run.sh of the folder with its name)."""

    experiment: str
    solved: float
    words: str = ""


EXAMPLES = {
    "quickstart": Example("grpo", 0.95),
    "distill": Example("distill", 0.9),
    "teachers": Example("teachers", 0.9),
    "self_distillation": Example("sdpo", 0.9),
    "informal_math": Example("grpo", 0.9),
    "guessing_game": Example("grpo", 0.9),
    "gymnasium": Example("gymnasium", 0.9, "examples/small_run.sh guessing_game gymnasium {seed} {out}"),
    "trl": Example("trl", 0.9, "examples/small_run.sh guessing_game trl {seed} {out} --tool 1"),
    "grid_world": Example("gigpo", 0.95),
    "prices": Example("prices", 0.9, "examples/agents/run.sh prices {seed} {out}"),
    "planner": Example("planner", 0.9, "examples/agents/run.sh planner {seed} {out}"),
    "code": Example("grpo", 0.9),
    "reasoning_gym": Example("grpo", 0.95),
    "colours": Example("grpo", 0.9),
    "curriculum": Example("frontier", 0.9),
    "smollm2": Example("grpo", 0.7, "env OUT={out} examples/smollm2/run.sh trainer.seed={seed}"),
    "tasks": Example("grpo", 0.6, "examples/tasks/run.sh tiny {seed} {out}"),
    "preferences": Example("dpo", 0.95),
    "sft_dpo_grpo": Example("grpo", 0.8, "examples/quickstart/sft_dpo_grpo.sh {seed} {out}"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(EXAMPLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--out", type=Path, default=Path("outputs/seeds"))
    args = parser.parse_args()
    failed = 0
    for seed in args.seeds:
        folder = args.out / f"{args.example}_{seed}"
        if not has_ended(folder):
            print(f"== {args.example}, seed {seed}", flush=True)
            failed += run(args.example, seed, folder) != 0
        ended = [one for one in args.seeds if has_ended(args.out / f"{args.example}_{one}")]
        (args.out / f"{args.example}.md").write_text(report(args.out, args.example, ended))
    print((args.out / f"{args.example}.md").read_text(), end="")
    return 1 if failed else 0


def command(name: str, seed: object, out: object) -> str:
    """Shell command of an example."""
    return (EXAMPLES[name].words or f"examples/{name}/run.sh {{seed}} {{out}}").format(
        seed=seed, out=shlex.quote(str(out))
    )


def has_ended(folder: Path) -> bool:
    return (folder / "seconds.json").exists()


def run(name: str, seed: int, folder: Path) -> int:
    """Execute the command of the example and return its exit code. Writes the seconds if it succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, started = folder.parent / f"{folder.name}.log", time.monotonic()
    with log.open("w") as file:
        words = shlex.split(command(name, seed, folder))
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code == 0:
        (folder / "seconds.json").write_text(json.dumps(time.monotonic() - started))
    else:
        print(f"exit code {code}, see {log}", flush=True)
    return code


def report(out: Path, name: str, seeds: Sequence[int]) -> str:
    """Markdown: sampled (and greedy) accuracy of each run that has ended, how many solved it, and the seconds of each
    run.sh."""
    if not seeds:
        return "No seed has ended yet.\n"
    example, folders = EXAMPLES[name], [out / f"{name}_{seed}" for seed in seeds]
    runs = [[line for line in read_metrics(one / example.experiment) if KEYS[0] in line] for one in folders]
    keys = KEYS if KEYS[1] in runs[0][0] else KEYS[:1]
    good = sum(lines[-1][KEYS[0]] >= example.solved for lines in runs)
    seconds = [f"{json.loads((one / 'seconds.json').read_text()):.0f}" for one in folders]
    return (
        f"{table(runs, keys, seeds)}\n\n{good} of {len(seeds)} seeds end at {example.solved} or above (sampled). "
        f"Seconds: {', '.join(seconds)}.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
