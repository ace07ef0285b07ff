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

Every recipe of configs/algorithm on the quickstart's task (add two numbers), but with a teacher that carries with
probability 0.5. The budget is the same: {iterations} iterations that train on 256 trajectories, in four optimizer
steps, the same learning rate; {seeds} seeds. Two kinds of recipes get more of it:

* dapo, prorl and magistral sample again until the batch is full of groups that differ (dynamic sampling): they train on
  as many trajectories, but generate more than three times as many, which the table counts.
* Those without an importance ratio (gpg, opo, remax, rloo) are for samples of the present policy: one step an
  iteration, and 2.5 times the iterations.

No learning rate was sought for a recipe, so this shows that each learns, not which is best. What a recipe needs to fit
the task is in `FIT` of examples/gallery/runs.py: groups of 8, whatever the paper has (ppo, trpo_dual, remax and
reinforce_plus_plus: 256 prompts, one sample each); a KL target of 1 nat for trpo_dual, for answers are short; for
magistral no reward of format and language, which sums do not have; prorl's reset every 16 iterations, not by
validations; the names of gdpo's rewards; a rougher engine for tis, icepop and mis, another advantage for length_budget
(both below).

Accuracy on 256 held-out questions, sampled at temperature 1; mean and 95 % interval over seeds (Student's t, which
knows no bounds: of three seeds that differ much the interval reaches below 0 or above 1). A seed is above its start
where its gain is beyond the 95 % interval of a difference of two shares of 256. Seconds are those of training, on two
cores that other work shared. Made by

    python -m examples.gallery && python -m examples.gallery --report docs/algorithms

![all](curves/all.svg)

"""

NOTES = """

Five things to know when reading it:

* The seeds differ in their warm-up: seed 2 is easy, seeds 0 and 1 begin to rise after some 16 iterations. With three of
  them the intervals are wide.
* *Bounds matter where samples are a few steps old.* cispo has no lower bound and sapo's gate is soft: at the full
  learning rate their first iterations threw seeds 0 and 1 back to .05 to .20, from where they climb again; seed 1 of
  cispo did not come back in 40 iterations. With CISPO's own unified mask (`cispo_mask_low=0.2`, `cispo_mask_high=0.28`,
  Eq. 6-7) seed 1 does not fall and ends at .359. gpg with four steps an iteration ended at .332, .227 and .945; with
  one step on fresh samples (as above) it rises on every seed, and with 160 such iterations seed 1 ends at .984.
* *grpo_passk* pays only a sample that is its group's unique best: where several of eight are right there is no
  gradient, so it is not to be judged by the accuracy of one sample. The closed form, grpo_passk_analytic, spreads the
  gain.
* *length_budget* has dr_grpo's advantage here (`algorithm.adv_estimator=dr_grpo`). GRPO divides by the group's
  deviation: where all of a group are equally right or wrong, a difference of one token then weighs as much as a right
  answer, and with it the recipe learned the length, not the sums, on two seeds (.484 ± 1.025).
* *tis, icepop and mis* get an engine in bfloat16, for with float32 on both sides there is no gap to correct. The gap
  was 6e-5 nats a token (k3), 99 % of the ratios lay between .975 and 1.026, so their bounds had little to do: tis and
  icepop came out the same on seed 0. mis looks at whole answers.

gigpo, which is for several turns, has its curves in [the grid world](../../examples/grid_world/README.md).
"""


if __name__ == "__main__":
    raise SystemExit(main())
