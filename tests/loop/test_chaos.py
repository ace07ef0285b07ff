"""scripts/chaos in one process: a run that is killed and has a damaged checkpoint ends with the same results.

test_deaths.py shows the same on runs forked from the warm process, and that `differences` finds other results.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scripts.chaos.campaign import FaultCampaign
from scripts.chaos.scenes import SceneFolders


@pytest.mark.nightly
def test_killed_and_damaged_run_equals_undisturbed_run(tmp_path: Path) -> None:
    campaign = FaultCampaign(SceneFolders(tmp_path, "local"), random.Random(11), steps=6)
    campaign.undisturbed()
    campaign.damages(1)
    assert [fault.kind for fault in campaign.faults] == ["damage"]
    assert campaign.problems == []
