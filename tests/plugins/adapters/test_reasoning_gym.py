import ast
import asyncio
from pathlib import Path
from random import Random

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.plugins.adapters.reasoning_gym import list_tasks
from alphaapollo.rewards.base import convert_to_score
from alphaapollo.types import Outcome, Prompt, Score
from tests.unit.environments.episode_helpers import WORDS, make, row

gym = pytest.importorskip("reasoning_gym")

from alphaapollo.plugins.adapters.reasoning_gym_grader import (  # noqa: E402
    EVAL_MODULES,
    SYMPY_TASKS,
    grade_reasoning_gym,
)

NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # have several correct answers
SLOW = {"sokoban"}


async def score(prompt: Prompt, text: str) -> Score:
    return convert_to_score(grade_reasoning_gym(prompt, text))


def env(*tasks: str, prompt: str = "", **settings) -> Env:
    return Env(env_name="reasoning_gym", prompt=prompt, reasoning_gym={"tasks": list(tasks), **settings})


def answered(config: Env, prompt: Prompt, text: str | None = None):
    """(question, puzzle, result) for a text; default: the correct answer."""
    environment = make(config, score)
    asked = environment.reset(prompt).messages[0]["content"]
    puzzle = environment._prompt.extra_info["reasoning_gym"]
    text = f"<answer>{puzzle['entry']['answer']}</answer>" if text is None else text
    return asked, puzzle, asyncio.run(environment.step(text))


def test_every_task():
    rng = Random(0)
    texts = [word for word in WORDS if "9**9" not in word]  # an answer that hangs needs a grader process
    names = list_tasks(None)
    assert len(names) > 100
    for task in names:
        if task in SLOW:
            continue
        asked, puzzle, result = answered(env(task), row())
        assert puzzle["entry"]["question"] in asked and asked.endswith("in <answer>...</answer>.")
        assert result.done and result.valid and result.info == {"task": task}
        assert (result.score.reward == 1.0) == (task not in NO_ORACLE), task
        for _ in range(3):
            nonsense = "".join(rng.choice(texts) for _ in range(rng.randrange(1, 4)))
            for text in (nonsense, f"<answer>{nonsense}</answer>"):
                _, _, result = answered(env(task), row(), text)
                assert result.done and 0.0 <= result.score.reward <= 1.0 and not result.score.outcome.failed, task


def test_puzzle_depends_on_the_row():
    config = env("chain_sum")
    questions = [answered(config, row(id))[0] for id in (0, 0, 1, 2)]
    assert questions[0] == questions[1] and len(set(questions)) == 3
    assert answered(config, row(0, seed=5))[0] != answered(config, row(0, seed=6))[0]


def test_text_after_the_answer_is_cut():
    _, puzzle, result = answered(env("chain_sum"), row(), "no tag")
    assert (result.valid, result.score.outcome, result.score.reward) == (False, Outcome.WRONG_FORMAT, 0.0)
    text = f"<think><answer>1</answer></think><answer>{puzzle['entry']['answer']}</answer>"
    _, _, result = answered(env("chain_sum"), row(), text + " or <answer>0</answer>")
    assert result.score == Score(1.0, {"accuracy": 1.0}) and result.kept_chars == len(text)


def test_answer_that_the_scorer_cannot_read():
    _, _, result = answered(env("prime_factorization"), row(), "<answer>two \u00d7 three</answer>")
    assert (result.score.outcome, result.score.reward) == (Outcome.WRONG_FORMAT, 0.0)
    assert all(fact in result.score.reason for fact in ("prime_factorization", "ValueError"))
    broken = make(env("prime_factorization"), score)
    broken.reset(row())
    broken._prompt.extra_info["reasoning_gym"]["entry"] = {"answer": "?"}  # the scorer cannot read the correct answer
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(broken.step("<answer>2</answer>"))


def test_settings_levels_and_row_values():
    settings = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    asked, puzzle, _ = answered(env("chain_sum", settings=settings, prompt="{question}"), row())
    assert asked == puzzle["entry"]["question"] and puzzle["entry"]["metadata"]["num_terms"] == 2
    terms = [
        answered(env("chain_sum", level=level), row())[1]["entry"]["metadata"]["difficulty"]["num_terms"]
        for level in (0, 4)
    ]
    assert terms == [(2, 2), (2, 6)]  # the package's curriculum: from the easiest up to the level
    at_level = answered(env("chain_sum", level=4, settings={"chain_sum": {"max_terms": 9}}), row())[1]
    assert at_level["entry"]["metadata"]["difficulty"]["num_terms"] == (2, 9)
    own = answered(env("chain_sum", level=4), row(task="leg_counting", level=1))[1]
    assert (own["task"], own["level"]) == ("leg_counting", 1)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (env(), r"env\.reasoning_gym\.tasks is empty"),
        (env("chain_sums"), "'chain_sums'. Did you mean 'chain_sum'"),
        (env("chain_sum", settings={"sum": {}}), "unknown task 'sum'"),
        (env("chain_sum", settings={"chain_sum": {"terms": 2}}), r"'chain_sum' .*\{'terms': 2\}"),
        (env("chain_sum", settings={"chain_sum": {"max_terms": 1}}), "max_terms must be >= min_terms"),
        (env("acre", level=1), "'acre' .* level 1"),
        (env("survo", level=2), "'survo' .* level 2 .* max_empty must be <= 9"),
    ],
)
def test_invalid_tasks(config, fact):
    with pytest.raises(ValueError, match=fact):
        check_environment(config)


ATTACKS = [
    "__import__('pathlib').Path('{path}').touch()",
    "[__import__('pathlib').Path('{path}').touch()]",
    "exec(chr(111))",
    "x.func",
    "().__class__",
    "open('{path}', 'w')",
]


@pytest.mark.parametrize("task", [*sorted(SYMPY_TASKS), *(name.split(".")[1] for name in EVAL_MODULES)])
def test_answers_are_not_executed(task: str, tmp_path: Path):
    victim = tmp_path / "touched"
    for attack in ATTACKS:
        _, _, result = answered(env(task), row(), f"<answer>{attack.replace('{path}', str(victim))}</answer>")
        assert result.score.reward < 0.1
    assert not victim.exists()


def test_list_of_scorers_that_evaluate_is_complete():
    """Searches the package's source, to notice new releases that evaluate answers in other tasks."""
    folder = Path(gym.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "score_answer":
                calls = {ast.unparse(call.func).split(".")[-1] for call in ast.walk(node) if isinstance(call, ast.Call)}
                if calls & {"eval", "exec", "parse_expr", "sympify", "compile"}:
                    found.add(path.stem)
    evaluating = {name.split(".")[1] for name in EVAL_MODULES}
    assert found == SYMPY_TASKS | evaluating | {"number_sorting"}  # evaluates its own answer, not the model's
