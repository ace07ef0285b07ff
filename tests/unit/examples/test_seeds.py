"""Table of an example over seeds, from finished runs."""

import json
from pathlib import Path

import pytest

from examples.seeds import EXAMPLES, has_ended, report


def write_run(folder: Path, sampled: list[float], seconds: float) -> None:
    (folder / "grpo").mkdir(parents=True)
    lines = [{"step": 10 * index, "val/accuracy": value} for index, value in enumerate(sampled)]
    lines.insert(1, {"step": 1, "critic/score/mean": 0.3})
    (folder / "grpo/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not has_ended(folder)
    (folder / "seconds.json").write_text(json.dumps(seconds))
    assert has_ended(folder)


def test_the_table_counts_the_seeds_that_end_high_enough(tmp_path: Path):
    write_run(tmp_path / "informal_math_3", [0.25, 0.95, 0.89], 60.4)
    write_run(tmp_path / "informal_math_11", [0.125, 0.5, 0.9], 61.6)
    *table, _, last = report(tmp_path, "informal_math", [3, 11]).splitlines()
    rows = ["| seed | 0 | 10 | 20 |", "| --- | --- | --- | --- |"]
    assert table == [*rows, "| 3 | 0.250 | 0.950 | 0.890 |", "| 11 | 0.125 | 0.500 | 0.900 |"]
    assert last.startswith("1 of 2 seeds end at 0.9 ") and last.endswith(": 60, 62.")
    assert report(tmp_path, "informal_math", []) == "No seed has ended yet.\n"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_has_a_run_script(name: str):
    folder = Path("examples", (EXAMPLES[name].command or (name,))[0])
    assert (folder / "run.sh").exists()
    assert (folder / f"{EXAMPLES[name].experiment}.yaml").exists()
