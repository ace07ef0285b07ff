import json
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphaapollo.runs.rollout_log import RolloutLog, format_trajectory_lines
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Score, Trajectory, TrajectoryGroup
from tests.builders import make_completion, make_trajectory, make_turn

PROMPT = Prompt(17, "openai/gsm8k", [{"role": "user", "content": "7+7=?"}], "14")


def trajectory(sample: int = 0, score: Score | float = 1.0) -> Trajectory:
    """Trajectory of one turn with two tokens."""
    completion = make_completion([7, 7], -0.25, version=3)
    turn = make_turn(completion, [1, 2], "14", info={"tool": np.float32(0.5)})
    return make_trajectory(turn, score=score, sample=sample, prompt_id=17, seconds=0.5)


def group(*trajectories: Trajectory) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(PROMPT, list(trajectories))]


def write(folder: Path, *trajectories: Trajectory) -> None:
    """Write step 1."""
    log = RolloutLog(folder)
    log.write(1, group(*trajectories))
    log.close()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_line_contains_the_complete_trajectory(tmp_path: Path):
    log = RolloutLog(tmp_path)
    log.write(12, group(trajectory(0), trajectory(1)))
    log.write(12, group(trajectory(5)), "val")
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step_000012.jsonl", "val_000012.jsonl"]
    first, second = read(tmp_path / "step_000012.jsonl")
    assert second["sample"] == 1
    turn = {"text": "14", "observation": None, "num_shown_tokens": 2, "num_tokens": 2, "num_cached_tokens": 0}
    turn |= {"stop_reason": "stop", "weight_version": 3, "reward": 0.0, "valid": True, "info": {"tool": 0.5}}
    row = {"ids": [1, 2, 7, 7], "mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.25, -0.25]}
    row |= {"first_turn": 0, "weight_versions": [[3, 2]]}
    assert first == {
        "step": 12,
        "prompt_id": 17,
        "sample": 0,
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "7+7=?"}],
        "row_prompt": None,
        "ground_truth": "14",
        "text": "14",
        "reward": 1.0,
        "components": {"accuracy": 1.0},
        "outcome": "scored",
        "reason": "",
        "end": "done",
        "stop_reason": "stop",
        "weight_version": 3,
        "seconds": 0.5,
        "turns": [turn],
        "rows": [row],
    }


def test_turn_contains_the_observation():
    played = trajectory()
    played.turns.insert(0, replace(played.turns[0], observation=[{"role": "tool", "content": "24.0\n"}]))
    (line,) = map(json.loads, format_trajectory_lines(1, group(played)))
    assert [turn["observation"] for turn in line["turns"]] == [[{"role": "tool", "content": "24.0\n"}], None]


def test_failure_without_reward_or_turns_is_logged():
    failed = trajectory(score=Score(float("nan"), {"x": float("inf")}, Outcome.GRADER_FAILED, "time-out"))
    no_score = Score(float("nan"), outcome=Outcome.ENVIRONMENT_FAILED)
    dead = Trajectory(17, 1, [], [], no_score, EpisodeEnd.ENVIRONMENT_FAILED)
    first, second = map(json.loads, format_trajectory_lines(1, group(failed, dead)))
    assert (first["reward"], first["components"]) == (None, {"x": None})
    assert (first["outcome"], first["reason"]) == ("grader_failed", "time-out")
    assert (second["end"], second["stop_reason"], second["turns"]) == ("environment_failed", None, [])


def test_prompt_is_the_first_observation():
    asked = trajectory()
    asked.first_observation = [{"role": "user", "content": "Guess a number."}]
    (line,) = map(json.loads, format_trajectory_lines(1, group(asked)))
    assert (line["prompt"], line["row_prompt"]) == (asked.first_observation, PROMPT.content)


def test_lone_surrogate_is_written(tmp_path: Path):
    write(tmp_path, trajectory(score=Score(0.0, reason="\ud800 é 😀")))
    assert read(tmp_path / "step_000001.jsonl")[0]["reason"] == "\ud800 é 😀"


def test_a_step_written_again_after_a_resume_replaces_the_old_one(tmp_path: Path):
    for sample in (0, 1):
        write(tmp_path, trajectory(sample))
    assert [line["sample"] for line in read(tmp_path / "step_000001.jsonl")] == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error(tmp_path: Path):
    log = RolloutLog(tmp_path)
    (tmp_path / ".step_000001.jsonl.part").symlink_to("/dev/full")
    log.write(1, group(trajectory()))
    with pytest.raises(OSError, match="rollouts: No space left on device"):
        log.close()
    log.close()


def test_error_is_raised_at_the_next_write(tmp_path: Path):
    log = RolloutLog(tmp_path / "rollouts")
    (tmp_path / "rollouts").rmdir()
    log.write(1, group(trajectory()))
    wait(log._writing)
    with pytest.raises(OSError, match="rollouts: No such file"):
        log.write(2, group(trajectory()))
    log.close()


def test_numbers_of_a_row_are_read_back_as_they_were():
    values = [-1e-7, -1.0 / 3, -1234567.125, 0.0, -0.0, -5e-324, float("nan"), float("-inf")]
    played = make_trajectory(make_turn(make_completion([7] * len(values), values)), prompt_id=17)
    (row,) = played.rows
    (line,) = map(json.loads, format_trajectory_lines(1, group(played)))
    assert line["rows"][0]["ids"] == row.token_ids and line["rows"][0]["mask"] == row.action_mask
    assert [repr(one) for one in line["rows"][0]["logprobs"]] == [repr(one) for one in row.logprobs[:-2]] + ["None"] * 2


def test_secrets_are_redacted(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "canary-7f3a91c2d4")
    failed = Score(float("nan"), outcome=Outcome.GRADER_FAILED, reason="401: canary-7f3a91c2d4 is no key")
    write(tmp_path, trajectory(score=failed))
    (line,) = read(tmp_path / "step_000001.jsonl")
    assert line["reason"] == "401: $SOME_API_KEY is no key"
    assert "canary" not in "".join(format_trajectory_lines(1, group(trajectory(score=failed))))  # what others write


def test_secrets_with_quotes_and_line_breaks_are_redacted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRIVATE_KEY", secret := 'BEGIN "KEY"\nabcdef')
    played = trajectory(score=Score(0.0, reason=secret))
    played.turns[0].info["object"] = ValueError(secret)
    (line,) = map(json.loads, format_trajectory_lines(1, group(played)))
    assert line["reason"] == line["turns"][0]["info"]["object"] == "$PRIVATE_KEY"
