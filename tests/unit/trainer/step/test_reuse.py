from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.config.schema.data import Data
from alphaapollo.session.progress import Progress, RecentGroups
from alphaapollo.trainer.step.collect import CollectedGroups, add_recent_groups
from alphaapollo.types import Prompt, TrajectoryGroup
from tests.unit.trainer.samples import build, credit_of, group, matrix_of, trajectory


def rewarded(prompt_id: int, *rewards: float) -> TrajectoryGroup:
    own = [trajectory(sample, reward, 2) for sample, reward in enumerate(rewards)]
    return group(*own, prompt=Prompt(prompt_id, "test", "text"))


def take_recent_groups(progress: Progress, step: int, fresh: list[TrajectoryGroup], data: Data) -> CollectedGroups:
    run: Any = SimpleNamespace(progress=progress, config=Config(data=data))
    collected = add_recent_groups(run, step, CollectedGroups(fresh, fresh, 1))
    progress.recent = collected.recent
    return collected


def settings(groups: int = 2, max_age: int = 2) -> Data:
    return Data.model_validate({"reuse": {"groups": groups, "max_age": max_age}})


def test_groups_are_reused_until_they_are_too_old() -> None:
    progress, data = Progress(), settings(groups=9)
    reused = []
    for step in range(1, 6):
        fresh = [rewarded(step, 1, 0), rewarded(10 * step, 1, 1)] if step < 4 else []  # equal rewards: not kept
        collected = take_recent_groups(progress, step, fresh, data)
        reused.append([one.prompt.id for one in collected.reused])
        assert collected.metrics["reuse/groups"] == len(collected.reused)
    assert reused == [[], [1], [1, 2], [2, 3], [3]]
    assert collected.metrics == {"reuse/groups": 1.0, "reuse/age": 2.0}


def test_a_resumed_run_reuses_the_same_groups(tmp_path: Path) -> None:
    progress, data = Progress(), settings()
    take_recent_groups(progress, 1, [rewarded(number, number / 10, 0.0) for number in range(1, 9)], data)
    progress.write(tmp_path)
    resumed, copied = Progress.read(tmp_path), deepcopy(progress)
    assert [step for step, _ in resumed.recent.entries] == [1] * 8
    chosen = [take_recent_groups(one, 2, [], data).reused for one in (progress, resumed, copied)]
    assert [[one.prompt.id for one in groups] for groups in chosen[1:]] == [[one.prompt.id for one in chosen[0]]] * 2
    for kept, read in zip(*chosen[:2], strict=True):
        for one, other in zip(kept.trajectories, read.trajectories, strict=True):
            assert ([*one.rows[0].logprobs], one.reward) == ([*other.rows[0].logprobs], other.reward)
    assert take_recent_groups(copied, 3, [], settings(groups=0)) == CollectedGroups([], [], 1)
    for _, old in resumed.recent.entries[:7]:
        old.trajectories[1].rows[0].temperature = 0.5  # sampled before the run resumed with another temperature
    assert len(take_recent_groups(resumed, 3, [], data).reused) == 1


def test_a_reused_group_keeps_its_own_baseline() -> None:
    """A reused group of the same prompt does not change the fresh one, and has the advantages of its own rewards."""
    fresh, old = rewarded(3, 1, 0), rewarded(3, 5, 1)
    alone, both = build([fresh]), build([fresh, old])
    advantages = [matrix_of(one, credit_of(one, "dr_grpo"))[:, 0].tolist() for one in (alone, both)]
    assert advantages == [[0.5, -0.5], [0.5, -0.5, 2.0, -2.0]]


def test_reused_groups_are_part_of_an_update() -> None:
    """Which estimators and corrections reuse needs: tests/unit/trainer/setup/test_combinations.py."""
    config = Config.model_validate({"data": {"reuse": {"groups": 2}}, "env": {"rollout": {"n": 2}}})
    assert config.trajectories_per_update == 34 * 2


@pytest.mark.parametrize("name", ["recent_groups.msgpack", "progress.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    Progress(recent=RecentGroups(((1, rewarded(1, 0.0, 1.0)),)), sampling={"z": [0.5, 2.0]}).write(tmp_path)
    assert Progress.read(tmp_path).sampling == {"z": [0.5, 2.0]}
    (tmp_path / name).write_bytes(b'{"step": 1, "other": 2}')
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        Progress.read(tmp_path)
