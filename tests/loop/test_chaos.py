"""scripts/chaos on runs in one process: killed and spoiled at random instants, they end as if nothing had been."""

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
    rounds.kills(1, ["driver"])
    rounds.damages(1)
    assert [harm.what for harm in rounds.harms] == ["kill", "damage"]
    assert rounds.problems == []
    whole, other = place.folder(WHOLE), tmp_path / "other"
    shutil.copytree(whole, other)
    assert differences(whole, other) == []
    for name in ("model/model.safetensors", "metrics.jsonl", "rollouts/step_000003.jsonl"):
        spoil(other / name)
    assert [found.split(":")[0] for found in differences(whole, other)] == [
        "metrics of step 6",
        "rollouts",
        "the model",
    ]


def spoil(path: Path) -> None:
    """Another last digit."""
    content = bytearray(path.read_bytes())
    place = max(place for place, byte in enumerate(content) if chr(byte).isdigit())
    content[place] ^= 1
    path.write_bytes(content)
