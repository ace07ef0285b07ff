"""Recorded iterations on disk, and the verdict of a replay."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alphaapollo.runs.checkpoint_folder import write_manifest
from alphaapollo.trainer.replay.__main__ import main
from alphaapollo.trainer.replay.recording import (
    LearningOutcome,
    Recording,
    RecordingInfo,
    read_recording,
    write_inputs,
    write_outcome,
)
from alphaapollo.trainer.replay.run import compare_outcomes, judge_replay, print_and_check_comparison
from alphaapollo.types import ImageInput, Row, StopReason, TrajectoryGroup, Turn
from tests.builders import make_completion
from tests.unit.trainer.samples import group, trajectory

ABOUT = RecordingInfo(3, 10, 0.1, True, 1, 2, "cpu", {"dtype": "float32"}, {"torch": "2"})
OUTCOME = LearningOutcome(
    metrics={"actor/loss": 0.1 + 0.2, "actor/grad_norm": 2.0, "critic/advantages/min": math.nan, "batch/padding": 0.5},
    fingerprints={"policy weights": ("00ff", 3.0)},
    columns={"advantages": np.array([0.5, -1.0], dtype=np.float32)},
)


def recorded(folder: Path, groups: list[TrajectoryGroup], outcome: LearningOutcome | None = OUTCOME) -> Path:
    folder.mkdir(parents=True)
    write_inputs(folder, ABOUT, groups)
    write_manifest(folder)
    if outcome:
        write_outcome(folder, outcome)
    return folder


def full_group() -> TrajectoryGroup:
    """All that a rollout worker may return: compact arrays, routed experts, invalid texts."""
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    given = {"earlier_version_token_counts": ((1, 1),), "columns": {"routed_experts": experts[:2]}}
    completion = make_completion([4], [-1 / 3], 2, StopReason.LENGTH, **given)
    turn = Turn(array("i", [7, 8]), completion, "half \ud800 of one", 0.1, info={"seen": np.arange(2), "at": {1}})
    row = Row(array("i", [7, 8, 4]), array("b", [0, 0, 1]), array("d", [0, 0, -1 / 3]), [2], 0, [(2, 1)])
    row.columns = {"routed_experts": experts}
    return group(
        replace(trajectory(0, 1.0, 1), turns=[turn], rows=[row]),
        baseline=trajectory(1, 0.5, 2),
        length_budget=np.int64(8),
    )


def test_a_recording_round_trips(tmp_path: Path) -> None:
    read = read_recording(recorded(tmp_path / "step_000003", [full_group()]))
    assert read.info == ABOUT
    assert read.outcome is not None and read.outcome.columns["advantages"].tolist() == [0.5, -1.0]
    assert all(line.is_equal for line in compare_outcomes(OUTCOME, read.outcome, compare_batching=True))
    (found,), (one,) = read.groups[0].trajectories, full_group().trajectories
    assert (found.rows[0].token_ids, found.rows[0].logprobs) == ([7, 8, 4], [0, 0, -1 / 3])
    assert found.rows[0].response_start == 2 and found.score == one.score and found.end is one.end
    assert found.rows[0].columns["routed_experts"].dtype == np.uint16
    assert found.rows[0].columns["routed_experts"].tolist() == one.rows[0].columns["routed_experts"].tolist()
    assert found.turns[0].text == r"half \ud800 of one" and found.turns[0].completion.stop_reason is StopReason.LENGTH
    assert found.turns[0].info["seen"].tolist() == [0, 1]
    assert read.groups[0].prompt.extra_info == {"length_budget": 8} and read.groups[0].baseline is not None


def error_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(folder)]) == 2
    return capsys.readouterr().err


def test_a_folder_without_a_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    folder = recorded(run / "recorded" / "step_000003", [full_group()])
    (folder / "manifest.json").unlink()
    for given in (tmp_path / "nothing", run, folder):
        error = error_of(given, capsys)
        assert error.startswith(f"error: {given} is not a complete recording") and "<run>/recorded/step_N" in error


@pytest.mark.parametrize("name", ["groups.msgpack", "recording.json", "outcome/outcome.json", "outcome/columns.npz"])
def test_a_modified_file_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "step_000003", [full_group()])
    (folder / name).write_bytes((folder / name).read_bytes()[:-2] + b"xx")
    assert f"{name} has changed" in error_of(folder, capsys)


def prepared(outcome: LearningOutcome | None = OUTCOME, **values: Any) -> Any:
    given = {"float64": False, "result_changing_overrides": [], "rounding_difference_causes": []} | values
    exact = not any(given.values())
    plan = SimpleNamespace(model=SimpleNamespace(dtype="float32"))
    return SimpleNamespace(
        recording=Recording(Path("rec"), ABOUT, [], outcome), plan=plan, expects_exact_result=exact, **given
    )


def with_loss(change: float) -> LearningOutcome:
    metrics = OUTCOME.metrics | {"actor/loss": OUTCOME.metrics["actor/loss"] * (1 + change)}
    return replace(OUTCOME, metrics=metrics, fingerprints={"policy weights": ("00fe", 3.0 * (1 + change / 10))})


def verdict(outcome: LearningOutcome, **values: Any) -> tuple[bool, str]:
    replay = prepared(**values)
    return judge_replay(replay, compare_outcomes(OUTCOME, outcome, replay.expects_exact_result))


def test_an_exact_replay_must_be_bit_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_and_check_comparison(prepared(), OUTCOME)
    assert "bit for bit equal: 6 of 6" in capsys.readouterr().out
    assert not print_and_check_comparison(prepared(), with_loss(1e-6))
    shown = capsys.readouterr().out
    assert "first difference is in actor/loss" in shown and "1.0e-06, in actor/loss" in shown
    other = replace(OUTCOME, columns={"advantages": np.array([0.5, -1.5], dtype=np.float32)})
    assert "first difference is in advantages" in verdict(other)[1]
    assert "inf, in advantages" in verdict(replace(OUTCOME, columns={}))[1]


def test_an_inexact_replay_has_a_tolerance() -> None:
    two = {"rounding_difference_causes": ["the run had 2 training ranks"]}
    equal, shown = verdict(with_loss(1e-6), **two)
    assert equal and "equal within 0.001" in shown and shown.endswith("the run had 2 training ranks")
    assert not verdict(with_loss(1e-2), **two)[0]
    layout = replace(OUTCOME, metrics=OUTCOME.metrics | {"batch/padding": 0.9})
    assert verdict(layout, **two) == (True, "bit for bit equal: 5 of 5")
    equal, shown = verdict(with_loss(1.0), float64=True, result_changing_overrides=["algorithm.gamma=0.9"])
    assert equal and all(fact in shown for fact in ("float64", "algorithm.gamma=0.9", "5.0e-01, in actor/loss"))


def test_a_recorded_error_must_occur_again(capsys: pytest.CaptureFixture[str]) -> None:
    bad = LearningOutcome({}, {}, {}, "the policy worker of rank 0: the gradient norm is nan")
    same = LearningOutcome({}, {}, {}, "the gradient norm is nan")
    assert print_and_check_comparison(prepared(bad), same)
    assert not print_and_check_comparison(prepared(bad), OUTCOME)
    assert print_and_check_comparison(prepared(bad, float64=True), OUTCOME)  # so it was numerical
    assert not print_and_check_comparison(prepared(), same)
    assert "\nreplayed: the gradient norm is nan" in capsys.readouterr().out
    assert print_and_check_comparison(prepared(None), OUTCOME)
    assert "recorded: the run ended before" in capsys.readouterr().out


def test_images_are_stored_once_and_read_as_shared_objects(tmp_path: Path) -> None:
    tensors = {"pixel_values": np.arange(6, dtype=np.float32).reshape(2, 3), "image_grid_thw": np.array([[1, 1, 2]])}
    image = ImageInput(tensors, [5, 5], 5, "digest", (1, 2))
    recorded_group = full_group()
    for one in (*recorded_group.trajectories, recorded_group.baseline):
        one.turns[0].context_images, one.rows[0].images = (image,), (image,)
        one.turns[0].observation = [{"role": "user", "content": "<image>", "images": [b"\x89PNG"]}]
    (read,) = read_recording(recorded(tmp_path / "step_000003", [recorded_group])).groups
    images = [one.rows[0].images[0] for one in (*read.trajectories, read.baseline)]
    images += [one.turns[0].context_images[0] for one in (*read.trajectories, read.baseline)]
    assert len({id(found) for found in images}) == 1
    assert images[0].digest == "digest" and images[0].grid == (1, 2) and images[0].token_ids == [5, 5]
    for name, values in tensors.items():
        assert images[0].tensors[name].dtype == values.dtype and np.array_equal(images[0].tensors[name], values)
    assert read.trajectories[0].turns[0].observation[0]["images"] == [b"\x89PNG"]
    assert image.tensors is tensors  # unchanged
