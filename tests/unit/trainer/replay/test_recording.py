"""Recorded iterations on disk."""

from __future__ import annotations

import asyncio
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
from alphaapollo.runs.update_checks import read_checks
from alphaapollo.trainer.replay import record
from alphaapollo.trainer.replay.recording import (
    INPUTS,
    Outcome,
    RecordedInputs,
    RecordedSteps,
    read_recording,
    write_outcome,
)
from alphaapollo.types import ImageInput, Row, StopReason, TrajectoryGroup, Turn
from alphaapollo.utils.plugins import find_plugins
from tests.builders import make_completion
from tests.unit.config.test_plugins import site as site
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
    assert outcome["policy weights"] == ("00ff", 3.0)
    (found,), (one,) = inputs.groups[0].trajectories, full_group().trajectories
    assert ([*found.rows[0].token_ids], [*found.rows[0].logprobs]) == ([7, 8, 4], [0, 0, -1 / 3])
    assert found.rows[0].response_start == 2 and found.score == one.score and found.end is one.end
    assert found.rows[0].columns["routed_experts"].dtype == np.uint16
    assert found.rows[0].columns["routed_experts"].tolist() == one.rows[0].columns["routed_experts"].tolist()
    assert found.turns[0].text == "half ? of one" and found.turns[0].completion.stop_reason is StopReason.LENGTH
    assert found.turns[0].info["seen"].tolist() == [0, 1] and found.turns[0].info["at"] == [1]
    assert found.turns[0].info["other"].startswith("<object"), "objects of other classes are written as text"
    assert inputs.groups[0].prompt.extra_info == {"length_budget": 8} and inputs.groups[0].baseline is not None


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = recorded(run / "recorded" / "step_000003", [full_group()])
    (folder / "manifest.json").unlink()
    for given in (tmp_path / "nothing", run, folder):
        with pytest.raises(ValueError, match=rf"^{given} is not a complete recording.*<run>/recorded/step_N"):
            read_recording(given)


@pytest.mark.parametrize("name", ["inputs.msgpack", "outcome/outcome.msgpack"])
def test_a_modified_file_is_named(tmp_path: Path, name: str) -> None:
    folder = recorded(tmp_path / "step_000003", [full_group()])
    (folder / name).write_bytes((folder / name).read_bytes()[:-2] + b"xx")
    with pytest.raises(ValueError, match=f"{Path(name).name} has changed"):
        read_recording(folder)


def test_a_package_checks_the_first_update(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"turns": find_plugins("recorded_updates")["turns"]}
    monkeypatch.setattr(record, "find_plugins", lambda group: checks)
    said: list[str] = []
    trainer = SimpleNamespace(folder=tmp_path, verify_first_iteration=True, record_steps=None)
    console = SimpleNamespace(notify=said.append, warn=lambda text: said.append(f"warning: {text}"))
    recorder: Any = record.Recorder(trainer, None)  # type: ignore[arg-type]
    run = SimpleNamespace(config=SimpleNamespace(trainer=trainer), console=console)
    for turns, text in ((1, "1 of 1 quantities agree"), (3, "warning: ")):
        recorded_group = full_group()
        recorded_group.trajectories[0].turns *= turns
        folder = recorded(tmp_path / f"turns_{turns}", [recorded_group])
        asyncio.run(recorder._verify(run, folder))
        assert text in said[-1]
        assert read_checks(tmp_path)[0].passed is not folder.exists()


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
