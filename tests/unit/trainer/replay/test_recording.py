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
from alphaapollo.runs.group_files import write_values
from alphaapollo.trainer.replay.__main__ import main
from alphaapollo.trainer.replay.run import print_and_check_comparison
from alphaapollo.types import ImageInput, Row, StopReason, TrajectoryGroup, Turn
from alphaapollo.verification.recording import (
    INPUTS,
    Outcome,
    RecordedInputs,
    RecordedSteps,
    read_recording,
    write_outcome,
)
from tests.builders import make_completion
from tests.unit.trainer.samples import group, trajectory

INPUTS_OF_RUN = RecordedInputs(3, 10, 0.1, True, 16384, {"dtype": "float32"}, {"torch": "2"}, [])
OUTCOME: Outcome = {
    "advantages": np.array([0.5, -1.0], dtype=np.float32),
    "actor/loss": 0.1 + 0.2,
    "actor/grad_norm": 2.0,
    "critic/advantages/min": math.nan,
    "batch/padding": 0.5,
    "policy weights": ("00ff", 3.0),
}


def recorded(folder: Path, groups: list[TrajectoryGroup], outcome: Outcome = OUTCOME) -> Path:
    folder.mkdir(parents=True)
    write_values(folder / INPUTS, replace(INPUTS_OF_RUN, groups=groups))
    write_manifest(folder)
    if outcome:
        write_outcome(folder, outcome, RecordedSteps([[0]], [True]))
    return folder


def full_group() -> TrajectoryGroup:
    """All that a rollout worker may return: compact arrays, routed experts, invalid texts."""
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    given = {"earlier_version_token_counts": ((1, 1),), "columns": {"routed_experts": experts[:2]}}
    completion = make_completion([4], [-1 / 3], 2, StopReason.LENGTH, **given)
    turn = Turn(
        array("i", [7, 8]),
        completion,
        "half \ud800 of one",
        0.1,
        info={"seen": np.arange(2), "at": {1}, "other": object()},
    )
    row = Row(array("i", [7, 8, 4]), array("b", [0, 0, 1]), array("d", [0, 0, -1 / 3]), [2], 0, [(2, 1)])
    row.columns = {"routed_experts": experts}
    return group(
        replace(trajectory(0, 1.0, 1), turns=[turn], rows=[row]),
        baseline=trajectory(1, 0.5, 2),
        length_budget=np.int64(8),
    )


def test_a_recording_round_trips(tmp_path: Path) -> None:
    inputs, outcome = read_recording(recorded(tmp_path / "step_000003", [full_group()]))
    assert replace(inputs, groups=[]) == INPUTS_OF_RUN
    assert outcome["advantages"].tolist() == [0.5, -1.0]
    assert print_and_check_comparison(prepared(), outcome)
    (found,), (one,) = inputs.groups[0].trajectories, full_group().trajectories
    assert ([*found.rows[0].token_ids], [*found.rows[0].logprobs]) == ([7, 8, 4], [0, 0, -1 / 3])
    assert found.rows[0].response_start == 2 and found.score == one.score and found.end is one.end
    assert found.rows[0].columns["routed_experts"].dtype == np.uint16
    assert found.rows[0].columns["routed_experts"].tolist() == one.rows[0].columns["routed_experts"].tolist()
    assert found.turns[0].text == "half ? of one" and found.turns[0].completion.stop_reason is StopReason.LENGTH
    assert found.turns[0].info["seen"].tolist() == [0, 1] and found.turns[0].info["at"] == [1]
    assert found.turns[0].info["other"].startswith("<object"), "objects of other classes are written as text"
    assert inputs.groups[0].prompt.extra_info == {"length_budget": 8} and inputs.groups[0].baseline is not None


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


@pytest.mark.parametrize("name", ["inputs.msgpack", "outcome/outcome.msgpack"])
def test_a_modified_file_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "step_000003", [full_group()])
    (folder / name).write_bytes((folder / name).read_bytes()[:-2] + b"xx")
    assert f"{Path(name).name} has changed" in error_of(folder, capsys)


