import torch

from alphaapollo.rollout.context import build_append_context_rows, build_memory_context_rows
from alphaapollo.trainer.step.credit import assign_turn_numbers
from alphaapollo.types import Completion, EpisodeEnd, Prompt, Score, StopReason, Trajectory, TrajectoryGroup, Turn
from tests.unit.trainer.samples import build, credit_of, matrix_of


def turn(context: list[int], length: int, **info) -> Turn:
    return Turn(context, Completion([1] * length, [-0.1] * length, StopReason.STOP, 0), "text", info=info)


def trajectory(*turns: Turn, rows=build_append_context_rows, reward: float = 0.0) -> Trajectory:
    return Trajectory(0, 0, list(turns), rows(turns), Score(reward), EpisodeEnd.DONE)


def test_append_rows_with_anchors_from_context_tokens():
    one = trajectory(turn([7, 7], 2), turn([8], 1), turn([8], 1))
    two = trajectory(turn([7, 7], 1), turn([9], 2))
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 1, 1, 0, 0]])
    turns = assign_turn_numbers([one, two], torch.tensor([0, 0]), mask)
    assert turns.turn_of_token.tolist() == [[0, 0, -1, 1, -1, 2], [3, -1, 4, 4, -1, -1]]
    assert turns.trajectory_ids.tolist() == [0, 0, 0, 1, 1]
    assert turns.anchor_ids.tolist() == [0, 1, 1, 0, 2]


def test_memory_rows_with_anchors_from_the_environment():
    """The same state is an anchor within its group only, for any prompt."""
    turns = [turn([7, 7], 2, state="0,0"), turn([7, 7, 5], 1, state="0,0")]
    played = [trajectory(*turns, rows=build_memory_context_rows) for _ in range(2)]
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]])
    numbered = assign_turn_numbers(played, torch.tensor([0, 0, 1, 1]), mask)
    assert numbered.turn_of_token.tolist() == [[0, 0], [1, -1], [2, 2], [3, -1]]
    assert numbered.anchor_ids.tolist() == [0, 0, 1, 1]


def test_from_trajectories_to_columns():
    """Two samples of a group: from the same start, one wins in its second turn, which has no counterpart."""
    prompt = Prompt(0, "text", "text")
    won = trajectory(turn([7], 1, state="start"), turn([8], 1, state="near"), reward=1.0)
    lost = trajectory(turn([7], 1, state="start"))
    batch = build([TrajectoryGroup(prompt, [won, lost])])
    matrix = matrix_of(batch, credit_of(batch, "gigpo", gamma=0.5, norm_adv_by_std_in_grpo=False))
    # episodes +-0.5; from the start the returns are 0.5 and 0: +-0.25; "near" stands alone
    assert matrix.tolist() == [[0.75, 0.0, 0.5], [-0.75, 0.0, 0.0]]
