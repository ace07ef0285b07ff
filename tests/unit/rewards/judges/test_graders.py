"""Scores by a judge, a rubric and a comparison: templates, verdicts, arithmetic, and the reward client."""

from __future__ import annotations

import math
from dataclasses import replace
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


SCORES = {"SCORE: 1": 1.0, "score = .5": 0.5, "**SCORE: 0.0**": 0.0, "SCORE: 0\nNo, wait.\nSCORE: 1.": 1.0}
WINNERS = {"WINNER: A": 1, "so\n**winner: b**": 0, "WINNER: A\nWINNER: tie": 0.5}


def test_scores_and_winners_are_read() -> None:
    assert {reply: read_score(reply) for reply in SCORES} == SCORES
    assert {reply: read_winner(reply) for reply in WINNERS} == WINNERS


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "no line 'SCORE"),
        ("It is right, I think.", "no line 'SCORE.*'It is right, I think.'"),
        ("SCORE: high", "no line 'SCORE"),
        ("SCORE: 1 or SCORE: 0", "no line 'SCORE"),
        ("SCORE: 7", "score 7 is not between 0 and 1"),
        ("SCORE: -1", "score -1 is not between"),
    ],
)
def test_a_reply_without_score_is_an_error(reply: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_score(reply)


@pytest.mark.parametrize("reply", ["", "A", "WINNER: A or B", "WINNER: C"])
def test_a_reply_without_winner_is_an_error(reply: str) -> None:
    with pytest.raises(ValueError, match="has no line 'WINNER"):
        read_winner(reply)


def test_verdicts_of_criteria_are_read() -> None:
    reply = 'First {"right": 0}; no:\n```json\n{"short": 0.5, "right": true}\n```'
    assert read_criteria(reply, ["right", "short"]) == {"right": 1.0, "short": 0.5}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "JSON object"),
        ("right: 1", "JSON object"),
        ('{"right": 1,}', "JSON object"),
        ('{"right": 1}', r"\{\"right\": 1\} are not about right, short"),
        ('{"right": 1, "short": 1, "long": 0}', "are not about right, short"),
        ('{"right": 1, "short": 2}', "about short is 2, .*from 0 to 1"),
        ('{"right": "yes", "short": 1}', "about right is 'yes'"),
        ('{"right": NaN, "short": 1}', "about right is nan"),
    ],
)
def test_verdicts_must_be_complete_and_between_0_and_1(reply: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_criteria(reply, ["right", "short"])


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


@pytest.mark.parametrize(
    ("section", "values", "name"),
    [
        (Judge, {"prompt": "{question}"}, "answer"),
        (Judge, {"pairwise_prompt": "{answer_a}"}, "answer_b"),
        (Rubric, {"prompt": "{answer}"}, "criteria"),
    ],
)
def test_templates_must_show_the_answer(section: type[Judge], values: dict[str, str], name: str) -> None:
    with pytest.raises(ValidationError, match=rf"would not see .*{{{name}}}"):
        section(**values)


def test_names_of_criteria_differ_from_those_of_rows() -> None:
    with pytest.raises(ValidationError, match=r"row's own criterion"):
        Rubric(criteria={"1": Criterion(text="It is right.")})


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


@pytest.mark.parametrize(
    ("prefers", "reward", "consistent"),
    [
        (lambda a, b: "A" if "It is 4." in a else "B", 1.0, 1.0),  # the completion
        (lambda a, b: "B" if "It is 4." in a else "A", 0.0, 1.0),  # the reference
        (lambda a, b: "TIE", 0.5, 1.0),
        (lambda a, b: "A", 0.5, 0.0),  # the first position
        (lambda a, b: "B" if "It is 4." in b else "TIE", 0.5, 0.0),
    ],
)
def test_pairwise_judge_compares_in_both_orders(start: Start, prefers: Any, reward: float, consistent: float) -> None:
    server = start(lambda content: f"WINNER: {prefers(*content.split('<answer_b>'))}", barrier=2)
    score = grade(server, replace(PROMPT, data_source="pairwise"))
    assert score == Score(reward, {"pairwise/consistent": consistent})
    assert score.judge_usage.judgements == len(server.requests) == 2


def test_judges_are_components_of_other_graders(start: Start) -> None:
    server = start('{"right": 1, "short": 1}')
    row, weights = replace(PROMPT, data_source="gsm8k"), {"rubric": 0.5, "format": 0.1}
    score = grade(server, row, r"<think>x</think>\boxed{4}", components=weights, rubric=RUBRIC)
    parts = {"accuracy": 1.0, "rubric/right": 1.0, "rubric/short": 1.0, "task": 1.0, "rubric": 1.0, "format": 1.0}
    assert score == Score(1.6, parts) and score.judge_usage.judgements == 1


def test_task_of_a_judge_with_components_of_a_process(start: Start) -> None:
    score = grade(start("SCORE: 1"), text=r"<think>x</think>\boxed{4}", components={"format": 0.1})
    assert score == Score(1.1, {"accuracy": 1.0, "task": 1.0, "format": 1.0})


@pytest.mark.parametrize("settings", [{}, {"components": {"format": 0.1}}])
def test_a_judge_that_fails_is_a_failure_and_never_0(start: Start, settings: dict[str, Any]) -> None:
    score = grade(start(400), **settings)
    assert score.outcome is Outcome.GRADER_FAILED and math.isnan(score.reward)
    assert "BadRequestError" in score.reason


def test_the_policy_judges_only_where_an_engine_runs() -> None:
    reward = Reward(judge=Judge(backend="policy"))
    score = with_client(lambda client: client.score(PROMPT, "4"), reward, starts=False)
    assert score.outcome is Outcome.GRADER_FAILED and "reward.judge.backend=policy" in score.reason


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
