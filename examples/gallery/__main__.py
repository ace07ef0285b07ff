"""Train every shipped recipe on the quickstart's task with the same budget, and compare them in one table.

python -m examples.gallery                          # all recipes, three seeds: hours on two cores
python -m examples.gallery --recipes grpo dapo      # some of them; finished runs are skipped
python -m examples.gallery --report docs/algorithms # only write the table and curves of finished runs
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from examples.gallery.runs import prepare, recipes, train


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gallery"), help="output folder of the runs")
    parser.add_argument("--recipes", nargs="+", choices=recipes(), default=recipes(), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--report", type=Path, help="write gallery.md and curves/ here without running anything")
    args = parser.parse_args()
    failed = [] if args.report else run_all(args)
    report(args, args.report or args.out)
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


def run_all(args: argparse.Namespace) -> list[str]:
    """Run every recipe with every seed. Returns the failed runs, which do not stop the others."""
    failed: list[str] = []
    for seed in args.seeds:
        prepare(args.out / f"seed_{seed}", seed)
    jobs = [(recipe, seed) for recipe in args.recipes for seed in args.seeds]
    started = time.monotonic()
    for number, (recipe, seed) in enumerate(jobs, start=1):
        print(f"== {number}/{len(jobs)} {recipe}, seed {seed} ({time.monotonic() - started:.0f} s)", flush=True)
        try:
            train(args.out / f"seed_{seed}", recipe, seed, args.iterations)
        except subprocess.CalledProcessError as error:
            failed.append(f"{recipe}, seed {seed}: exit code {error.returncode}")
    return failed


def report(args: argparse.Namespace, folder: Path) -> None:
    """Write gallery.md, curves/all.svg and curves/RECIPE.svg for recipes with two or more finished seeds and for those
    that curves/figures.json has from earlier runs."""
    from examples.gallery.report import (  # imports matplotlib
        BESIDE,
        draw,
        draw_all,
        load_figures,
        read_curves,
        save_figures,
        table,
    )

    figures = load_figures(folder / "curves" / "figures.json")
    for recipe in args.recipes:
        if curves := read_curves(args.out, recipe, args.seeds, args.iterations):
            figures[recipe] = curves
    if not figures:
        print("no recipe has two finished seeds yet")
        return
    for curves in figures.values():
        draw(curves, figures.get(BESIDE), folder / "curves" / f"{curves.recipe}.svg")
    draw_all(list(figures.values()), folder / "curves" / "all.svg")
    save_figures(folder / "curves" / "figures.json", figures.values())
    text = table(list(figures.values()))
    (folder / "gallery.md").write_text(HEADER.format(iterations=args.iterations, seeds=len(args.seeds)) + text + NOTES)
    print(text)


HEADER = """# Gallery

Compare all recipes of configs/algorithm on one small task: adding two numbers, as in the quickstart. The model is
warmed up with SFT on additions in which a carry is written at random. All recipes have the same learning rate, which
was not tuned for each, so the table shows that a recipe learns, not which one is best. All have the same budget:
{iterations} iterations, each of which trains on 256 trajectories in four optimizer steps, with {seeds} seeds. There are
two exceptions:

* dapo, prorl and magistral use dynamic sampling: they train on the same number of trajectories, but generate more than
  three times as many (column `trajectories`).
* Recipes without an importance ratio (gpg, opo, reinforce, remax, rloo) and trpo take one step per iteration, and run
  for 2.5 times as many iterations.

`FIT` in examples/gallery/runs.py lists the settings that replace those of a recipe for this task: groups of 8 (pods: 8
of 32 samples; ppo, ppo_kl, reference_kl_dual, reinforce, remax and reinforce_plus_plus: 256 prompts with one sample
each), a bfloat16 engine for tis, icepop and mis, and dr_grpo's advantage for length_budget.

The table shows the accuracy on 256 held-out questions, sampled at temperature 1, as mean and 95 % interval over seeds
(Student's t-distribution). The column `seeds above their start` counts seeds whose accuracy rose by more than the 95 %
margin of error of a difference between two accuracies. Seconds are training time on two cores that also ran other work.
To reproduce the table:

<!-- not run: trains for hours -->
    python -m examples.gallery && python -m examples.gallery --report docs/algorithms

![all](curves/all.svg)

"""

NOTES = """
Notes on the results:

* *Clip bounds matter if samples are a few optimizer steps old.* The accuracy of cispo (no lower bound) and sapo (a soft
  gate) first fell to 0.05 to 0.20 with two seeds. With CISPO's unified mask (`cispo_mask_low=0.2`,
  `cispo_mask_high=0.28`), it does not fall.
* *gpg* has no clip at all. With four optimizer steps per iteration, its seeds ended at 0.332, 0.227 and 0.945.
* *grpo_passk* gives an advantage only to the unique best sample of a group. If several of eight samples are right, the
  gradient is zero. The closed form, grpo_passk_analytic, gives every sample of a mixed group an advantage.
* *length_budget*: GRPO's division by the group's standard deviation gives a difference of one token as much weight as a
  right answer, if all samples are equally correct. With it, two seeds learned the length instead of the sums (0.484 ±
  1.025).
* *tis, icepop and mis*: the mismatch of the bfloat16 engine was 6e-5 nats per token (k3), so the bounds had little
  effect.

gigpo, turn_ppo and turn_group need episodes with several turns. Their curves are on the page of [the grid
world](../../examples/grid_world/README.md).
"""


if __name__ == "__main__":
    raise SystemExit(main())
