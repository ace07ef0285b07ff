"""Evaluation metrics, shared by validation, main_generation and main_eval.

Trajectory (or its line in a results file, or a graded text) -> SampleResult -> summarize -> Summary of each data source
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
from alphaapollo.evaluation.answer_parsing import extract_answer
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Score, Trajectory

CORRECT_ACCURACY = 1.0  # accuracy from which a sample is correct, for pass@k


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One graded sample."""

    problem: int  # prompt id
    sample: int
    data_source: str
    outcome: Outcome
    reward: float  # NaN if grader or environment failed; likewise accuracy
    accuracy: float
    answer: str | None = None  # its vote; None: no vote
    num_tokens: int | None = None  # sampled by the model; None if unknown
    end: EpisodeEnd | None = None
    reason: str = ""  # if it failed


@dataclass(frozen=True)
class Estimate:
    """Mean over problems with its 95 % interval (None with fewer than two problems)."""

    value: float
    low: float | None
    high: float | None
    problems: int  # number of problems with a value

    @classmethod
    def of(cls, value: float, bounds: Iterable[float], problems: int) -> Estimate:
        """bounds: NaN if there is no interval."""
        low, high = (None if math.isnan(bound) else float(bound) for bound in bounds)
        return cls(float(value), low, high, int(problems))


@dataclass(frozen=True)
class Summary:
    """Metrics of one data source, or of all together."""

    data_source: str
    problems: int
    samples: int
    outcomes: dict[str, int]
    ends: dict[str, int]
    figures: dict[str, Estimate]  # avg@n, pass@1 ... pass@n, maj@n, reward, response_length

    @property
    def failed(self) -> int:
        """Number of samples without a reward; only the response length includes them."""
        return sum(self.outcomes.get(outcome, 0) for outcome in Outcome if outcome.failed)


def sample_result(prompt: Prompt, trajectory: Trajectory, vote: bool = True) -> SampleResult:
    """Convert a trajectory. vote: also extract the answer."""
    text = trajectory.turns[-1].text if vote and trajectory.turns else ""
    own = make_sample_result(
        prompt, trajectory.sample, text, trajectory.score, num_tokens=trajectory.num_tokens, end=trajectory.end
    )
    return own if own.outcome.failed else replace(own, reward=trajectory.reward, accuracy=trajectory.accuracy)


def make_sample_result(
    prompt: Prompt,
    sample: int,
    text: str,
    score: Score,
    num_tokens: int | None = None,
    end: EpisodeEnd | None = None,
) -> SampleResult:
    """Combine a response text (of a trajectory: its last turn) with its score."""
    failed = score.outcome.failed
    return SampleResult(
        problem=prompt.id,
        sample=sample,
        data_source=prompt.data_source,
        outcome=score.outcome,
        reward=math.nan if failed else score.reward,
        accuracy=math.nan if failed else score.accuracy,
        answer=extract_answer(text),
        num_tokens=num_tokens,
        end=end,
        reason=score.reason,
    )


def read_sample_result(record: Mapping[str, Any]) -> SampleResult:
    """Convert a record of the rollout log. Raises KeyError, TypeError or ValueError for an invalid record."""
    outcome, turns = Outcome(record["outcome"]), record["turns"]
    steps = sum(turn["reward"] for turn in turns)
    reward = math.nan if outcome.failed else float(record["reward"]) + steps
    return make_sample_result(
        Prompt(int(record["prompt_id"]), str(record["data_source"]), ""),
        int(record["sample"]),
        turns[-1]["text"] if turns else "",
        Score(reward, record["components"], outcome, record["reason"]),
        num_tokens=sum(turn["num_tokens"] for turn in turns),
        end=EpisodeEnd(record["end"]),
    )


def join_repeats(results: Sequence[SampleResult], prompts: Iterable[Prompt]) -> list[SampleResult]:
    """Merge samples of rows that repeat a problem, as prepare_validation writes them, into its first row.

    A repeated row has the same data source, prompt, ground truth and extra_info.index.
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


def max_samples_per_problem(results: Iterable[SampleResult]) -> int:
    """Largest number of samples of a problem."""
    return max(Counter(result.problem for result in results).values(), default=1)


def summarize(results: Iterable[SampleResult]) -> tuple[Summary, dict[str, Summary]]:
    """Summarize all results, and those of each data source in alphabetical order."""
    by_source: dict[str, list[SampleResult]] = defaultdict(list)
    for result in results:
        by_source[result.data_source].append(result)
    everything = [result for own in by_source.values() for result in own]
    sources = {source: _summary(source, by_source[source]) for source in sorted(by_source)}
    if len(sources) == 1:
        return next(iter(sources.values())), sources
    return _summary("all", everything), sources


def _summary(data_source: str, results: Sequence[SampleResult]) -> Summary:
    names, values = problem_values(results, max_samples_per_problem(results))
    means, counts = _means(values)
    bounds = bootstrap_interval(values)
    return Summary(
        data_source=data_source,
        problems=len(values),
        samples=len(results),
        outcomes=dict(Counter(str(result.outcome) for result in results)),
        ends=dict(Counter(str(result.end) for result in results if result.end)),
        figures={
            name: Estimate.of(means[index], bounds[:, index], counts[index])
            for index, name in enumerate(names)
            if counts[index]
        },
    )


def mean_metrics(results: Sequence[SampleResult], num_samples: int) -> dict[str, float]:
    """Means of all metrics without intervals; NaN for metrics without values."""
    names, values = problem_values(results, num_samples)
    return dict(zip(names, _means(values)[0].tolist(), strict=True))


def _means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each column over the problems with a value, and the number of these problems."""
    values = np.sort(values, axis=0)  # makes sums independent of the order of problems
    known = ~np.isnan(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0), counts


def problem_values(results: Iterable[SampleResult], num_samples: int) -> tuple[list[str], np.ndarray]:
    """Metric names [F] and the values of each problem [P, F], ordered by problem id.

    Failed samples are excluded: a problem may have no pass@k for large k, and a problem with failed samples only has no
    metric but the response length (NaN).
    """
    by_problem: dict[int, list[SampleResult]] = defaultdict(list)
    for result in sorted(results, key=lambda result: (result.problem, result.sample)):
        by_problem[result.problem].append(result)
    problems = list(by_problem.values())
    scored = [[result for result in own if not result.outcome.failed] for own in problems]
    correct = [sum(result.accuracy >= CORRECT_ACCURACY for result in own) for own in scored]
    passes = pass_at_k(np.array([len(own) for own in scored]), np.array(correct), num_samples)
    columns = {f"avg@{num_samples}": [_mean([result.accuracy for result in own]) for own in scored]}
    columns |= {f"pass@{k}": passes[:, k - 1].tolist() for k in range(1, num_samples + 1)}
    columns[f"maj@{num_samples}"] = [
        majority_accuracy([result.answer for result in own], [result.accuracy for result in own]) if own else math.nan
        for own in scored
    ]
    columns["reward"] = [_mean([result.reward for result in own]) for own in scored]
    columns["response_length"] = [
        _mean([result.num_tokens for result in own if result.num_tokens is not None]) for own in problems
    ]
    return list(columns), np.array(list(columns.values()), dtype=float).T.reshape(len(problems), len(columns))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
