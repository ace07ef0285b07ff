"""Write the table of docs/results.md: results of the examples, measured with several seeds.

    python -m scripts.results                           # from the runs in outputs/seeds
    python -m scripts.results --run quickstart distill  # first run these with seeds 0, 1 and 2
    python -m scripts.results --run                     # first run all of them: hours on two cores

Finished seeds are skipped, so an interrupted command continues with the next one. The values are the first and the last
of a metric, as `alphaapollo sweep` reads them. The minutes are those of the whole script, with warm-ups.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.plugins.sweeps.table import read_mean_curve
from alphaapollo.plugins.viewer.curves import make_estimate
from alphaapollo.plugins.viewer.formats import format_estimate
from examples.seeds import EXAMPLES, command, has_ended, run
from scripts.bench._task import machine
from scripts.checks import ROOT

PAGE = ROOT / "docs" / "results.md"
BLOCK = re.compile(r"(<!-- results: .* -->\n).*?(<!-- end of results -->)", re.DOTALL)
HEADER = ("example", "model", "hardware", "minutes", "from -> to", "seeds", "command")
METRIC = "val/accuracy"
MACHINE = "machine.json"  # in the folder of a seed: where it ran, and the load average before its start
TINY, SMOLLM2 = "Qwen3, 0.43M", "SmolLM2-135M-Instruct"
CLASSES = "guessing_game/README.md#environment-classes-of-other-frameworks"


@dataclass(frozen=True)
class Entry:
    """task: what the model learns; model: its name and number of parameters; page: in examples/, by default README.md
    of the folder with the example's name."""

    task: str
    model: str = TINY
    page: str = ""


ENTRIES = {  # keys of examples.seeds.EXAMPLES
    "quickstart": Entry("add numbers (GRPO)"),
    "smollm2": Entry("follow instructions that a program verifies (GRPO)", SMOLLM2),
    "guessing_game": Entry("use the feedback of earlier turns (GRPO)"),
    "gymnasium": Entry("the same in a Gymnasium environment (GRPO)", page=CLASSES),
    "trl": Entry("the same in an environment class of TRL (GRPO)", page=CLASSES),
    "grid_world": Entry("walk to a goal (GiGPO)"),
    "tasks": Entry("solve task folders in a sandbox (GRPO)", "Qwen3, 0.4M"),
    "preferences": Entry("tell right sums from wrong ones (DPO)"),
    "sft_dpo_grpo": Entry("add numbers (SFT, DPO, then GRPO)", page="quickstart/README.md#after-dpo"),
    "distill": Entry("imitate a teacher on one's own samples"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=ENTRIES, metavar="EXAMPLE", help="run these first (none: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/seeds"))
    args = parser.parse_args()
    names = [] if args.run is None else args.run or list(ENTRIES)
    failed = sum(measure(name, seed, args.out / f"{name}_{seed}") != 0 for name in names for seed in args.seeds)
    rows = [make_row(name, list_ended(args.out, name)) for name in ENTRIES]
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 1 if failed else 0


def measure(name: str, seed: int, folder: Path) -> int:
    """Run an example, unless it has ended, and write where. Returns the exit code."""
    if has_ended(folder):
        return 0
    print(f"== {name}, seed {seed}", flush=True)
    found = machine()
    code = run(name, seed, folder)
    if code == 0:
        (folder / MACHINE).write_text(json.dumps(found))
    return code


def list_ended(out: Path, name: str) -> list[Path]:
    """Folders of the seeds that have ended, in the order of the seeds."""
    folders = (path.parent for path in out.glob(f"{name}_*/{MACHINE}"))
    found = {int(folder.name.removeprefix(f"{name}_")): folder for folder in folders if has_ended(folder)}
    return [found[seed] for seed in sorted(found)]


def make_row(name: str, folders: Sequence[Path]) -> list[str]:
    """Cells of an example whose seeds are in `folders`."""
    entry = ENTRIES[name]
    seeds = ", ".join(folder.name.removeprefix(f"{name}_") for folder in folders)
    measured = describe_runs(name, folders) if folders else ["", "", "not yet measured"]
    title = f"[{name}](../examples/{entry.page or f'{name}/README.md'}): {entry.task}"
    return [title, entry.model, *measured, seeds, f"`{command(name, 'SEED', 'OUT')}`"]


def describe_runs(name: str, folders: Sequence[Path]) -> list[str]:
    """Hardware, minutes, and the first and the last value of the metric, as means over the seeds with intervals."""
    mean = read_mean_curve(METRIC, [folder / EXAMPLES[name].experiment for folder in folders])
    minutes = [json.loads((folder / "seconds.json").read_text()) / 60 for folder in folders]
    machines = [json.loads((folder / MACHINE).read_text()) for folder in folders]
    hardware = "; ".join(sorted({one["machine"] for one in machines}))
    return [
        f"{hardware}; load {describe_range([one['load_average'] for one in machines], 0)}",
        describe_range(minutes, 1),
        f"{format_estimate(make_estimate(mean, 0))} -> {format_estimate(make_estimate(mean))}",
    ]


def describe_range(values: Sequence[float], digits: int) -> str:
    """The lowest and the highest value, or the only one."""
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values)))
    return " to ".join(ends)


def replace_table(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Replace the table between the marks of the page.

    Raises ValueError if the page lacks the marks.
    """
    if not BLOCK.search(page):
        raise ValueError(
            f"{PAGE.name} lacks the marks of the table: <!-- results: ... --> and <!-- end of results -->."
        )
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return BLOCK.sub(lambda marks: f"{marks[1]}{table}{marks[2]}", page)


if __name__ == "__main__":
    raise SystemExit(main())
