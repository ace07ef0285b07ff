"""Compare the samplers: generated samples until the validation accuracy reaches a goal, and the curves.

python -m examples.curriculum.compare outputs/seeds/curriculum_* --svg examples/curriculum/curve.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from examples.curves import save_svg
from examples.gallery.runs import read_metrics

SAMPLERS = ("uniform", "frontier")
ACCURACY = "val/accuracy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders with the runs `uniform` and `frontier`")
    parser.add_argument("--accuracy", type=float, default=0.9)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    curves = {folder: {name: read_curve(folder / name) for name in SAMPLERS} for folder in args.runs}
    print(f"Samples until {ACCURACY} reaches {args.accuracy}:\n\n| seed | uniform | frontier | frontier / uniform |")
    print("|---|---|---|---|")
    for folder, by_sampler in curves.items():
        uniform, frontier = (count_samples(by_sampler[name], args.accuracy) for name in SAMPLERS)
        ratio = f"{frontier / uniform:.2f}" if uniform and frontier else "-"
        seed = folder.resolve().name.rpartition("_")[2]
        print(f"| {seed} | {uniform or 'not reached'} | {frontier or 'not reached'} | {ratio} |")
    if args.svg:
        draw(curves.values(), args.svg)


def read_curve(run: Path) -> list[tuple[int, float]]:
    """Return (samples generated before, accuracy) of each validation of a run."""
    samples, curve = 0, []
    for line in read_metrics(run):
        samples += int(line.get("rollout/trajectories", 0))
        if ACCURACY in line:
            curve.append((samples, line[ACCURACY]))
    return curve


def count_samples(curve: Iterable[tuple[int, float]], goal: float) -> int | None:
    """Return the samples before the first validation that reaches the goal; None if none does."""
    return next((samples for samples, accuracy in curve if accuracy >= goal), None)


def draw(curves: Iterable[dict[str, list[tuple[int, float]]]], path: Path) -> None:
    """Plot one line per seed and one color per sampler."""
    figure = Figure(figsize=(5.0, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for number, by_sampler in enumerate(curves):
        for color, (name, points) in enumerate(by_sampler.items()):
            axes.plot(*zip(*points, strict=True), color=f"C{color}", lw=1, label=None if number else name)
    axes.set(xlabel="samples", ylabel=ACCURACY, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")
    save_svg(figure, path)


if __name__ == "__main__":
    main()
