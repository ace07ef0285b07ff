"""Produce the symptoms of docs/debugging.md, each by a small configuration that is wrong in one way.

python -m examples.symptoms                                        # all symptoms: ten minutes on two cores
python -m examples.symptoms grader_fails --figures docs/symptoms   # some of them, with figures; finished runs are kept
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from alphaapollo.observability.curve import compute_value_range
from examples.gallery.runs import read_metrics
from examples.symptoms.make_task import make_task
from examples.symptoms.runs import Symptom, find_warnings, list_runs, load_symptoms, read_points


def main() -> int:
    symptoms = load_symptoms()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(symptoms)}")
    parser.add_argument("--out", type=Path, default=Path("outputs/symptoms"), help="folder of the task and the runs")
    parser.add_argument("--seed", type=int, default=0, help="a further seed needs its own --out")
    parser.add_argument("--figures", type=Path, help="folder for NAME.svg")
    args = parser.parse_args()
    if unknown := set(args.names) - symptoms.keys():
        parser.error(f"no such symptom: {', '.join(unknown)}. Known: {', '.join(symptoms)}")
    chosen = [symptoms[name] for name in args.names or symptoms]
    if not (args.out / "data").exists():
        make_task(args.out, args.seed)
    for name, (command, words) in list_runs(chosen, args.out, args.seed).items():
        run(command, words, args.out / f"{name}.txt", done=args.out / name / "done")
    print(f"\n{'symptom and its metrics':34}{'first and last value':24}healthy run")
    produced = [report(symptom, args.out) for symptom in chosen]
    for symptom in chosen if args.figures else ():
        draw(symptom, args.out, args.figures / f"{symptom.name}.svg")
    return 0 if all(produced) else 1


def run(command: str, words: list[str], output: Path, done: Path) -> None:
    """Run a command with its output in a file, unless the file `done` exists. Raises CalledProcessError if it fails."""
    if not done.exists():
        print(f"== {output.stem}", flush=True)
        program = [sys.executable, "-m", f"alphaapollo.trainer.main_{command}", *words]
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        with output.open("w") as file:
            subprocess.run(program, check=True, stdout=file, stderr=file, env=environment)
        done.touch()


def report(symptom: Symptom, out: Path) -> bool:
    """Print the metrics and warnings of a symptom. Returns whether its run shows it and the healthy run does not."""
    runs = [read_metrics(out / name) for name in (symptom.name, symptom.healthy)]
    is_produced = [symptom.is_shown_by(lines) for lines in runs] == [True, False]
    print(f"{symptom.name}: {'produced' if is_produced else 'NOT PRODUCED'}")
    for metric in symptom.metrics:
        points = [read_points(lines, metric) for lines in runs]
        ends = [f"{one[0][1]:.3g} to {one[-1][1]:.3g}" for one in points]
        print(f"    {metric:30}{ends[0]:24}{ends[1]}")
    for warning in find_warnings((out / f"{symptom.name}.txt").read_text(encoding="utf-8")):
        print(f"    note {warning[:100]}")
    return is_produced


def draw(symptom: Symptom, out: Path, path: Path) -> None:
    """Draw the first two metrics of a symptom's conditions beside the healthy run's, as SVG."""
    from matplotlib.figure import Figure

    from examples.curves import save_svg

    metrics = symptom.metrics[:2]
    figure = Figure(figsize=(2.8 * len(metrics), 2.2), layout="constrained")
    for number, metric in enumerate(metrics, start=1):
        axes = figure.add_subplot(1, len(metrics), number)
        curves = [read_points(read_metrics(out / name), metric) for name in (symptom.name, symptom.healthy)]
        axes.plot(*zip(*curves[0], strict=True), color="C3", label="symptom")
        axes.plot(*zip(*curves[1], strict=True), color="grey", ls="--", label="healthy")
        low, high = compute_value_range([value for points in curves for _, value in points])
        axes.set(ylim=(low - (high - low) / 20, high + (high - low) / 20))
        axes.set_title(metric, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.locator_params(nbins=3)
    figure.axes[0].legend(fontsize=7)
    save_svg(figure, path)


if __name__ == "__main__":
    raise SystemExit(main())
