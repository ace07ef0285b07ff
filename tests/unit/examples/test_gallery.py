from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.gallery.__main__ import report
from examples.gallery.report import load_figures


def ended(out: Path, seed: int, recipe: str, accuracies: list[float]) -> None:
    """A run with these validation results, one per iteration."""
    folder = out / f"seed_{seed}" / recipe
    folder.mkdir(parents=True)
    same = {"timing/step": 3.0, "timing/validate": 1.0, "rollout/trajectories": 256}
    lines = [{"step": step, "val/accuracy": accuracy} | same for step, accuracy in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_repeated_recipe_changes_only_its_row(tmp_path: Path) -> None:
    page, first, second = tmp_path / "page", tmp_path / "first", tmp_path / "second"
    for seed in (0, 1):
        ended(first, seed, "grpo", [0.25, 0.5, 0.75])
        ended(first, seed, "dapo", [0.25, 0.25, 0.25])
        ended(second, seed, "dapo", [0.25, 0.5, 1.0])
    asked = {"recipes": ["dapo", "grpo"], "seeds": [0, 1], "iterations": 2}
    report(argparse.Namespace(out=first, **asked), page)
    before = load_figures(page / "curves" / "figures.json")
    assert (before["grpo"].seconds, before["grpo"].trajectories) == (4.0, 512.0), "of training, without step 0"
    report(argparse.Namespace(out=second, **asked), page)
    after = load_figures(page / "curves" / "figures.json")
    assert after["grpo"].accuracy.tolist() == before["grpo"].accuracy.tolist()
    assert after["dapo"].accuracy[:, -1].tolist() == [1.0, 1.0]
    rows = [line for line in (page / "gallery.md").read_text().splitlines() if line.startswith(("| dapo", "| grpo"))]
    assert [row.split(" | ")[2] for row in rows] == ["1.000 ± 0.000", "0.750 ± 0.000"], "best end first"
