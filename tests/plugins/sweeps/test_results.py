"""The table of measured results, from small run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import results

PAGE = "# Results\n<!-- results: written by a script -->\nold\n<!-- end of results -->\nend\n"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Folders of three seeds that have ended, and one that has not."""
    for seed, last in ((10, 0.9), (2, 0.8), (0, 1.0), (3, None)):
        run = tmp_path / f"quickstart_{seed}" / "grpo"
        run.mkdir(parents=True)
        values = [(0, 0.5), (1, None), (10, 0.7), *([(20, last)] if last else [])]
        lines = [{"step": step, "val/accuracy": value} for step, value in values]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if last:
            (run.parent / "seconds.json").write_text(json.dumps(60.0 * (seed + 1)))
            (run.parent / "machine.json").write_text(
                json.dumps({"machine": "CPU (avx2), 2 cores", "load_average": seed})
            )
    return tmp_path


def test_a_row_has_the_mean_of_the_ended_seeds_with_its_interval(out: Path) -> None:
    cells = results.make_row("quickstart", results.list_ended(out, "quickstart"))
    assert cells[2:6] == [
        "CPU (avx2), 2 cores; load 0 to 10",
        "1.0 to 11.0",
        "0.500 (0.500 to 0.500) -> 0.900 (0.652 to 1)",  # 0.9 +- 4.30 * 0.1 / sqrt(3), at most 1
        "0, 2, 10",
    ]
    assert cells[6] == "`examples/quickstart/run.sh SEED OUT`"
    assert results.make_row("tasks", results.list_ended(out, "tasks"))[4:6] == ["not yet measured", ""]


@pytest.mark.parametrize("name", results.ENTRIES)
def test_a_row_links_to_a_section_about_its_example(name: str) -> None:
    link = results.make_row(name, [])[0].partition("](")[2].partition(")")[0]
    page, _, anchor = link.partition("#")
    text = (results.PAGE.parent / page).read_text(encoding="utf-8")
    assert anchor in ("", *(line[3:].lower().replace(" ", "-") for line in text.splitlines() if line.startswith("## ")))


def test_only_the_table_between_the_marks_is_replaced() -> None:
    text = results.replace_table(PAGE, [["a"] * len(results.HEADER)])
    assert text.startswith("# Results\n<!-- results: written by a script -->\n| example | ") and "old" not in text
    assert text.endswith("| a | a | a | a | a | a | a |\n<!-- end of results -->\nend\n")
    with pytest.raises(ValueError, match="lacks the marks"):
        results.replace_table("# Results", [["a"]])


def test_a_seed_that_has_ended_is_not_run_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(results, "run", lambda name, seed, folder: ran.append(seed) or seed)
    codes = [results.measure("quickstart", seed, out / f"quickstart_{seed}") for seed in (0, 3)]
    assert codes == [0, 3] and ran == [3] and len(results.list_ended(out, "quickstart")) == 3