def prepared(outcome: Outcome = OUTCOME, **values: Any) -> Any:
    plan = SimpleNamespace(model=SimpleNamespace(dtype="float32"))
    given = {"changes": [], "causes": []} | values
    return SimpleNamespace(folder=Path("rec"), inputs=INPUTS_OF_RUN, recorded=outcome, plan=plan, **given)


def with_loss(change: float) -> Outcome:
    loss = OUTCOME["actor/loss"] * (1 + change)
    return OUTCOME | {"actor/loss": loss, "policy weights": ("00fe", 3.0 * (1 + change / 10))}


TWO_RANKS = {"causes": ["the run had 2 training ranks"]}
CHANGED = {"changes": ["in float64", "with algorithm.gamma=0.9"]}
OTHER_ADVANTAGES = OUTCOME | {"advantages": np.array([0.5, -1.5], np.float32)}
NO_ADVANTAGES = {name: value for name, value in OUTCOME.items() if name != "advantages"}


@pytest.mark.parametrize(
    ("outcome", "values", "is_equal", "facts"),
    [
        # an exact replay must be bit equal
        (OUTCOME, {}, True, ["bit for bit equal: 6 of 6"]),
        (with_loss(1e-6), {}, False, ["first difference is in actor/loss", "1.0e-06, in actor/loss"]),
        (OTHER_ADVANTAGES, {}, False, ["first difference is in advantages"]),
        (NO_ADVANTAGES, {}, False, ["inf, in advantages"]),
        # others have a tolerance
        (with_loss(1e-6), TWO_RANKS, True, ["equal within 0.001", "the run had 2 training ranks\n"]),
        (with_loss(1e-2), TWO_RANKS, False, []),
        (OUTCOME | {"batch/padding": 0.9}, TWO_RANKS, True, ["bit for bit equal: 5 of 5"]),
        (with_loss(1.0), CHANGED, True, ["float64", "algorithm.gamma=0.9", "5.0e-01, in actor/loss"]),
    ],
)
def test_verdict_of_a_replay(
    outcome: Outcome, values: Any, is_equal: bool, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_and_check_comparison(prepared(**values), outcome) == is_equal
    shown = capsys.readouterr().out
    assert all(fact in shown for fact in facts), shown


def test_a_run_that_ended_during_the_update_has_no_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_and_check_comparison(prepared({}), OUTCOME)
    assert "ended before there was an outcome" in capsys.readouterr().out


def test_images_of_a_group_are_stored_once(tmp_path: Path) -> None:
    tensors = {"pixel_values": np.arange(6, dtype=np.float32).reshape(2, 3), "image_grid_thw": np.array([[1, 1, 2]])}
    image = ImageInput(tensors, [5, 5], 5, "digest", (1, 2))
    recorded_group = full_group()
    for one in (*recorded_group.trajectories, recorded_group.baseline):
        one.turns[0].context_images, one.rows[0].images = (image,), (image,)
        one.turns[0].observation = [{"role": "user", "content": "<image>", "images": [b"\x89PNG"]}]
    (read,) = read_recording(recorded(tmp_path / "step_000003", [recorded_group]))[0].groups
    images = [one.rows[0].images[0] for one in (*read.trajectories, read.baseline)]
    images += [one.turns[0].context_images[0] for one in (*read.trajectories, read.baseline)]
    assert len({id(found.tensors["pixel_values"]) for found in images}) == 1
    assert images[0].digest == "digest" and images[0].grid == (1, 2) and images[0].token_ids == [5, 5]
    for name, values in tensors.items():
        assert images[0].tensors[name].dtype == values.dtype and np.array_equal(images[0].tensors[name], values)
    assert read.trajectories[0].turns[0].observation[0]["images"] == [b"\x89PNG"]
    assert image.tensors is tensors  # unchanged
