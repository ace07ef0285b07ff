"""`alphaapollo samples`: the groups of a run in the terminal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from alphaapollo.cli.main import main
from alphaapollo.runs.rollout_log import RolloutLog, format_trajectory_lines
from alphaapollo.types import Message, Outcome, Prompt, Score, TrajectoryGroup
from tests.builders import make_group, make_trajectory, make_turn


def group(prompt: int, *answers: tuple[str, float]) -> TrajectoryGroup:
    """Group with these texts and rewards. A reward of NaN is a failed grader."""
    trajectories = []
    for sample, (text, reward) in enumerate(answers):
        failed = math.isnan(reward)
        outcome = Outcome.GRADER_FAILED if failed else Outcome.SCORED
        score = Score(reward, {} if failed else {"accuracy": reward}, outcome, "no server" if failed else "")
        turn = make_turn(5, text=text)
        trajectories.append(make_trajectory(turn, score=score, sample=sample, prompt_id=prompt))
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {prompt}"}]
    return make_group(*trajectories, prompt=Prompt(prompt, "sums", chat, str(prompt)))  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "120")
    log = RolloutLog(tmp_path / "rollouts")
    log.write(1, [group(3, ("early", 0.0))])
    log.write(12, [group(4, ("[red]four[/]", 1.0), ("five", 0.0), ("none", math.nan)), group(5, ("six", 0), ("7", 0))])
    log.write(10, [group(6, ("held out", 0.5))], "val")
    log.close()
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["samples", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_samples_of_a_group_are_side_by_side_with_the_best_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys, run).splitlines()
    assert (lines[0], lines[3]) == (f"{run}/rollouts/step_000012.jsonl", "question 4")
    headings = [line.split("   ") for line in lines if line.startswith("prompt ")]
    assert headings[0] == ["prompt 4 sums", "ground truth 4", "mean reward 0.500"]
    assert headings[1] == ["prompt 5 sums", "ground truth 5", "mean reward 0.000, all equal"]
    assert [part.strip() for part in lines[5].split("  ") if part.strip()] == [
        "sample 0: reward 1.000",
        "sample 1: reward 0.000",
        "sample 2: no server",
    ]
    facts = [part.strip() for part in lines[6].split("  ") if part.strip()]
    assert facts == ["accuracy 1, 5 tokens, stop", "accuracy 0, 5 tokens, stop", "5 tokens, stop"]
    assert lines[8].split() == ["[red]four[/]", "five", "none"]


def test_the_narrow_terminal_has_fewer_columns(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = show(capsys, run).splitlines()
    headings = [line for line in lines if line.startswith(" sample")]
    assert len(headings) == 5 and max(map(len, headings)) <= 60


def test_step_pass_order_and_number_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "early" in show(capsys, run, "--step", 1)
    assert "held out" in show(capsys, run, "--val")
    prompts = [line.split()[1] for line in show(capsys, run, "--sort", "reward").splitlines() if line[:6] == "prompt"]
    assert prompts == ["5", "4"]
    assert "prompt 4" not in show(capsys, run, "--sort", "reward", "--groups", 1)


def test_long_answers_are_shortened_and_control_characters_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RolloutLog(tmp_path / "rollouts")
    log.write(1, [group(1, ("\x1b[2J" + "so " * 400 + "the answer is 42", 1.0))])
    log.close()
    shown = show(capsys, tmp_path, "--chars", 100)
    assert "\x1b" not in shown and " ... " in shown and "answer is 42" in shown
    assert shown.count("so ") < 40


def test_turns_and_messages_of_the_environment_have_headings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages: list[Message] = [{"role": "tool", "content": "14"}, {"role": "user", "content": "go on"}]
    turns = make_turn(5, text="7+7?", observation=messages), make_turn(5, text="it is 14")
    (line,) = format_trajectory_lines(0, [make_group(make_trajectory(*turns))])
    (tmp_path / "results.jsonl").write_text(line)
    lines = [text.strip() for text in show(capsys, tmp_path).splitlines()]
    parts = ["[turn 1]", "7+7?", "", "[tool]", "14", "", "[user]", "go on", "", "[turn 2]", "it is 14"]
    assert lines[lines.index("[turn 1]") :][: len(parts)] == parts


def test_results_of_main_generation_while_it_is_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete, partial = format_trajectory_lines(0, [group(1, ("right", 1.0)), group(2, ("part", 1.0))])
    (tmp_path / "results.jsonl").write_text(complete + partial[:-20])
    shown = show(capsys, tmp_path)
    assert "right" in shown and "prompt 2" not in shown


def test_step_without_samples_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, kind in (
        (["--val", "--step", "12"], "validation samples of step 12"),
        (["--step", "7"], "samples of step 7"),
    ):
        assert main(["samples", str(run), *words]) == 2
        assert f"has no {kind}. main_ppo writes" in capsys.readouterr().err


def test_a_folder_without_samples_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(tmp_path / "gone")]) == 2
    assert "gone has no samples. main_ppo writes rollouts/" in capsys.readouterr().err
