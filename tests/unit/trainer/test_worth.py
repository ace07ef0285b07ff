"""What weights were worth, and which checkpoint stays when a reward collapses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.worth import Worth, far_better, worth_of
from alphaapollo.types import TrajectoryGroup
from tests.unit.trainer.samples import group, trajectory
from tests.unit.trainer.test_saving import Case


def groups(version: int, *rewards: list[float]) -> list[TrajectoryGroup]:
    return [group(*(trajectory(n, reward, 1, version=version) for n, reward in enumerate(own))) for own in rewards]


def test_means_are_over_prompts_and_by_the_weights_that_played() -> None:
    """Means of the prompts 1, 0, .5, .5: mean .5, standard deviation sqrt(.5 / 3), over sqrt(4)."""
    played = groups(3, [1.0, 1.0], [0.0], [1.0, 0.0], [0.5]) + groups(4, [1.0], [1.0], [1.0])
    (own,) = worth_of(played).items()
    assert own == (3, Worth(0.5, pytest.approx((0.5 / 3) ** 0.5 / 2)))  # type: ignore[arg-type]


def test_far_better_is_by_a_fifth_and_by_more_than_chance() -> None:
    good, noisy = Worth(0.8, 0.02), Worth(0.8, 0.2)
    assert far_better({20: good, 40: Worth(0.5, 0.02), 59: Worth(0.1, 0.02)}, [20, 40]) == 20
    assert far_better({20: good, 39: Worth(0.7, 0.02)}, [20]) is None  # an eighth
    assert far_better({20: noisy, 39: Worth(0.3, 0.02)}, [20]) is None  # 2.5 standard errors
    assert far_better({20: Worth(-0.2, 0.01), 39: Worth(-0.9, 0.01)}, [20]) == 20
    assert far_better({20: Worth(0.1, 0.02), 39: Worth(0.8, 0.02)}, [20]) is None
    assert far_better({39: good}, [20]) is None and far_better({}, []) is None


def test_the_last_good_checkpoint_stays_while_the_reward_is_gone(tmp_path: Path) -> None:
    """Saved after every iteration. What iteration n plays with says what the weights after n - 1 are worth."""
    gone = {3, 4, 5, 6}  # iterations after which the weights are ruined

    async def main() -> None:
        case = Case(tmp_path)
        case.checkpoints.keep = 2
        case.policy.let.set()
        progress, kept = Progress(), []
        for step in range(1, 10):
            reward = 0.05 if step - 1 in gone else 0.8
            progress.note_rewards(groups(step - 1, *[[reward, reward + 0.01 * n] for n in range(8)]))
            progress.step = step
            await case.saving.save(progress)
            async with case.saving.settled():
                pass
            kept.append([int(name[-6:]) for name in case.whole])
            assert Progress.read(tmp_path / f"step_{step:06d}") == progress
        assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6], [2, 6, 7], [7, 8], [8, 9]]
        (told,) = case.notices
        assert told.startswith(
            "the checkpoint of iteration 2 stays beside the newest 2: its weights had a mean reward of"
        )
        assert f"trainer.resume_from_path={tmp_path / 'step_000002'}" in told

    asyncio.run(main())
