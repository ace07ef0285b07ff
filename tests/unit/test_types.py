import math
import pickle
from array import array

import numpy as np
import pytest

from alphaapollo.batching.batch import Rows
from alphaapollo.observability.sample_metrics import convert_to_sample_result, read_sample_result
from alphaapollo.rollout.episode import mark_limit
from alphaapollo.runs.rollout_log import format_trajectory_lines, make_trajectory_record
from alphaapollo.trainer.step.collect import has_metric_variance
from alphaapollo.trainer.step.curriculum import measure_pass_rate
from alphaapollo.types import (
    LONGER_PROMPT,
    Completion,
    EpisodeEnd,
    Outcome,
    Prompt,
    Row,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from tests.builders import make_group, make_trajectory, make_turn

LOGPROBS = [-0.1, float(np.float32(-0.1)), -1e-30]


@pytest.fixture
def group() -> TrajectoryGroup:
    experts = np.ones((4, 1, 2), dtype=np.uint8)
    completion = Completion([7, 150_000, 9], LOGPROBS, StopReason.STOP, 4, 2, ((3, 1),), {"routed_experts": experts})
    turn = Turn([1, 2], completion, "14", 0.5, False, {"state": "s"}, [{"role": "tool", "content": "24"}])
    tokens, versions = ([1, 2, 7, 150_000, 9], [0, 0, 1, 1, 1], [0.0, 0.0, *LOGPROBS]), completion.weight_versions
    row = Row(*tokens, [4], 1, versions, (), {"routed_experts": experts, LONGER_PROMPT: [1, 2, 3]})
    score = Score(1.0, {"accuracy": 1.0})
    return TrajectoryGroup(Prompt(17, "x", "7+7=?"), [Trajectory(17, 0, [turn], [row], score, EpisodeEnd.DONE)])


def test_tokens_travel_as_arrays_of_the_same_numbers(group: TrajectoryGroup):
    (sent,), (came,) = group.trajectories, pickle.loads(pickle.dumps(group)).trajectories
    assert [type(one) for one in (came.rows[0].token_ids, came.turns[0].completion.logprobs)] == [array, array]
    for ours, theirs in [
        (sent.rows[0], came.rows[0]),
        (sent.turns[0], came.turns[0]),
        (sent.turns[0].completion, came.turns[0].completion),
    ]:
        for name, value in vars_of(ours).items():
            if name == "columns":
                np.testing.assert_equal(vars_of(theirs)[name], value)
            elif name != "completion":
                assert np.array_equal(vars_of(theirs)[name], value), name
    assert (came.score, came.end, came.num_tokens, came.prompt_lengths) == (sent.score, sent.end, 3, [2])
    assert sum(came.turns[0].completion.logprobs) == sum(LOGPROBS)
    assert vars(came.turns[0].completion)["logprob_sum"] == pytest.approx(sum(LOGPROBS)), "sent with the log-probs"


def vars_of(item: object) -> dict[str, object]:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}  # type: ignore[attr-defined]


def test_what_travelled_makes_the_same_batch_and_the_same_log(group: TrajectoryGroup):
    came = pickle.loads(pickle.dumps(group))
    ours, theirs = (Rows.from_rows(one.trajectories[0].rows) for one in (group, came))
    np.testing.assert_equal(vars(ours), vars(theirs))
    assert list(format_trajectory_lines(1, [came])) == list(format_trajectory_lines(1, [group]))


LIMIT = {"is_limit": True}
ACCURACIES = [  # score, rewards of turns, accuracy
    (Score(0.0), [0.0], 0.0),
    (Score(1.0), [], 1.0),
    (Score(0.0), [1.0], None),  # a sum of step rewards is not the accuracy
    (Score(1.0), [-0.5, -0.5], None),
    (Score(0.0, {"accuracy": 1.0}), [0.25], 1.0),
    (Score(0.0, **LIMIT), [1.0], 0.0),
    (Score(-0.5, {"format": 0.0}, **LIMIT), [0.25], 0.0),
    (Score(0.0, {"accuracy": 1.0}, **LIMIT), [0.25], 1.0),
    (Score(1.0, accuracy=None), [], None),
    (Score(math.nan, outcome=Outcome.GRADER_FAILED, **LIMIT), [], None),
]


@pytest.mark.parametrize(("score", "rewards", "accuracy"), ACCURACIES)
def test_accuracy_of_an_episode(score: Score, rewards: list[float], accuracy: float | None):
    trajectory = make_trajectory(*(make_turn(1, reward=reward) for reward in rewards), score=score)
    assert trajectory.accuracy == accuracy
    result = convert_to_sample_result(Prompt(0, "a", "b"), trajectory)
    assert np.isnan(result.accuracy) if accuracy is None else result.accuracy == accuracy
    record = make_trajectory_record(1, Prompt(0, "a", "b"), trajectory)
    again = read_sample_result(record)
    np.testing.assert_equal((again.accuracy, again.reward), (result.accuracy, result.reward))


def test_a_marked_score_keeps_an_unknown_accuracy():
    """E.g. that of an environment's own score_at_limit."""
    assert mark_limit(Score(0.5, is_limit=True, accuracy=None)).accuracy is None
    assert mark_limit(Score(0.5, accuracy=None)).accuracy == 0


def test_a_limit_is_wrong_for_filters_and_curricula():
    right = make_trajectory(make_turn(1, reward=0.25), score=1.0)
    limit = make_trajectory(make_turn(1, reward=0.25), score=mark_limit(Score(0.0)), end=EpisodeEnd.TURN_LIMIT)
    group = make_group(right, limit)
    assert has_metric_variance(group, "accuracy") and measure_pass_rate(group) == 0.5
