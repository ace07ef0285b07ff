"""Data, tests and configurations of examples/code agree."""

import random
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.plugins.code_grader.grader import grade_code as grade
from alphaapollo.rewards.registry import check_prompts_are_gradable, get_grader
from alphaapollo.types import Outcome, Prompt
from examples.code import task
from examples.code.make_task import rl_rows
from examples.code.task import LIKED, LISTS, PHRASES, RIGHT, TAKE, Problem, held_out, lesson
from examples.task_files import draw_problems

EXAMPLE = Path(__file__).parents[3] / "examples" / "code"


def prompt_of(problem: Problem) -> Prompt:
    return Prompt(0, "code/lists", problem.question, problem.tests)


@pytest.mark.parametrize(("taken", "liked"), LIKED.items())
def test_right_function_passes_and_the_biased_one_fails(taken, liked):
    problem = Problem(taken, PHRASES[taken][0], "*", 12)
    assert grade(prompt_of(problem), problem.program(taken)).reward == 1.0
    wrong = grade(prompt_of(problem), problem.program(liked))
    assert (wrong.reward, wrong.outcome) == (0.0, Outcome.SCORED)


def test_tests_distinguish_all_six_functions():
    for values in LISTS:
        assert len({take(values) for take in TAKE.values()}) == len(TAKE) == len(PHRASES)


def test_nonsense_scores_zero():
    problem = Problem("sum(a)", "sum of a", "+", 10)
    for text in ("def f(a): return ", "sum(a)+10", "def f(a): return 33", "def f(a): return sum(a)+1"):
        assert grade(prompt_of(problem), text).reward == 0.0


def test_teacher_errors_only_follow_its_bias():
    rng, right = random.Random(0), {taken: [] for taken in PHRASES}
    taught = [
        (problem, lesson(problem, rng))
        for problem, _ in zip(draw_problems(task, rng, False), range(6000), strict=False)
    ]
    for problem, chat in taught:
        taken = problem.taken if chat[1]["content"] == problem.program(problem.taken) else LIKED[problem.taken]
        assert chat[1]["content"] == problem.program(taken)
        right[problem.taken].append(taken == problem.taken)
    for taken, said in right.items():
        assert sum(said) / len(said) == pytest.approx(RIGHT if taken in LIKED else 1.0, abs=0.06)
    assert not any(held_out(chat[0]["content"]) for _, chat in taught)


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
