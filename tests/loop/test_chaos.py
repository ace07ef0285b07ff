"""scripts/chaos in one process: a run that is killed and has a damaged checkpoint ends with the same results."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from scripts.chaos.campaign import UNDISTURBED, FaultCampaign
from scripts.chaos.scenes import SceneFolders, differences


def test_killed_and_damaged_run_equals_undisturbed_run(tmp_path: Path) -> None:
    folders = SceneFolders(tmp_path, "local")
    campaign = FaultCampaign(folders, random.Random(11), steps=6)
    campaign.undisturbed()
    campaign.damages(1)
    assert [fault.kind for fault in campaign.faults] == ["damage"]
    assert campaign.problems == []
    whole, other = folders.folder(UNDISTURBED), tmp_path / "other"
    shutil.copytree(whole, other)
    assert differences(whole, other) == []
    replace_bytes(other / "model/model.safetensors", b"", b"x")
    assert differences(whole, other) == ["the model"]
    replace_bytes(other / "rollouts/step_000003.jsonl", b'"reward": ', b'"reward": 1')
    assert differences(whole, other) == ["rollouts", "the model"]
    replace_bytes(other / "metrics.jsonl", b'"critic/score/mean": ', b'"critic/score/mean": 1')
    assert differences(whole, other) == ["metrics of step 1: critic/score/mean", "rollouts", "the model"]


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
