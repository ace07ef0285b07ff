"""Scores of completions by a judge model: a score, the criteria of a rubric, a comparison with a reference answer.

A judgement that fails raises ValueError with the reason, and never gives a score of 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from alphaapollo.config.schema import Criterion, Reward, Rubric
from alphaapollo.rewards.base import get_question
from alphaapollo.rewards.judges.client import JudgeClient, remove_thoughts, wait_for_all
from alphaapollo.types import Prompt, Score
from alphaapollo.utils.text import fill_template

# One line with the name and a separator; only signs before the name, around the value and between them.
VERDICT = r"^[^\w\n]*+{}(?=\W*?[:=])\W*?({})[^\w\n]*+$"
SCORE = re.compile(VERDICT.format("SCORE", r"-?\d+(?:\.\d+)?|-?\.\d+"), re.IGNORECASE | re.MULTILINE)
WINNER = re.compile(VERDICT.format("WINNER", "A|B|TIE"), re.IGNORECASE | re.MULTILINE)
JSON_OBJECT = re.compile(r"\{[^{}]*\}")
TEXT_KEYS, WEIGHT_KEYS = ("text", "criterion", "description"), ("weight", "points")  # of a row's criterion
MAX_SHOWN = 120  # characters of a reply in a failure reason


async def score_answer(client: JudgeClient, reward: Reward, prompt: Prompt, completion: str) -> Score:
    """Return the judge's score from 0 to 1. The component `accuracy` is 1 for scores of at least 0.5."""
    score, usage = await client.ask(_fill_for_answer(reward.judge.prompt, prompt, completion), read_score)
    return Score(score, {"accuracy": float(score >= 0.5)}, judge_usage=usage)


async def score_by_rubric(client: JudgeClient, reward: Reward, prompt: Prompt, completion: str) -> Score:
    """Return the weighted mean of the criteria's verdicts. The components are `accuracy`, which is 1 for scores of at
    least 0.5, and `rubric/NAME` for each criterion of reward.rubric.criteria."""
    criteria = list_criteria(reward.rubric, prompt)
    shown = "\n".join(f"{name}: {criterion.text}" for name, criterion in criteria.items())
    example = json.dumps(dict.fromkeys(criteria, 1))
    content = _fill_for_answer(reward.rubric.prompt, prompt, completion, criteria=shown, verdicts=example)
    verdicts, usage = await client.ask(content, partial(read_criteria, names=criteria))
    score = compute_rubric_score(verdicts, criteria)
    named = {f"rubric/{name}": verdicts[name] for name in reward.rubric.criteria}
    return Score(score, {"accuracy": float(score >= 0.5)} | named, judge_usage=usage)


async def compare_with_reference(client: JudgeClient, reward: Reward, prompt: Prompt, completion: str) -> Score:
    """Compare the completion with the ground truth in both orders, in two judgements. Returns 1 if it is better in
    both, 0 if worse in both, and 0.5 for a tie, also if the orders disagree.

    The component `pairwise/consistent` is 1 if both orders agree. If not, the judge prefers a position.
    """
    if prompt.ground_truth_text is None:
        raise ValueError(f"row {prompt.id} has no ground truth with which the judge could compare the completion")
    answers = [_quote_answer(text) for text in (completion, prompt.ground_truth_text)]
    question, template = get_question(prompt), reward.judge.pairwise_prompt
    contents = [
        fill_template(template, question=question, answer_a=one, answer_b=other)
        for one, other in (answers, answers[::-1])
    ]
    verdicts = await wait_for_all(client.ask(content, read_winner) for content in contents)
    (shown_first, usage), (other_first, other_usage) = verdicts
    is_consistent = shown_first == 1 - other_first
    components = {"pairwise/consistent": float(is_consistent)}
    return Score(shown_first if is_consistent else 0.5, components, judge_usage=usage + other_usage)


JudgeFunction = Callable[[JudgeClient, Reward, Prompt, str], Awaitable[Score]]
JUDGES: dict[str, JudgeFunction] = {
    "judge": score_answer,
    "rubric": score_by_rubric,
    "pairwise": compare_with_reference,
}
"""Judges by name, which is both a data source and a reward component."""


