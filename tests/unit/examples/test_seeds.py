"""The table of an example over seeds, from runs that lie on disk."""

import json
from pathlib import Path

import pytest

from examples.seeds import EXAMPLES, Example, SeedRun, has_ended, read, table


def test_a_run_is_read_from_its_folder(tmp_path: Path):
    metrics = [
        {"step": 0, "val/accuracy": 0.25, "val/accuracy_greedy": 0.5},
        {"step": 1, "reward/mean": 0.3},
        {"step": 2, "val/accuracy": 1.0, "val/accuracy_greedy": None},
    ]
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    assert not has_ended(tmp_path)
    (tmp_path / "seconds.json").write_text("61.5")
    assert has_ended(tmp_path)
    assert read(tmp_path, 7, Example("grpo", 0.95)) == SeedRun(7, {0: 0.25, 2: 1.0}, {0: 0.5}, 61.5)


def test_the_table_counts_the_seeds_that_end_high_enough():
    runs = [
        SeedRun(0, {0: 0.25, 20: 0.99, 40: 0.9}, {0: 0.5, 40: 1.0}, 60.4),
        SeedRun(1, {0: 0.25, 20: 0.5, 40: 0.95}, {}, 61.6),
    ]
    assert table(runs, 0.95).splitlines() == [
        "| seed | start | 20 | 40 | seconds |",
        "| --- | --- | --- | --- | --- |",
        "| 0 | .250 / .500 | .990 | .900 / 1.000 | 60 |",
        "| 1 | .250 | .500 | .950 | 62 |",
        "",
        "1 of 2 seeds end at 0.95 or above (sampled).",
    ]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_each_example_is_one(name: str):
    assert Path("examples", name, "run.sh").exists()
    assert Path("examples", name, f"{EXAMPLES[name].experiment}.yaml").exists()
