import math
from dataclasses import replace

import numpy as np
import pytest

from alphaapollo.algorithms.advantages import Turns
from alphaapollo.rollout.token_context import build_row
from alphaapollo.trainer.step.turns import list_trained_turns, number_turns
from alphaapollo.types import Outcome, Score, Trajectory, Turn
from tests.builders import make_group, make_trajectory, make_turn
from tests.unit.trainer.samples import build, credit_of, matrix_of


def turn(context: list[int], length: int, reward: float = 0.0, **info) -> Turn:
    return make_turn(length, context, reward=reward, info=info)


def numbers_of(trajectories: list[Trajectory], group_ids: list[int]) -> Turns:
    """The turns of rows one after the other."""
    rows = [row for one in trajectories for row in one.rows]
    offsets = np.cumsum([0, *(len(row.token_ids) - row.response_start for row in rows)])
    mask = np.concatenate([row.action_mask[row.response_start :] for row in rows])
    return number_turns(list_trained_turns(trajectories, offsets), group_ids, mask)


def test_append_rows_with_anchors_from_context_tokens():
    one = make_trajectory(turn([7, 7], 2), turn([8], 1), turn([8], 1))
    two = make_trajectory(turn([7, 7], 1), turn([9], 2))
    turns = numbers_of([one, two], [0, 0])
    assert turns.turn_of_token.tolist() == [0, 0, -1, 1, -1, 2, 3, -1, 4, 4]
    assert turns.trajectory_ids.tolist() == [0, 0, 0, 1, 1]
    assert turns.anchor_ids.tolist() == [0, 1, 1, 0, 2]


def test_memory_rows_with_anchors_from_the_environment():
    """The same state is an anchor within its group only, for any prompt."""
    turns = [turn([7, 7], 2, state="0,0"), turn([7, 7, 5], 1, state="0,0")]
    played = [make_trajectory(*turns, memory=True) for _ in range(2)]
    numbered = numbers_of(played, [0, 1])
    assert numbered.turn_of_token.tolist() == [0, 0, 1, 2, 2, 3]
    assert numbered.anchor_ids.tolist() == [0, 0, 1, 1]


def agent_trajectory(reward: float, *rewards: float) -> Trajectory:
    """The answers 0 and 2 are one row, answer 1 of a sub-agent is another one, and answer 3 is not trained on."""
    turns = [turn([7], 1), turn([7], 2), turn([8], 1), turn([9], 1)]
    for one, number in zip(turns, (1, 0, 2, 3), strict=True):
        one.answer_number, one.reward = number, rewards[number]
    rows = [build_row(turns[:1]), build_row(turns[1:3], first_turn=1)]
    return replace(make_trajectory(*turns, score=reward), rows=rows)


def test_turns_of_agents_are_in_the_order_of_their_answers():
    turns = numbers_of([agent_trajectory(1.0, 0, 0, 0, 0)], [0])
    assert turns.turn_of_token.tolist() == [1, 0, 0, -1, 2]
    assert turns.trajectory_ids.tolist() == [0, 0, 0]


def test_later_rewards_of_agents_count_for_earlier_answers():
    """The reward of the untrained answer 3 and the score come after answer 2."""
    one, other = agent_trajectory(1.0, 0.1, 0.2, 0.3, 0.5), agent_trajectory(0.0, 0.0, 0.0, 0.0, 0.0)
    batch = build([make_group(one, other)])
    assert batch.scores.tolist() == [2.1, 0.0]
    assert one.reward == pytest.approx(2.1)
    matrix = matrix_of(batch, credit_of(batch, "turn_group"))
    assert matrix[:2].flatten().tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0, 2.1, 2.1, 0.0, 1.8])


@pytest.mark.parametrize("memory", [False, True])
def test_step_rewards_of_an_environment_reach_their_turns(memory: bool):
    """The final score is a reward of the last turn."""
    won = make_trajectory(turn([7], 2, 0.25), turn([8], 1, -0.5), memory=memory)
    batch = build([make_group(won, make_trajectory(1, score=0.0, memory=memory))])
    matrix = matrix_of(batch, credit_of(batch, "turn_group"))
    assert matrix[matrix != 0].tolist() == pytest.approx([0.75, 0.75, 0.5, -0.75])


def test_a_failed_trajectory_is_no_baseline():
    failed = make_trajectory(1, score=Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED))
    batch = build([make_group(make_trajectory(1), failed, make_trajectory(1, score=0.0))])
    assert matrix_of(batch, credit_of(batch, "turn_group")).flatten().tolist() == [1.0, -1.0]


def test_from_trajectories_to_columns():
    """Two samples of a group: from the same start, one wins in its second turn, which has no counterpart."""
    won = make_trajectory(turn([7], 1, state="start"), turn([8], 1, state="near"))
    lost = make_trajectory(turn([7], 1, state="start"), score=0.0)
    batch = build([make_group(won, lost)])
    matrix = matrix_of(batch, credit_of(batch, "gigpo", gamma=0.5, norm_adv_by_std_in_grpo=False))
    # episodes +-0.5; from the start the returns are 0.5 and 0: +-0.25; "near" stands alone
    assert matrix.tolist() == [[0.75, 0.0, 0.5], [-0.75, 0.0, 0.0]]
