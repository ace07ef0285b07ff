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

from alphaapollo.launch.checkpoint_folder import write_manifest
from alphaapollo.trainer.replay.__main__ import main
from alphaapollo.trainer.replay.recording import (
    LearningOutcome,
    Recording,
    RecordingInfo,
    read_recording,
    write_inputs,
    write_outcome,
)
from alphaapollo.trainer.replay.table import compare_outcomes, judge_replay, print_and_check_comparison
from alphaapollo.types import Completion, ImageInput, Row, StopReason, TrajectoryGroup, Turn
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


def make_group() -> TrajectoryGroup:
    """All that a rollout worker may return: compact arrays, routed experts, invalid texts."""
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    completion = Completion(array("i", [4]), array("d", [-1 / 3]), StopReason.LENGTH, 2, 0, ((1, 1),), experts[:2])
    turn = Turn(array("i", [7, 8]), completion, "half \ud800 of one", 0.1, info={"seen": np.arange(2), "at": {1}})
    row = Row(array("i", [7, 8, 4]), array("b", [0, 0, 1]), array("d", [0, 0, -1 / 3]), [2], 0, [(2, 1)], experts)
    return group(
        replace(trajectory(0, 1.0, 1), turns=[turn], rows=[row]),
        baseline=trajectory(1, 0.5, 2),
        length_budget=np.int64(8),
    )


def test_a_recording_round_trips(tmp_path: Path) -> None:
    read = read_recording(recorded(tmp_path / "step_000003", [make_group()]))
    assert read.info == ABOUT
    assert read.outcome is not None and read.outcome.columns["advantages"].tolist() == [0.5, -1.0]
    assert all(line.is_equal for line in compare_outcomes(OUTCOME, read.outcome, compare_batching=True))
    (found,), (one,) = read.groups[0].trajectories, make_group().trajectories
    assert (found.rows[0].token_ids, found.rows[0].logprobs) == ([7, 8, 4], [0, 0, -1 / 3])
    assert found.rows[0].response_start == 2 and found.score == one.score and found.end is one.end
    assert found.rows[0].routed_experts is not None and found.rows[0].routed_experts.dtype == np.uint16
    assert found.rows[0].routed_experts.tolist() == one.rows[0].routed_experts.tolist()  # type: ignore[union-attr]
    assert found.turns[0].text == r"half \ud800 of one" and found.turns[0].completion.stop_reason is StopReason.LENGTH
    assert found.turns[0].info["seen"].tolist() == [0, 1]
    assert read.groups[0].prompt.extra_info == {"length_budget": 8} and read.groups[0].baseline is not None


def test_a_folder_without_a_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    folder = recorded(run / "recorded" / "step_000003", [make_group()])
    for given in (tmp_path / "nothing", run):
        assert main([str(given)]) == 2
        message = f"error: {given} is not a complete recording of an iteration. Use a folder <run>/recorded/step_N"
        assert message in capsys.readouterr().err
    (folder / "manifest.json").unlink()
    assert main([str(folder)]) == 2 and "is not a complete recording" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["groups.msgpack", "recording.json", "outcome/outcome.json", "outcome/columns.npz"])
def test_a_modified_file_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "step_000003", [make_group()])
    (folder / name).write_bytes((folder / name).read_bytes()[:-2] + b"xx")
    assert main([str(folder)]) == 2
    assert f"is damaged: {name} has changed. Use an intact copy" in capsys.readouterr().err


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "step_000003", [make_group()], None)
    (folder / "manifest.json").unlink()
    text = (folder / "recording.json").read_text()
    (folder / "recording.json").write_text(text.replace('"format": 2', '"format": 9'))
    write_manifest(folder)
    with pytest.raises(ValueError, match="has recording format 9, but this version reads format 2"):
        read_recording(folder)


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


def test_an_exact_replay_must_be_bit_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_and_check_comparison(prepared(), OUTCOME)
    assert "bit for bit equal: 6 of 6" in capsys.readouterr().out
    assert not print_and_check_comparison(prepared(), with_loss(1e-6))
    said = capsys.readouterr().out
    assert "not equal: the first difference is in actor/loss; the largest difference is 1.0e-06, in actor/loss" in said
    other = replace(OUTCOME, columns={"advantages": np.array([0.5, -1.5], dtype=np.float32)})
    assert judge_replay(prepared(), compare_outcomes(OUTCOME, other, True))[1].startswith(
        "not equal: the first difference is in adv"
    )
    shorter = replace(OUTCOME, columns={})
    assert "inf, in advantages" in judge_replay(prepared(), compare_outcomes(OUTCOME, shorter, True))[1]


def test_an_inexact_replay_has_a_tolerance() -> None:
    two = prepared(rounding_difference_causes=["the run had 2 training ranks"])
    equal, said = judge_replay(two, compare_outcomes(OUTCOME, with_loss(1e-6), two.expects_exact_result))
    assert (
        equal
        and "equal within 0.001" in said
        and said.endswith("Not bit for bit, because the run had 2 training ranks")
    )
    assert not judge_replay(two, compare_outcomes(OUTCOME, with_loss(1e-2), two.expects_exact_result))[0]
    layout = replace(OUTCOME, metrics=OUTCOME.metrics | {"batch/padding": 0.9})
    assert judge_replay(two, compare_outcomes(OUTCOME, layout, two.expects_exact_result)) == (
        True,
        "bit for bit equal: 5 of 5",
    )
    asked = prepared(float64=True, result_changing_overrides=["algorithm.gamma=0.9"])
    assert judge_replay(asked, compare_outcomes(OUTCOME, with_loss(1.0), asked.expects_exact_result)) == (
        True,
        "in float64, with algorithm.gamma=0.9: the largest difference is 5.0e-01, in actor/loss",
    )


def test_a_recorded_error_must_occur_again(capsys: pytest.CaptureFixture[str]) -> None:
    bad = LearningOutcome({}, {}, {}, "the policy worker of rank 0: the gradient norm is nan")
    same = LearningOutcome({}, {}, {}, "the gradient norm is nan")
    assert print_and_check_comparison(prepared(bad), same)
    assert not print_and_check_comparison(prepared(bad), OUTCOME)
    assert print_and_check_comparison(prepared(bad, float64=True), OUTCOME)  # so it was numerical
    assert not print_and_check_comparison(prepared(), same)
    assert "recorded: a complete step\nreplayed: the gradient norm is nan" in capsys.readouterr().out
    assert print_and_check_comparison(prepared(None), OUTCOME)
    assert "recorded: the run ended before there was an outcome" in capsys.readouterr().out


def test_pictures_are_stored_once_and_read_as_shared_objects(tmp_path: Path) -> None:
    tensors = {"pixel_values": np.arange(6, dtype=np.float32).reshape(2, 3), "image_grid_thw": np.array([[1, 1, 2]])}
    image = ImageInput(tensors, [5, 5], 5, "digest", (1, 2))
    recorded_group = make_group()
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
