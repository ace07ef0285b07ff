"""Logged trajectories, and their images, which are files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alphaapollo.data.prompts import load_prompts
from alphaapollo.runs.rollout_log import (
    RolloutLog,
    compute_prompt_digest,
    format_trajectory_lines,
    name_image,
    save_image,
)
from alphaapollo.trainer.evaluation.generation import FinishedResults, open_results_writer, read_finished_results
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Score, Trajectory, TrajectoryGroup
from tests.builders import make_completion, make_trajectory, make_turn, write_rows
from tests.unit.rollout.test_images import SMALL, WIDE

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


def format_lines(*trajectories: Trajectory) -> list[dict]:
    return [json.loads(line) for line in format_trajectory_lines(1, group(*trajectories))]


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
    line = {"step": 12, "prompt_id": 17, "sample": 0, "data_source": "openai/gsm8k", "ground_truth": "14"}
    line |= {"prompt": [{"role": "user", "content": "7+7=?"}], "row_prompt": None, "turns": [turn], "rows": [row]}
    line |= {"text": "14", "reward": 1.0, "components": {"accuracy": 1.0}, "accuracy": 1.0, "outcome": "scored"}
    line |= {"reason": "", "extra_info": {}, "env_kwargs": {}}
    line["prompt_digest"] = compute_prompt_digest(PROMPT)
    assert first == line | {"end": "done", "stop_reason": "stop", "weight_version": 3, "seconds": 0.5}


def test_the_digest_of_a_prompt_is_that_of_what_can_be_read(tmp_path: Path):
    image = tmp_path / "copy.png"
    image.write_bytes(SMALL)
    shown = replace(PROMPT, content=[{"role": "user", "content": "<image>", "images": [SMALL]}])
    copied = replace(PROMPT, content=[{"role": "user", "content": "<image>", "images": [str(image)]}])
    assert compute_prompt_digest(shown) == compute_prompt_digest(copied)
    row = replace(PROMPT, extra_info={"a": 1, "b": np.array([1.0, np.nan])}, env_kwargs={"c": {2: b"x"}})
    equal = replace(row, id=3, location="b.jsonl", file=1, extra_info=dict(reversed(row.extra_info.items())))
    assert compute_prompt_digest(row) == compute_prompt_digest(equal)
    others = [
        {"extra_info": {}},
        {"env_kwargs": {"c": {2: b"y"}}},
        {"data_source": ""},
        {"template_arguments": {"t": 1}},
    ]
    digests = {compute_prompt_digest(replace(row, **change)) for change in others}
    assert len({*digests, compute_prompt_digest(row)}) == 5


def test_a_logged_sample_is_read_as_its_row(tmp_path: Path):
    columns = {"letter": "a", "answer": "?", "enable_thinking": False}  # all in extra_info
    given = {"prompt": PROMPT.content, "reward_model": {"ground_truth": 14}, "env_kwargs": {"seed": 3}, **columns}
    (row,) = load_prompts(write_rows(tmp_path / "rows.jsonl", [given]), "prompt")
    played = trajectory()
    played.first_observation = [{"role": "user", "content": "Guess."}]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(format_trajectory_lines(1, [TrajectoryGroup(row, [played])])))
    (read_row,) = load_prompts(str(path), "prompt")
    assert read_row == row and row.template_arguments and row.extra_info == columns
    assert compute_prompt_digest(read_row) == read(path)[0]["prompt_digest"]


def test_failure_without_reward_or_turns_is_logged():
    failed = trajectory(score=Score(float("nan"), {"x": float("inf")}, Outcome.GRADER_FAILED, "time-out"))
    no_score = Score(float("nan"), outcome=Outcome.ENVIRONMENT_FAILED)
    first, second = format_lines(failed, Trajectory(17, 1, [], [], no_score, EpisodeEnd.ENVIRONMENT_FAILED))
    assert (first["reward"], first["components"]) == (None, {"x": None})
    assert (first["outcome"], first["reason"]) == ("grader_failed", "time-out")
    assert (second["end"], second["stop_reason"], second["turns"]) == ("environment_failed", None, [])


def test_a_step_written_again_after_a_resume_replaces_the_old_one(tmp_path: Path):
    for sample in (0, 1):
        write(tmp_path, trajectory(sample, Score(0.0, reason="\ud800 é 😀")))  # a surrogate, too
    (line,) = read(tmp_path / "step_000001.jsonl")
    assert (line["sample"], line["reason"]) == (1, "\ud800 é 😀")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error(tmp_path: Path):
    log = RolloutLog(tmp_path)
    (tmp_path / ".step_000001.jsonl.part").symlink_to("/dev/full")
    log.write(1, group(trajectory()))
    with pytest.raises(OSError, match="rollouts: No space left on device"):
        log.close()
    log.close()


def test_numbers_of_a_row_are_read_back_as_they_were():
    values = [-1e-7, -1.0 / 3, -1234567.125, 0.0, -0.0, -5e-324, float("nan"), float("-inf")]
    played = make_trajectory(make_turn(make_completion([7] * len(values), values)), prompt_id=17)
    (row,) = played.rows
    (line,) = format_lines(played)
    assert line["rows"][0]["ids"] == row.token_ids and line["rows"][0]["mask"] == row.action_mask
    assert [repr(one) for one in line["rows"][0]["logprobs"]] == [repr(one) for one in row.logprobs[:-2]] + ["None"] * 2


IMAGE_PROMPT = Prompt(0, "s", [{"role": "user", "content": "<image> How many?", "images": [SMALL]}], "2", {"index": 0})


def make_image_group(first_observation: list | None = None) -> TrajectoryGroup:
    samples = [replace(trajectory(number), prompt_id=0, first_observation=first_observation) for number in range(2)]
    for sample in samples:
        sample.turns[0].observation = [{"role": "user", "content": "<image>", "images": [WIDE]}]
        sample.turns[0].info = {"frame": WIDE}
    return TrajectoryGroup(IMAGE_PROMPT, samples)


def test_images_of_rollouts_are_files_and_written_once(tmp_path: Path) -> None:
    source = tmp_path / "data.png"
    source.write_bytes(SMALL)
    seen = [{"role": "user", "content": "<image> See?", "images": [str(source)]}]
    log = RolloutLog(tmp_path / "rollouts")
    log.write(1, [make_image_group(), make_image_group(seen)])
    log.write(2, [make_image_group()])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "rollouts/step_000001.jsonl").read_bytes().splitlines()]
    small, wide = lines[0]["prompt"][0]["images"][0], lines[0]["turns"][0]["observation"][0]["images"][0]
    assert small == name_image(SMALL) and small.startswith("images/") and small.endswith(".png")
    assert (tmp_path / "rollouts" / small).read_bytes() == SMALL
    assert (tmp_path / "rollouts" / wide).read_bytes() == WIDE
    assert len([*(tmp_path / "rollouts/images").iterdir()]) == 2  # of three groups with two samples each
    assert lines[2]["prompt"][0]["images"] == lines[2]["row_prompt"][0]["images"] == [small]  # a path and its bytes
    assert lines[0]["turns"][0]["info"] == {"frame": f"{len(WIDE)} bytes"}
    assert IMAGE_PROMPT.content[0]["images"] == [SMALL]  # unchanged
    assert save_image(tmp_path, "/no/such/image.png") == "/no/such/image.png" and name_image(b"no").endswith(".bin")


def test_results_with_images_are_resumed_and_are_a_data_file(tmp_path: Path) -> None:
    path = tmp_path / "run/results.jsonl"
    with open_results_writer(path, FinishedResults()) as write:
        write(make_image_group())
    assert read_finished_results(path, {0: IMAGE_PROMPT}, 2).problem_ids == {0}
    prompts = load_prompts(str(path), "prompt")
    (encoded_image,) = prompts[0].content[0]["images"]
    assert Path(encoded_image).read_bytes() == SMALL and prompts[0].ground_truth == "2"
