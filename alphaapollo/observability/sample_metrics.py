"""Metrics of evaluated samples, shared by validation, main_generation and main_eval.

Trajectories, records of results files and graded texts are converted to SampleResults; `summarize` computes metrics.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alphaapollo.observability.estimates import compute_bootstrap_interval, pass_at_k
from alphaapollo.observability.majority_vote import extract_answer, majority_accuracy
from alphaapollo.runs.rollout_log import compute_prompt_digest
from alphaapollo.types import DERIVED, EpisodeEnd, JsonObject, Outcome, Prompt, Score, Trajectory
from alphaapollo.utils.json_types import finite_or_none

NOT_SCORED = Score(math.nan)
CORRECT_ACCURACY = 1.0  # minimum accuracy of a correct sample, for pass@k


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Grading result of one sampled response."""

    problem_id: int  # prompt id
    sample_index: int  # index among the samples of the problem
    data_source: str
    outcome: Outcome
    reward: float  # NaN if the grader or the environment failed
    accuracy: float  # NaN if unknown, e.g. because the grader or the environment failed
    answer: str | None = None  # normalized answer, for majority votes; None: no vote
    num_tokens: int | None = None  # number of tokens sampled by the model; None if unknown
    end: EpisodeEnd | None = None
    failure_reason: str = ""  # why the grader or the environment failed
    score: Score = NOT_SCORED  # with the reward components


@dataclass(frozen=True)
class Estimate:
    """A metric: the mean over problems with its 95 % confidence interval."""

    value: float
    low: float | None  # None with fewer than two problems
    high: float | None
    problems: int  # number of problems with a value


@dataclass(frozen=True)
class Summary:
    """Metrics of one data source, or of all data sources together."""

    data_source: str
    problems: int  # number of problems
    samples: int  # number of samples of all problems
    outcomes: dict[str, int]  # outcome -> number of samples
    ends: dict[str, int]  # reason why an episode ended -> number of samples
    figures: dict[str, Estimate]  # metrics, e.g. avg@n, pass@1 ... pass@n, maj@n, reward, response_length

    @property
    def num_failed(self) -> int:
        """Number of samples without a reward. They are excluded from all metrics except the response length."""
        return sum(self.outcomes.get(outcome, 0) for outcome in Outcome if outcome.failed)


def convert_to_sample_result(prompt: Prompt, trajectory: Trajectory) -> SampleResult:
    """Convert a graded trajectory to a SampleResult."""
    last = trajectory.last_turn
    text, size, end = last.text if last else "", trajectory.num_tokens, trajectory.end
    score = trajectory.score.add_turn_rewards([turn.reward for turn in trajectory.turns])
    return make_sample_result(prompt, trajectory.sample, text, score, size, end)


def make_sample_result(
    prompt: Prompt,
    sample_index: int,
    text: str,
    score: Score,
    num_tokens: int | None = None,
    end: EpisodeEnd | None = None,
) -> SampleResult:
    """Create the SampleResult of a response, or of the last turn of an episode, from its grader's score."""
    failed = score.outcome.failed
    return SampleResult(
        problem_id=prompt.id,
        sample_index=sample_index,
        data_source=prompt.data_source,
        outcome=score.outcome,
        reward=math.nan if failed else score.reward,
        accuracy=math.nan if failed or score.accuracy is None else score.accuracy,
        answer=extract_answer(text),
        num_tokens=num_tokens,
        end=end,
        failure_reason=score.reason,
        score=score,
    )


def find_answer(turns: Sequence[JsonObject]) -> str | None:
    """Return the text of the turn with the answer, in a record of the rollout log; None without a turn."""
    last = next((turn for turn in turns if "last_answer" in turn.get("info", {})), turns[-1] if turns else None)
    return last["text"] if last else None


def read_sample_result(record: JsonObject) -> SampleResult:
    """Convert a record of the rollout log. Raises KeyError, TypeError or ValueError for an invalid record."""
    outcome, turns = Outcome(record["outcome"]), record["turns"]
    turn_rewards = sum(turn["reward"] for turn in turns)
    reward = math.nan if outcome.failed else float(record["reward"]) + turn_rewards
    return make_sample_result(
        Prompt(int(record["prompt_id"]), str(record["data_source"]), ""),
        int(record["sample"]),
        find_answer(turns) or "",
        Score(reward, record["components"], outcome, record["reason"], accuracy=record.get("accuracy", DERIVED)),
        num_tokens=sum(turn["num_tokens"] for turn in turns),
        end=EpisodeEnd(record["end"]),
    )


def merge_repeated_prompts(results: Sequence[SampleResult], prompts: Iterable[Prompt]) -> list[SampleResult]:
    """Return the results with all repeats of a prompt treated as one problem with more samples.

    prepare_validation writes repeats: equal prompts with an extra_info.index. In the results, problem_id is the id of
    the first of these prompts, and sample_index counts the samples of all of them. Other equal rows may be different
    tasks, because environments may derive their seed from the row's position.
    """
    first_ids: dict[str, int] = {}  # digest -> id of the first prompt with it
    num_repeats: Counter[int] = Counter()
    problems: dict[int, tuple[int, int]] = {}  # prompt -> (problem, number of earlier repeats)
    for prompt in prompts:
        is_repeat = prompt.extra_info.get("index") is not None
        problem = first_ids.setdefault(compute_prompt_digest(prompt), prompt.id) if is_repeat else prompt.id
        problems[prompt.id] = problem, num_repeats[problem]
        num_repeats[problem] += 1
    num_samples, merged = max((result.sample_index for result in results), default=0) + 1, list[SampleResult]()
    for result in results:
        problem, repeats = problems[result.problem_id]
        merged.append(replace(result, problem_id=problem, sample_index=repeats * num_samples + result.sample_index))
    return merged