def list_criteria(rubric: Rubric, prompt: Prompt) -> dict[str, Criterion]:
    """Return the criteria of a row by name: those of reward.rubric, and those of its column `rubric`, which are named
    1, 2, ... Raises ValueError if the row's rubric is malformed, or if no criterion has a positive weight."""
    criteria = dict(rubric.criteria)
    rows = prompt.extra_info.get("rubric") or []
    try:
        for number, row in enumerate(rows, 1):
            text = next(row[key] for key in TEXT_KEYS if row.get(key))
            weight = next((row[key] for key in WEIGHT_KEYS if row.get(key) is not None), 1.0)
            criteria[str(number)] = Criterion(text=text, weight=weight)
    except (TypeError, AttributeError, ValueError, StopIteration) as error:
        shown = str(rows)[:MAX_SHOWN]
        raise ValueError(
            f"row {prompt.id} has the rubric {shown}. Write a list of {{text: TEXT, weight: NUMBER}}."
        ) from error
    if not any(criterion.weight > 0 for criterion in criteria.values()):
        raise ValueError(
            f"row {prompt.id} has no criterion with a positive weight. Set reward.rubric.criteria, or add a column "
            "rubric to the data."
        )
    return criteria


def compute_rubric_score(verdicts: Mapping[str, float], criteria: Mapping[str, Criterion]) -> float:
    """Compute sum(weight * verdict) / sum of the positive weights (arXiv 2505.08775, section 3). At most 1; below 0 if
    faults, which have negative weights, outweigh everything else."""
    possible = math.fsum(max(criterion.weight, 0.0) for criterion in criteria.values())
    return math.fsum(criterion.weight * verdicts[name] for name, criterion in criteria.items()) / possible


def _fill_for_answer(template: str, prompt: Prompt, completion: str, **fields: str) -> str:
    """Fill a template with question, ground truth, answer (the completion without its thoughts) and `fields`."""
    truth = "none is given" if prompt.ground_truth is None else str(prompt.ground_truth_text)
    answer = _quote_answer(completion)
    return fill_template(template, question=get_question(prompt), ground_truth=truth, answer=answer, **fields)


def _quote_answer(completion: str) -> str:
    """Return a completion without thoughts, in which no tag ends the template's part of the answer."""
    return remove_thoughts(completion).strip().replace("</answer", "<\\/answer")


def read_score(reply: str) -> float:
    """Return x of the last line `SCORE: x`. Raises ValueError if there is none, or x is not between 0 and 1."""
    scores = [float(number) for number in SCORE.findall(reply)]
    if not scores:
        raise ValueError(f"the judge's answer has no line 'SCORE: ...': {_shorten(reply)!r}")
    if not 0 <= scores[-1] <= 1:
        raise ValueError(f"the judge's score {scores[-1]:g} is not between 0 and 1: {_shorten(reply)!r}")
    return scores[-1]


def read_winner(reply: str) -> float:
    """Return 1, 0 or 0.5 for A, B or TIE in the last line `WINNER: x`. Raises ValueError if there is none."""
    winners = WINNER.findall(reply)
    if not winners:
        raise ValueError(f"the judge's answer has no line 'WINNER: ...': {_shorten(reply)!r}")
    return {"A": 1.0, "B": 0.0, "TIE": 0.5}[winners[-1].upper()]


def read_criteria(reply: str, names: Collection[str]) -> dict[str, float]:
    """Return the last JSON object of a reply. Raises ValueError unless its keys are exactly `names`, and its values
    numbers from 0 to 1."""
    try:
        verdicts = json.loads(JSON_OBJECT.findall(reply)[-1])
    except (IndexError, ValueError) as error:
        raise ValueError(f"the judge's answer does not end with a JSON object: {_shorten(reply)!r}") from error
    if verdicts.keys() != set(names):
        raise ValueError(f"the judge's verdicts {_shorten(json.dumps(verdicts))} are not about {', '.join(names)}")
    for name, value in verdicts.items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"the judge's verdict about {name} is {value!r}, not a number from 0 to 1")
    return {name: float(verdicts[name]) for name in names}


def _shorten(text: str) -> str:
    return " ".join(text.split())[-MAX_SHOWN:]
