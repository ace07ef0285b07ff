"""scripts/chaos on a run in one process: killed, its newest checkpoint spoiled, it ends as if nothing had been."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from scripts.chaos.rounds import WHOLE, Rounds
from scripts.chaos.scenes import Place, differences

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]


def test_killed_and_damaged_it_ends_as_undisturbed(tmp_path: Path) -> None:
    place = Place(tmp_path, "local")
    rounds = Rounds(place, random.Random(11), steps=6)
    rounds.undisturbed()
    rounds.damages(1)
    assert [harm.what for harm in rounds.harms] == ["damage"]
    assert rounds.problems == []
    whole, other = place.folder(WHOLE), tmp_path / "other"
    shutil.copytree(whole, other)
    assert differences(whole, other) == []
    spoil(other / "model/model.safetensors", b"", b"x")
    assert differences(whole, other) == ["the model"]
    spoil(other / "rollouts/step_000003.jsonl", b'"reward": ', b'"reward": 1')
    assert differences(whole, other) == ["rollouts", "the model"]
    spoil(other / "metrics.jsonl", b'"reward/mean": ', b'"reward/mean": 1')
    assert differences(whole, other) == ["metrics of step 1: reward/mean", "rollouts", "the model"]


def spoil(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
