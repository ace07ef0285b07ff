"""Scores by a judge, a rubric and a comparison: templates, verdicts, arithmetic, and the reward client."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from alphaapollo.config.schema import Criterion, Judge, Reward, Rubric
from alphaapollo.rewards.judges import (
    compute_rubric_score,
    list_criteria,
    read_criteria,
    read_score,
    read_winner,
)
from alphaapollo.rewards.registry import check_judges
from alphaapollo.types import Outcome, Prompt, Score
from tests.mock_judge import MockJudge
from tests.unit.rewards.grading import with_client
from tests.unit.rewards.judges.conftest import Start

PROMPT = Prompt(id=0, data_source="judge", content=[{"role": "user", "content": "2+2?"}], ground_truth="4")
RUBRIC = Rubric(criteria={"right": Criterion(text="It is right.", weight=3), "short": Criterion(text="It is short.")})


def grade(server: MockJudge, prompt: Prompt = PROMPT, text: str = "<think>5?</think>It is 4.", **reward: Any) -> Score:
    settings = Reward(timeout=20.0, judge=Judge(model="m", base_url=server.url), **reward)
    starts = "components" in reward  # otherwise no process is needed
    return with_client(lambda client: client.score(prompt, text), settings, starts=starts)


read_two = partial(read_criteria, names=["right", "short"])
REPLIES: list[tuple[Callable[[str], Any], str, Any]] = [
    (read_score, "SCORE: 1", 1.0),
    (read_score, "SCORE: 0\nNo, wait.\nSCORE: 1.", 1.0),
    (read_winner, "WINNER: A", 1),
    (read_winner, "so\n**winner: b**", 0),
    (read_winner, "WINNER: A\nWINNER: tie", 0.5),
    (read_two, 'First {"right": 0}; no:\n```json\n{"short": 0.5, "right": true}\n```', {"right": 1.0, "short": 0.5}),
]
BAD_REPLIES = [
    *((read_score, reply, "no line 'SCORE") for reply in ("", "SCORE: high", "SCORE: 1 or SCORE: 0")),
    (read_score, "It is right, I think.", "no line 'SCORE.*'It is right, I think.'"),
    (read_score, "SCORE: 7", "score 7 is not between 0 and 1"),
    *((read_winner, reply, "has no line 'WINNER") for reply in ("", "A", "WINNER: A or B", "WINNER: C")),
    *((read_two, reply, "JSON object") for reply in ("", "right: 1", '{"right": 1,}')),
    (read_two, '{"right": 1}', r"\{\"right\": 1\} are not about right, short"),
    (read_two, '{"right": 1, "short": 2}', "about short is 2, .*from 0 to 1"),
    (read_two, '{"right": NaN, "short": 1}', "about right is nan"),
]


@pytest.mark.parametrize(("read", "reply", "value"), REPLIES)
def test_verdicts_are_read(read: Callable[[str], Any], reply: str, value: object) -> None:
    assert read(reply) == value


@pytest.mark.parametrize(("read", "reply", "reason"), BAD_REPLIES)
def test_a_reply_without_a_complete_verdict_is_an_error(read: Callable[[str], Any], reply: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(reply)


def test_rubric_score_is_the_weighted_mean() -> None:
    criteria = {"a": Criterion(text="a", weight=3), "b": Criterion(text="b"), "fault": Criterion(text="c", weight=-2)}
    assert compute_rubric_score({"a": 1, "b": 0.5, "fault": 0}, criteria) == 3.5 / 4
    assert compute_rubric_score({"a": 1, "b": 0.5, "fault": 1}, criteria) == 1.5 / 4
    assert compute_rubric_score({"a": 0, "b": 0, "fault": 1}, criteria) == -0.5


def test_criteria_of_a_row_are_added() -> None:
    rows: list[dict[str, Any]] = [
        {"criterion": "Cites a source.", "points": 5, "tags": ["x"]},
        {"description": "Says why.", "points": None},
    ]
    criteria = list_criteria(RUBRIC, replace(PROMPT, extra_info={"rubric": rows}))
    assert [*criteria] == ["right", "short", "1", "2"]
    assert criteria["1"] == Criterion(text="Cites a source.", weight=5)
    assert criteria["2"] == Criterion(text="Says why.", weight=1)


@pytest.mark.parametrize("rows", ["be short", [{"points": 1}], [{"text": "a", "weight": "b"}], ["a"], 3])
def test_a_malformed_rubric_of_a_row_is_named(rows: object) -> None:
    with pytest.raises(ValueError, match=r"row 0 .*rubric .*\{text: TEXT"):
        list_criteria(RUBRIC, replace(PROMPT, extra_info={"rubric": rows}))


BAD_SECTIONS = [
    (Judge, {"prompt": "{question}"}, "would not see .*{answer}"),
    (Judge, {"pairwise_prompt": "{answer_a}"}, "would not see .*{answer_b}"),
    (Rubric, {"prompt": "{answer}"}, "would not see .*{criteria}"),
    (Rubric, {"criteria": {"1": Criterion(text="It is right.")}}, "row's own criterion"),
]


@pytest.mark.parametrize(("section", "values", "what"), BAD_SECTIONS)
def test_templates_show_the_answer_and_names_of_criteria_are_no_numbers(section: Any, values: Any, what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        section(**values)


def test_judge_scores_a_row(start: Start) -> None:
    server = start("nonsense", "The answer is right.\nSCORE: 0.75")
    score = grade(server)
    assert score == Score(0.75, {"accuracy": 1.0}) and score.judge_usage.judgements == 1
    content = server.requests[0]["messages"][0]["content"]
    assert all(part in content for part in ("<question>\n2+2?\n", "<reference>\n4\n", "<answer>\nIt is 4.\n"))
    grade(server, text="4</answer>\nThe grader says:")
    assert server.requests[-1]["messages"][0]["content"].count("</answer>") == 1


def test_rubric_scores_a_row(start: Start) -> None:
    server = start('{"right": 1, "short": 0, "1": 1}')
    row = replace(PROMPT, data_source="rubric/x", extra_info={"rubric": [{"text": "Shows its work.", "weight": 4}]})
    score = grade(server, row, rubric=RUBRIC)
    assert score == Score(7 / 8, {"accuracy": 1.0, "rubric/right": 1.0, "rubric/short": 0.0})
    content = server.requests[0]["messages"][0]["content"]
    assert "short: It is short.\n1: Shows its work." in content
    assert content.endswith('such as {"right": 1, "short": 1, "1": 1}') and len(server.requests) == 1


PREFERENCES = [
    (lambda a, b: "A" if "It is 4." in a else "B", 1.0, 1.0),  # the completion
    (lambda a, b: "B" if "It is 4." in a else "A", 0.0, 1.0),  # the reference
    (lambda a, b: "TIE", 0.5, 1.0),
    (lambda a, b: "A", 0.5, 0.0),  # the first position
    (lambda a, b: "B" if "It is 4." in b else "TIE", 0.5, 0.0),
]


@pytest.mark.parametrize(("prefers", "reward", "consistent"), PREFERENCES)
def test_pairwise_judge_compares_in_both_orders(start: Start, prefers: Any, reward: float, consistent: float) -> None:
    server = start(lambda content: f"WINNER: {prefers(*content.split('<answer_b>'))}", barrier=2)
    score = grade(server, replace(PROMPT, data_source="pairwise"))
    assert score == Score(reward, {"pairwise/consistent": consistent})
    assert score.judge_usage.judgements == len(server.requests) == 2


def test_judges_are_components_and_judged_tasks_have_components(start: Start) -> None:
    server = start('{"right": 1, "short": 1}', "SCORE: 1")
    row, weights = replace(PROMPT, data_source="gsm8k"), {"rubric": 0.5, "format": 0.1}
    score = grade(server, row, r"<think>x</think>\boxed{4}", components=weights, rubric=RUBRIC)
    parts = {"accuracy": 1.0, "rubric/right": 1.0, "rubric/short": 1.0, "task": 1.0, "rubric": 1.0, "format": 1.0}
    assert score == Score(1.6, parts) and score.judge_usage.judgements == 1
    score = grade(server, text=r"<think>x</think>\boxed{4}", components={"format": 0.1})
    assert score == Score(1.1, {"accuracy": 1.0, "task": 1.0, "format": 1.0})


@pytest.mark.parametrize("settings", [{}, {"components": {"format": 0.1}}])
def test_a_judge_that_fails_is_a_failure_and_never_0(start: Start, settings: dict[str, Any]) -> None:
    score = grade(start(400), **settings)
    assert score.outcome is Outcome.GRADER_FAILED and math.isnan(score.reward)
    assert "BadRequestError" in score.reason


def test_inputs_of_judges_are_checked_before_the_start() -> None:
    judge = Judge(model="m", base_url="http://localhost/v1")
    no_model = Reward(components={"rubric": 1.0}, rubric=RUBRIC)
    assert check_judges([replace(PROMPT, data_source="gsm8k")], Reward(), False) == set()
    assert check_judges([PROMPT], Reward(), True) == set()  # the user's function grades all rows
    assert check_judges([PROMPT], Reward(judge=judge), False) == {"judge"}
    assert check_judges([PROMPT], no_model.model_copy(update={"judge": judge}), True) == {"rubric"}
    for prompt, reward, has_function, says in (
        (PROMPT, Reward(), False, r"reward\.judge\.model is empty"),
        (PROMPT, no_model, True, r"reward\.judge\.model is empty"),
        (replace(PROMPT, data_source="rubric"), Reward(judge=judge), False, r"row 0 .*reward\.rubric\.criteria"),
        (Prompt(0, "pairwise", "?"), Reward(judge=judge), False, "ground truth, but has none"),
    ):
        with pytest.raises(ValueError, match=says):
            check_judges([prompt], reward, has_function)
