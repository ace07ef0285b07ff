from __future__ import annotations

import math

import pytest

from alphaapollo.observability.sample_metrics import convert_to_sample_result, read_sample_result
from alphaapollo.runs.rollout_log import make_trajectory_record
from alphaapollo.trainer.step.collect import get_metric_value, has_metric_variance
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Score
from tests.matrices import pad
from tests.unit.trainer.samples import build, group, played

PROMPT = Prompt(0, "game", "go")


def test_step_rewards_are_part_of_the_reward_everywhere() -> None:
    """Two episodes with step rewards only."""
    rich, poor = played([0.5, 0.25], Score(0.0)), played([0.0, 0.25], Score(0.0), sample=1)
    both = group(rich, poor)
    assert (rich.reward, rich.accuracy) == (0.75, None) and played([0.5, 0.5], Score(0.0)).accuracy is None
    assert has_metric_variance(both, "reward")
    result = convert_to_sample_result(PROMPT, rich)
    assert result.reward == 0.75 and math.isnan(result.accuracy)
    assert read_sample_result(make_trajectory_record(1, PROMPT, rich)).reward == 0.75
    batch = build([both])
    assert pad(batch.layout, batch.token_rewards).sum(-1).tolist() == [rich.reward, poor.reward]


def test_step_rewards_do_not_change_a_named_accuracy() -> None:
    won = played([-0.1, -0.1], Score(1.0, {"accuracy": 1.0}))
    assert (won.reward, won.accuracy) == (0.8, 1.0)
    assert get_metric_value(won, "accuracy") == 1.0


def test_a_failed_episode_has_no_value() -> None:
    failed = played([0.5], Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED))
    assert math.isnan(failed.reward)
    assert math.isnan(convert_to_sample_result(PROMPT, failed).accuracy)


def test_a_truncated_episode_has_zero_components() -> None:
    scored = played([0.0], Score(1.5, {"won": 1.0, "style": 0.5}))
    cut = played([0.0], Score(0.0, reason="no score before the token limit"), EpisodeEnd.TOKEN_LIMIT, 1)
    both = group(scored, cut)
    assert get_metric_value(cut, "won") == 0.0 and has_metric_variance(both, "won")
    components = build([both]).components
    assert {name: column.tolist() for name, column in components.items()} == {"won": [1.0, 0.0], "style": [0.5, 0.0]}


def test_a_missing_component_is_named() -> None:
    for metric in ("wun", "accuracy"):  # the reward is a sum
        with pytest.raises(ValueError, match=rf"metric='{metric}' .*: reward, won"):
            get_metric_value(played([0.0], Score(1.0, {"won": 1.0})), metric)
    assert math.isnan(Score(1.0, {"won": 1.0}).component("style"))
    assert math.isnan(Score(1.0).component("style"))


def test_the_overlong_penalty_counts_environment_tokens() -> None:
    """max_length 100: 4 sampled tokens and 2 x 3 between them are a response of 10."""
    long = played([0.0] * 4, Score(1.0))
    assert (long.num_tokens, long.response_length) == (4, 10)
    batch = build([group(long)], overlong_penalty={"enable": True, "cache": 95})
    assert batch.token_rewards.sum().item() == pytest.approx(1 - 5 / 95)
