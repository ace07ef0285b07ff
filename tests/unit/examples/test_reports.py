"""Tables and curves of examples from finished runs: gallery, seeds and curriculum."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from examples.gallery.__main__ import report as report_gallery
from examples.gallery.report import load_figures
from examples.seeds import EXAMPLES, has_ended, report


def write_metrics(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_repeated_recipe_of_the_gallery_changes_only_its_row(tmp_path: Path) -> None:
    page, same = tmp_path / "page", {"timing/step": 3.0, "timing/validate": 1.0, "rollout/trajectories": 256}
    found = []
    for out, accuracies in (
        ("first", {"grpo": (0.25, 0.5, 0.75), "dapo": (0.25, 0.25, 0.25)}),
        ("second", {"dapo": (0.25, 0.5, 1.0)}),
    ):
        for recipe, values in accuracies.items():
            for seed in (0, 1):
                lines = [{"step": step, "val/accuracy": value} | same for step, value in enumerate(values)]
                write_metrics(tmp_path / out / f"seed_{seed}" / recipe, lines)
        given = argparse.Namespace(out=tmp_path / out, recipes=["dapo", "grpo"], seeds=[0, 1], iterations=2)
        report_gallery(given, page)
        found.append(load_figures(page / "curves" / "figures.json"))
    before, after = found
    assert (before["grpo"].seconds, before["grpo"].trajectories) == (4.0, 512.0), "of training, without step 0"
    assert after["grpo"].accuracy.tolist() == before["grpo"].accuracy.tolist()
    assert after["dapo"].accuracy[:, -1].tolist() == [1.0, 1.0]
    rows = [line for line in (page / "gallery.md").read_text().splitlines() if line.startswith(("| dapo", "| grpo"))]
    assert [row.split(" | ")[2] for row in rows] == ["1.000 ± 0.000", "0.750 ± 0.000"], "best end first"


def test_the_table_counts_the_seeds_that_end_high_enough(tmp_path: Path) -> None:
    for seed, sampled, seconds in ((3, (0.25, 0.95, 0.89), 60.4), (11, (0.125, 0.5, 0.9), 61.6)):
        folder = tmp_path / f"informal_math_{seed}"
        lines = [{"step": 10 * index, "val/accuracy": value} for index, value in enumerate(sampled)]
        write_metrics(folder / "grpo", [lines[0], {"step": 1, "critic/score/mean": 0.3}, *lines[1:]])
        assert not has_ended(folder)
        (folder / "seconds.json").write_text(json.dumps(seconds))
        assert has_ended(folder)
    *table, _, last = report(tmp_path, "informal_math", [3, 11]).splitlines()
    rows = ["| seed | 0 | 10 | 20 |", "| --- | --- | --- | --- |"]
    assert table == [*rows, "| 3 | 0.250 | 0.950 | 0.890 |", "| 11 | 0.125 | 0.500 | 0.900 |"]
    assert last.startswith("1 of 2 seeds end at 0.9 ") and last.endswith(": 60, 62.")
    assert report(tmp_path, "informal_math", []) == "No seed has ended yet.\n"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_with_seeds_has_a_run_script(name: str) -> None:
    folder = Path("examples", (EXAMPLES[name].command or (name,))[0])
    assert (folder / "run.sh").exists() and (folder / f"{EXAMPLES[name].experiment}.yaml").exists()
