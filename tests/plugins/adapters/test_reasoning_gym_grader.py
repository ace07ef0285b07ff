"""Rows that the package reasoning-gym wrote: question, answer and metadata, without the environment."""

import pytest

from alphaapollo.rewards.registry import check_prompts_are_gradable
from alphaapollo.types import Prompt

gym = pytest.importorskip("reasoning_gym")

from alphaapollo.plugins.adapters.reasoning_gym_grader import answer_reasoning_gym, grade_reasoning_gym  # noqa: E402


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "leg_counting", "spell_backward"])
def test_rows_of_the_package(task):
    entry = gym.create_dataset(task, size=1, seed=3)[0]
    prompt = Prompt(0, "reasoning_gym", entry["question"], entry["answer"], {"metadata": entry["metadata"]})
    assert grade_reasoning_gym(prompt, answer_reasoning_gym(prompt)).reward == 1.0
    assert grade_reasoning_gym(prompt, "<answer>neither</answer>").reward < 1.0


def test_rows_without_a_puzzle_are_refused():
    with pytest.raises(ValueError, match=r"row 7 has no puzzle.*metadata"):
        answer_reasoning_gym(Prompt(7, "reasoning_gym", "?", "5", {}))


def test_rows_need_a_ground_truth():
    check_prompts_are_gradable([Prompt(0, "reasoning_gym/chain_sum", "?", "5")])
    with pytest.raises(ValueError, match=r"1 of 1 prompts have no ground truth.* row 7"):
        check_prompts_are_gradable([Prompt(7, "reasoning_gym", "?")])
