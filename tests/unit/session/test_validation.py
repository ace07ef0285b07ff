import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from alphaapollo.config.schema import ValSampling
from alphaapollo.observability.console import Console
from alphaapollo.observability.sample_metrics import SampleResult
from alphaapollo.session.validation import compute_group_metrics, compute_val_metrics, validate
from alphaapollo.types import GroupRequest, Outcome, Prompt, Score, Trajectory, TrajectoryGroup
from tests.builders import make_trajectory, make_turn

PROMPTS = [Prompt(0, "a", "1+1=", "2"), Prompt(1, "b", "2+2=", "4"), Prompt(2, "b", "3+3=", "6")]


class Engines:
    """Engines that answer sample s with the number s, and fail to grade sample 3 of prompt 2."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        self.requests += requests
        for index, request in reversed(list(enumerate(requests))):
            own = [self._play(request.prompt, sample) for sample in range(request.num_samples)]
            yield index, TrajectoryGroup(request.prompt, own)

    def _play(self, prompt: Prompt, sample: int) -> Trajectory:
        failed = (prompt.id, sample) == (2, 3)
        accuracy = float(str(sample) == prompt.ground_truth)
        score = Score(2 * accuracy, {"accuracy": accuracy})
        if failed:
            score = Score(math.nan, outcome=Outcome.GRADER_FAILED)
        turn = make_turn(sample + 1, text=str(sample))
        return make_trajectory(turn, score=score, sample=sample, prompt_id=prompt.id)


def run(settings: ValSampling, reward: Any = None) -> tuple[dict[str, float], Engines]:
    engines: Any = Engines()
    validation = asyncio.run(validate(engines, PROMPTS, settings, 9, 5, Console(), reward))
    assert [group.prompt.id for group in validation.groups[""]] == [0, 1, 2]
    assert validation.accuracy == validation.metrics["val/accuracy"]
    return validation.metrics, engines


def test_one_sample_has_the_plain_figures_alone() -> None:
    metrics, engines = run(ValSampling())
    assert metrics["val/accuracy"] == 0.0 and metrics["val/response_length"] == 1.0 and metrics["val/failed"] == 0
    names = ("accuracy", "reward", "response_length", "failed")
    assert set(metrics) == {f"val/{source}{name}" for source in ("", "a/", "b/") for name in names}
    assert all(one.validate and one.stream_position == 0 and one.sampling.seed == 5 for one in engines.requests)


def test_several_samples_also_have_pass_at_k_and_the_majority() -> None:
    metrics, _ = run(ValSampling(n=5, greedy=True))
    expected = {
        "val/failed": 1 / 15,
        "val/accuracy": (1 / 5 + 1 / 5 + 0 / 4) / 3,
        "val/reward": 2 * (1 / 5 + 1 / 5) / 3,
        "val/response_length": 3.0,
        "val/pass@1": (1 / 5 + 1 / 5) / 3,
        "val/pass@2": (2 / 5 + 2 / 5) / 3,
        "val/pass@4": (4 / 5 + 4 / 5) / 3,
        "val/maj@5": (1 / 5 + 1 / 5) / 3,  # every answer has one vote
        "val/b/pass@4": (4 / 5 + 0) / 2,
        "val/b/failed": 1 / 10,
        "val/accuracy_greedy": 0.0,
        "val/failed_greedy": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "val/pass@5" not in metrics and "val/pass@1_greedy" not in metrics


class OneMore:
    """Reward model that adds 1 to every trajectory and has truncated a quarter of the texts."""

    async def score_groups(self, groups: Sequence[TrajectoryGroup]) -> None:
        for trajectory in (one for group in groups for one in group.trajectories):
            trajectory.score = replace(trajectory.score, reward=trajectory.score.reward + 1)

    def pop_metrics(self) -> dict[str, float]:
        return {"reward_model/truncated": 0.25}


def test_a_reward_model_scores_the_validation_too() -> None:
    plain, _ = run(ValSampling(n=5, greedy=True))
    metrics, _ = run(ValSampling(n=5, greedy=True), OneMore())
    assert metrics["val/reward"] == pytest.approx(plain["val/reward"] + 1)
    assert metrics["val/accuracy"] == plain["val/accuracy"]
    assert metrics["val/reward_model/truncated"] == metrics["val/reward_model/truncated_greedy"] == 0.25


def test_components_are_logged_and_unknown_accuracies_are_not() -> None:
    parts = [[{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0}], [{"a": 1.0}, {"a": 1.0}]]
    groups = [
        TrajectoryGroup(
            replace(PROMPTS[0], id=prompt),
            [make_trajectory(3, score=Score(sum(one.values()), one), sample=at) for at, one in enumerate(own)],
        )
        for prompt, own in enumerate(parts)
    ]
    assert compute_group_metrics(groups, "_greedy") == {
        "val/failed_greedy": 0.0,
        "val/reward_greedy": (1.25 + 1) / 2,
        "val/response_length_greedy": 3.0,
        "val/component/a_greedy": (0.5 + 1) / 2,
        "val/component/b_greedy": 0.75,
    }


def test_what_fails_throughout_has_only_its_share() -> None:
    failed = [SampleResult(0, sample, "a", Outcome.GRADER_FAILED, math.nan, math.nan, None, 3) for sample in range(2)]
    assert compute_val_metrics(failed, "val/{}") == {"val/failed": 1.0}
