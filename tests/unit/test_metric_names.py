"""The catalogue of metrics and the code name the same metrics. tests/loop checks this for every complete run, too."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.page_commands import NEEDS_PLUGINS
from tests.unit.metric_names import documented, undocumented
from tests.unit.observability.test_rollout_metrics import credit, measured
from tests.unit.trainer.samples import group, trajectory

PACKAGE = Path(__file__).resolve().parents[2] / "alphaapollo"


@cache
def words() -> frozenset[str]:
    """Every piece of a string in the package that could be a part of a metric's name."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for text in re.findall(r"\"([^\"\n]*)\"", path.read_text(encoding="utf-8")):
            found |= set(re.findall(r"[a-z][a-z0-9_]*", text))
    return frozenset(found)


JOINED = ("", "length_", "rho_")  # what the code writes before a name of its own


@NEEDS_PLUGINS
@pytest.mark.parametrize("name", documented())
def test_what_is_documented_exists(name: str) -> None:
    for part in re.findall(r"[a-z][a-z0-9_]*", re.sub(r"<[^>]+>", "/", name)):
        said = {part.removeprefix(start).rstrip("_") for start in JOINED} | {part}
        assert said & words(), f"the catalogue has {name}, and nothing in the package says {part}"


def test_what_rollouts_and_batches_give_is_documented() -> None:
    samples = group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 3), baseline=trajectory(2, 0.0, 2))
    other = group(trajectory(0, 1.0, 2))
    names = {*measured(samples, other), *credit(samples.trajectories, overlong_penalty={"enable": True})}
    assert undocumented(names) == []


def test_an_unknown_name_is_found() -> None:
    names = ["critic/score/mean", "reward/meen", "step", "val/pass@8_greedy", "source/a/b/reward"]
    assert undocumented(names) == ["reward/meen"]
