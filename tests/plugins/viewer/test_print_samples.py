"""`alphaapollo samples`: the groups of a run in the terminal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from alphaapollo.cli.main import main
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.types import Outcome, Score
from tests.builders import make_group as join
from tests.builders import make_trajectory, make_turn
from tests.plugins.viewer.run_kit import make_group, write_groups


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "120")
    newest = make_group(4, ("[red]four[/]", 1.0), ("five", 0.0), ("\x1b[2J" + "so " * 400 + "at last", 0.0))
    newest.trajectories[2].score = Score(math.nan, {}, Outcome.GRADER_FAILED, "no server")
    write_groups(tmp_path, 1, [make_group(3, ("early", 0.0))])
    write_groups(tmp_path, 12, [newest, make_group(5, ("six", 0.0), ("7", 0.0))])
    write_groups(tmp_path, 10, [make_group(6, ("held out", 0.5))], "val")
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    assert main(["samples", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


def test_samples_of_a_group_are_side_by_side_with_the_best_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys, run, "--chars", 30)
    assert (lines[0], lines[3]) == (f"{run}/rollouts/step_000012.jsonl", "What is 7 + 7?")
    headings = [line.split("   ") for line in lines if line.startswith("prompt ")]
    assert headings[0] == ["prompt 4 sums", "ground truth 14", "mean reward 0.500"]
    assert headings[1][0] == "prompt 5 sums" and headings[1][2] == "mean reward 0.000, all equal"
    columns = [[part.strip() for part in line.split("  ") if part.strip()] for line in lines]
    assert columns[5] == ["sample 0: reward 1.000", "sample 1: reward 0.000", "sample 2: no server"]
    assert columns[6] == ["accuracy 1, 3 tokens, stop", "accuracy 0, 3 tokens, stop", "3 tokens, stop"]
    assert columns[8][:2] == ["[red]four[/]", "five"] and " ... " in columns[8][2] and "\x1b" not in columns[8][2]
    assert columns[10] == ["[reason of the score]"] * 2 and columns[11] == ["because [red]four[/]", "because five"]


def test_the_narrow_terminal_has_fewer_columns(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    headings = [line for line in show(capsys, run) if line.startswith(" sample")]
    assert len(headings) == 5 and max(map(len, headings)) <= 60


def test_step_pass_order_and_number_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "early" in " ".join(show(capsys, run, "--step", 1)) and "held out" in " ".join(show(capsys, run, "--val"))
    prompts = [line.split()[1] for line in show(capsys, run, "--sort", "reward") if line.startswith("prompt")]
    assert prompts == ["5", "4"]
    assert not [line for line in show(capsys, run, "--sort", "reward", "--groups", 1) if line.startswith("prompt 4")]
    for words, error in (
        ([run, "--val", "--step", 12], "has no validation samples of step 12"),
        ([run, "--step", 7], "has no samples of step 7"),
        ([run / "gone"], "gone has no samples. main_ppo writes rollouts/"),
    ):
        assert main(["samples", *map(str, words)]) == 2 and error in capsys.readouterr().err


def test_results_of_several_turns_while_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "tool", "content": "14"}, {"role": "user", "content": "go on"}]
    turns = make_turn(5, text="7+7?", observation=messages), make_turn(5, text="it is 14")
    complete, partial = format_trajectory_lines(0, [join(make_trajectory(*turns)), make_group(2, ("part", 1.0))])
    (tmp_path / "results.jsonl").write_text(complete + partial[:-20])
    lines = [text.strip() for text in show(capsys, tmp_path)]
    parts = ["[turn 1]", "7+7?", "", "[tool]", "14", "", "[user]", "go on", "", "[turn 2]", "it is 14"]
    assert lines[lines.index("[turn 1]") :][: len(parts)] == parts and not any("part" in line for line in lines)
