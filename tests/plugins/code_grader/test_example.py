"""Data, tests and configurations of examples/code agree."""

import random
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.plugins.code_grader.grader import grade_code as grade
from alphaapollo.rewards.registry import check_prompts_are_gradable, get_grader
from alphaapollo.types import Outcome, Prompt
from examples.code.make_task import rl_rows
from examples.code.task import LIKED, PHRASES, Problem, held_out

EXAMPLE = Path(__file__).parents[3] / "examples" / "code"


def prompt_of(problem: Problem) -> Prompt:
    return Prompt(0, "code/lists", problem.question, problem.tests)


@pytest.mark.parametrize(("taken", "liked"), LIKED.items())
def test_right_function_passes_and_the_biased_one_fails(taken, liked):
    problem = Problem(taken, PHRASES[taken][0], "*", 12)
    assert grade(prompt_of(problem), problem.program(taken)).reward == 1.0
    wrong = grade(prompt_of(problem), problem.program(liked))
    assert (wrong.reward, wrong.outcome) == (0.0, Outcome.SCORED)


def test_the_rows_are_graded_by_the_code_grader():
    rows = rl_rows(random.Random("held out"), "val", 50)
    assert get_grader(rows[0]["data_source"]) == "code"
    assert all(held_out(row["prompt"][0]["content"]) for row in rows)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    check_prompts_are_gradable([Prompt(id, "code/lists", "?", truth) for id, truth in enumerate(truths)])


def test_the_configurations_work():
    ppo = load_config(Config, "ppo", ["--config-dir", str(EXAMPLE), "--config-name", "grpo"])
    sft = load_config(SftConfig, "sft", ["--config-dir", str(EXAMPLE), "--config-name", "sft"])
    assert ppo.trainer.project_name == sft.trainer.project_name == "code"
    assert ppo.env.env_name == "single_turn"
