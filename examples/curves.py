"""Table and plot of a validation metric for several seeds of a recipe.

python -m examples.curves outputs/game_*/grpo --keys val/accuracy val/accuracy_greedy --svg examples/game/curve.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from examples.gallery.runs import read_metrics

STYLES = ("-", ":", "--")  # one per key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders EXAMPLE_SEED/EXPERIMENT with a metrics.jsonl")
    parser.add_argument("--keys", nargs="+", default=["val/accuracy"], metavar="KEY")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.svg and len(args.keys) > len(STYLES):
        parser.error(f"{len(args.keys)} keys are given, but there are only {len(STYLES)} line styles. Plot fewer keys.")
    runs = [[line for line in read_metrics(folder) if "val/accuracy" in line] for folder in args.runs]
    seeds = [folder.resolve().parent.name.rpartition("_")[2] for folder in args.runs]
    print(table(runs, args.keys, seeds))
    if args.svg:
        draw(runs, args.keys, seeds, args.svg)


def table(runs: Sequence[Sequence[dict[str, float]]], keys: Sequence[str], seeds: Sequence[object]) -> str:
    """Markdown table with a row per run and a column per validation. Slashes separate the values of several keys."""
    steps = [f"{line['step']:.0f}" for line in runs[0]]
    rows = [["seed", *steps], ["---"] * (1 + len(steps))]
    for seed, lines in zip(seeds, runs, strict=True):
        rows.append([str(seed), *(" / ".join(f"{line.get(key, float('nan')):.3f}" for key in keys) for line in lines)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(runs: Sequence[Sequence[dict[str, float]]], keys: Sequence[str], seeds: Sequence[object], path: Path) -> None:
    """Plot one color per seed and one line style per key."""
    figure = Figure(figsize=(5.0, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for number, (seed, lines) in enumerate(zip(seeds, runs, strict=True)):
        for key, style in zip(keys, STYLES, strict=False):
            points = [(line["step"], line[key]) for line in lines if key in line]
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=f"seed {seed}, {key}")
    axes.set(xlabel="iteration", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, loc="lower right")
    save_svg(figure, path)


def save_svg(figure: Figure, path: Path) -> None:
    """Write an SVG file with text as text, the same for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
