"""From samples to the figures of an evaluation. Validation, main_generation and main_eval all count here.

Trajectory (or its line in a results file, or a graded text) -> Result -> summarize -> Summary of each data source
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alphaapollo.algorithms.accuracy_estimates import bootstrap_interval, majority_accuracy, pass_at_k
from alphaapollo.evaluation.answers import answer_of
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Score, Trajectory

CORRECT = 1.0  # the accuracy from which a sample is correct, for pass@k


@dataclass(frozen=True, slots=True)
class Result:
    """One sample, as far as the figures see it."""

    problem: int  # the prompt's id
    sample: int
    data_source: str
    outcome: Outcome
    reward: float  # nan where grader or environment failed, and so is accuracy
    accuracy: float
    answer: str | None = None  # what it votes for; None: for nothing
    num_tokens: int | None = None  # sampled by the model; None where it is not known
    end: EpisodeEnd | None = None
    reason: str = ""  # of a failure


@dataclass(frozen=True)
class Figure:
    """A mean over problems, with its 95 % interval (None where fewer than two problems have the figure)."""

    value: float
    low: float | None
    high: float | None
    problems: int  # that have it


@dataclass(frozen=True)
class Summary:
    """All figures of one data source, or of all together."""

    data_source: str
    problems: int
    samples: int
    outcomes: dict[str, int]
    ends: dict[str, int]
    figures: dict[str, Figure]  # avg@n, pass@1 ... pass@n, maj@n, reward, response_length

    @property
    def failed(self) -> int:
        """Samples without a reward: they are in no figure but the response length."""
        return sum(self.outcomes.get(outcome, 0) for outcome in Outcome if outcome.failed)


def result_of(prompt: Prompt, trajectory: Trajectory, vote: bool = True) -> Result:
    """`vote`: also read the answer, which takes a moment."""
    text = trajectory.turns[-1].text if vote and trajectory.turns else ""
    own = graded(
        prompt, trajectory.sample, text, trajectory.score, num_tokens=trajectory.num_tokens, end=trajectory.end
    )
    return own if own.outcome.failed else replace(own, reward=trajectory.reward, accuracy=trajectory.accuracy)


def graded(
    prompt: Prompt,
    sample: int,
    text: str,
    score: Score,
    num_tokens: int | None = None,
    end: EpisodeEnd | None = None,
) -> Result:
    """The result of a text (of a trajectory: its last turn) with its score."""
    failed = score.outcome.failed
    return Result(
        problem=prompt.id,
        sample=sample,
        data_source=prompt.data_source,
        outcome=score.outcome,
        reward=math.nan if failed else score.reward,
        accuracy=math.nan if failed else score.accuracy,
        answer=answer_of(text),
        num_tokens=num_tokens,
        end=end,
        reason=score.reason,
    )


def result_of_record(record: Mapping[str, Any]) -> Result:
    """As result_of, from what rollout_log wrote. KeyError, TypeError, ValueError: it is no such record."""
    outcome, turns = Outcome(record["outcome"]), record["turns"]
    steps = sum(turn["reward"] for turn in turns)
    score = Score(math.nan if outcome.failed else float(record["reward"]) + steps, record["components"], outcome)
    return Result(
        problem=int(record["prompt_id"]),
        sample=int(record["sample"]),
        data_source=str(record["data_source"]),
        outcome=outcome,
        reward=score.reward,
        accuracy=math.nan if outcome.failed else score.accuracy,
        answer=answer_of(turns[-1]["text"] if turns else ""),
        num_tokens=sum(turn["num_tokens"] for turn in turns),
        end=EpisodeEnd(record["end"]),
        reason=record["reason"],
    )


def join_repeats(results: Sequence[Result], prompts: Iterable[Prompt]) -> list[Result]:
    """Samples of rows that repeat a problem, as prepare_validation writes them, become samples of its first row.

    A repeat has the data source, the prompt, the ground truth and the extra_info.index of an earlier row.
    """
    first: dict[tuple[object, ...], int] = {}
    before: Counter[int] = Counter()
    places: dict[int, tuple[int, int]] = {}  # prompt -> (problem, repeats before)
    for prompt in prompts:
        index = prompt.extra_info.get("index")
        key = (prompt.data_source, json.dumps(prompt.content), prompt.ground_truth, index)
        problem = prompt.id if index is None else first.setdefault(key, prompt.id)
        places[prompt.id] = problem, before[problem]
        before[problem] += 1
    n = max((result.sample for result in results), default=0) + 1
    return [
        replace(result, problem=problem, sample=repeats * n + result.sample)
        for result in results
        for problem, repeats in [places[result.problem]]
    ]


def most_samples(results: Iterable[Result]) -> int:
    """n: the samples of the problem that has most."""
    return max(Counter(result.problem for result in results).values(), default=1)


def summarize(results: Iterable[Result]) -> tuple[Summary, dict[str, Summary]]:
    """All results together, and those of each data source in alphabetical order."""
    by_source: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_source[result.data_source].append(result)
    everything = [result for own in by_source.values() for result in own]
    sources = {source: _summary(source, by_source[source]) for source in sorted(by_source)}
    if len(sources) == 1:
        return next(iter(sources.values())), sources
    return _summary("all", everything), sources


def _summary(data_source: str, results: Sequence[Result]) -> Summary:
    names, values = problem_values(results, most_samples(results))
    means, counts = _means(values)
    low, high = bootstrap_interval(values)
    return Summary(
        data_source=data_source,
        problems=len(values),
        samples=len(results),
        outcomes=dict(Counter(str(result.outcome) for result in results)),
        ends=dict(Counter(str(result.end) for result in results if result.end)),
        figures={
            name: Figure(
                value=float(means[index]),
                low=None if np.isnan(low[index]) else float(low[index]),
                high=None if np.isnan(high[index]) else float(high[index]),
                problems=int(counts[index]),
            )
            for index, name in enumerate(names)
            if counts[index]
        },
    )


def mean_figures(results: Sequence[Result], num_samples: int) -> dict[str, float]:
    """The figures of a summary without their intervals; NaN for those that no problem has."""
    names, values = problem_values(results, num_samples)
    return dict(zip(names, _means(values)[0].tolist(), strict=True))


def _means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each column over the problems that have it, and how many have it."""
    values = np.sort(values, axis=0)  # sums to the last bit, whatever order the problems came in
    known = ~np.isnan(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0), counts