def count_max_samples_per_problem(results: Iterable[SampleResult]) -> int:
    """Return the number of samples of the problem with the most samples."""
    return max(Counter(result.problem_id for result in results).values(), default=1)


def summarize(results: Iterable[SampleResult]) -> tuple[Summary, dict[str, Summary]]:
    """Compute the metrics of all results, and of each data source in alphabetical order."""
    by_source: dict[str, list[SampleResult]] = defaultdict(list)
    for result in results:
        by_source[result.data_source].append(result)
    everything = [result for group in by_source.values() for result in group]
    sources = {source: _summarize_source(source, by_source[source]) for source in sorted(by_source)}
    if len(sources) == 1:
        return next(iter(sources.values())), sources
    return _summarize_source("all", everything), sources


def _summarize_source(data_source: str, results: Sequence[SampleResult]) -> Summary:
    names, values = compute_metrics_per_problem(results, count_max_samples_per_problem(results))
    return Summary(
        data_source=data_source,
        problems=len(values),
        samples=len(results),
        outcomes=dict(Counter(str(result.outcome) for result in results)),
        ends=dict(Counter(str(result.end) for result in results if result.end)),
        figures={name: mean for name, mean in zip(names, estimate_means(values), strict=True) if mean},
    )


def estimate_means(values: np.ndarray) -> list[Estimate | None]:
    """Estimate the mean of each metric with its 95 % bootstrap interval, from values [P, F] of P problems; NaN is
    ignored."""
    means, counts = _compute_column_means_and_counts(values)
    columns = zip(means.tolist(), *compute_bootstrap_interval(values).tolist(), counts.tolist(), strict=True)
    return [
        Estimate(mean, finite_or_none(low), finite_or_none(high), count) if count else None
        for mean, low, high, count in columns
    ]


def compute_mean_metrics(results: Sequence[SampleResult], num_samples: int) -> dict[str, float]:
    """Compute the mean of each metric over the problems that have a value (`pass@k_problems`: their number), or NaN."""
    names, values = compute_metrics_per_problem(results, num_samples)
    means, counts = _compute_column_means_and_counts(values)
    problems = {f"{name}_problems": float(count) for name, count in zip(names, counts, strict=True) if "pass@" in name}
    return dict(zip(names, means.tolist(), strict=True)) | problems


def _compute_column_means_and_counts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each column over its values that are not NaN, and the number of these values."""
    values = np.sort(values, axis=0)  # makes sums independent of the order of problems
    has_value = ~np.isnan(values)
    counts = has_value.sum(axis=0)
    sums = np.where(has_value, values, 0.0).sum(axis=0)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0), counts


def compute_metrics_per_problem(results: Iterable[SampleResult], num_samples: int) -> tuple[list[str], np.ndarray]:
    """Compute each metric for each problem. Returns the F metric names and values [P, F], ordered by problem id.

    num_samples: n of avg@n and maj@n, and the largest k of pass@k. Failed samples are excluded, so pass@k may be NaN
    for large k; it is NaN for all problems if fewer than half of them have k samples. If all samples of a problem
    failed, all metrics except the response length are NaN. avg, pass and maj are NaN if an accuracy is unknown.
    """
    by_problem: dict[int, list[SampleResult]] = defaultdict(list)
    for result in sorted(results, key=lambda result: (result.problem_id, result.sample_index)):
        by_problem[result.problem_id].append(result)
    problems = list(by_problem.values())
    scored = [[result for result in group if not result.outcome.failed] for group in problems]
    correct = [sum(result.accuracy >= CORRECT_ACCURACY for result in group) for group in scored]
    passes = pass_at_k(np.array([len(group) for group in scored]), np.array(correct), num_samples)
    has_few_problems = 2 * (~np.isnan(passes)).sum(axis=0) < len(problems)  # [K]
    passes[:, has_few_problems] = np.nan
    columns = {f"avg@{num_samples}": [_mean_or_nan([result.accuracy for result in group]) for group in scored]}
    columns |= {f"pass@{k}": passes[:, k - 1].tolist() for k in range(1, num_samples + 1)}
    columns[f"maj@{num_samples}"] = [
        majority_accuracy([result.answer for result in group], [result.accuracy for result in group])
        if group
        else math.nan
        for group in scored
    ]
    if any(math.isnan(result.accuracy) for group in scored for result in group):
        columns = {name: [math.nan] * len(problems) for name in columns}
    columns["reward"] = [_mean_or_nan([result.reward for result in group]) for group in scored]
    names = {name for group in scored for result in group for name in result.score.components}
    for name in sorted(names - {"accuracy"}):
        values = [[result.score.component(name) for result in group] for group in scored]
        columns[f"component/{name}"] = [_mean_or_nan([v for v in group if not math.isnan(v)]) for group in values]
    columns["response_length"] = [
        _mean_or_nan([result.num_tokens for result in group if result.num_tokens is not None]) for group in problems
    ]
    return list(columns), np.array(list(columns.values()), dtype=float).T.reshape(len(problems), len(columns))


def _mean_or_nan(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