def problem_values(results: Iterable[Result], num_samples: int) -> tuple[list[str], np.ndarray]:
    """The names of the figures [F], and each problem's own values [P, F], problems by id.

    Failed samples are left out, so a problem may lack the pass@k of large k, and one whose samples all failed lacks
    every figure but the response length: NaN.
    """
    by_problem: dict[int, list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda result: (result.problem, result.sample)):
        by_problem[result.problem].append(result)
    problems = list(by_problem.values())
    scored = [[result for result in own if not result.outcome.failed] for own in problems]
    correct = [sum(result.accuracy >= CORRECT for result in own) for own in scored]
    passes = pass_at_k(np.array([len(own) for own in scored]), np.array(correct), num_samples)
    columns = {f"avg@{num_samples}": [_mean([result.accuracy for result in own]) for own in scored]}
    columns |= {f"pass@{k}": passes[:, k - 1].tolist() for k in range(1, num_samples + 1)}
    columns[f"maj@{num_samples}"] = [_majority(own) for own in scored]
    columns["reward"] = [_mean([result.reward for result in own]) for own in scored]
    columns["response_length"] = [
        _mean([result.num_tokens for result in own if result.num_tokens is not None]) for own in problems
    ]
    return list(columns), np.array(list(columns.values()), dtype=float).T.reshape(len(problems), len(columns))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _majority(scored: Sequence[Result]) -> float:
    if not scored:
        return math.nan
    return majority_accuracy([result.answer for result in scored], [result.accuracy for result in scored])
