"""Compute, write and print the results of an evolution: report.json and problems/ID.json."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.algorithms.accuracy_estimates import bootstrap_interval, majority_accuracy, pass_at_k
from alphaapollo.evaluation.metrics import Estimate
from alphaapollo.evolving.loop import rank_candidates
from alphaapollo.evolving.pool import Candidate, Judgement, Pool, Usage
from alphaapollo.observability.disk import explain_write_errors, replace_file
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Prompt

FOLDER = "problems"
ACCURACIES = ("chosen", "sampled", "majority", "oracle")
GradedJudgement = tuple[Judgement, bool]
"""Judgement with at least one vote, and whether the candidate is right."""


def summarize_round(pool: Pool, problems: Sequence[int], number: int) -> dict[str, Any]:
    """Return the accuracies of a round, as means over problems with 95 % intervals, and the table of its verdicts.

    chosen: the best candidate by votes and brevity up to this round. sampled: all candidates of this round. majority:
    the most frequent answer so far, without verifiers (self-consistency). oracle: at least one candidate so far is
    right. Candidates without a ground truth are excluded. An accuracy without candidates is None.
    """
    known = [
        [one for one in pool.get_candidates(problem, number + 1) if one.is_right is not None] for problem in problems
    ]
    so_far = [own for own in known if own]
    of_round = [made for own in so_far if (made := [one for one in own if one.id.round == number])]
    majorities = [
        majority_accuracy([one.answer for one in own], [float(bool(one.is_right)) for one in own]) for own in so_far
    ]
    best = [next(iter(rank_candidates(pool, problem, number + 1)), None) for problem in problems]
    return {
        "round": number,
        "chosen": estimate_mean([get_accuracy(candidate) for candidate in best]),
        "sampled": estimate_mean([sum(bool(one.is_right) for one in own) / len(own) for own in of_round]),
        "majority": estimate_mean(majorities),
        "oracle": estimate_mean([float(any(one.is_right for one in own)) for own in so_far]),
        "table": tabulate_verdicts(pool, [one for own in of_round for one in own]),
    }


def compute_round_metrics(pool: Pool, problems: Sequence[int], number: int) -> dict[str, float]:
    """Return the metrics of a round for metrics.jsonl (docs/metrics.md). NaN: no problem has the metric."""
    summary, metrics = summarize_round(pool, problems, number), dict[str, float]()
    for name in ACCURACIES:
        for suffix, field in (("", "value"), ("/low", "low"), ("/high", "high")):
            value = getattr(summary[name], field, None)
            metrics[f"accuracy/{name}{suffix}"] = math.nan if value is None else value
    metrics |= {f"table/{name}": float(count) for name, count in summary["table"].items()}
    candidates = [candidate for candidate in pool.candidates.values() if candidate.id.round == number]
    # includes calls for incomplete candidates
    usage = sum((usage for owner, usage in pool.usage.items() if f".r{number}." in owner), Usage())
    metrics["candidates/made"] = float(len(candidates))
    metrics["candidates/failed"] = float(sum(bool(one.failure) for one in candidates))
    return metrics | {f"cost/{name}": float(value) for name, value in asdict(usage).items()}


def tabulate_verdicts(pool: Pool, candidates: Iterable[Candidate]) -> dict[str, int]:
    """Count right and wrong candidates by the verifiers' majority. `unjudged`: candidates without votes."""
    counts = dict.fromkeys(("right_for", "right_against", "wrong_for", "wrong_against", "unjudged"), 0)
    for candidate in candidates:
        judgement = pool.judgements.get(candidate.key)
        if judgement is None or judgement.is_right is None:
            counts["unjudged"] += 1
        else:
            counts[f"{'right' if candidate.is_right else 'wrong'}_{'for' if judgement.is_right else 'against'}"] += 1
    return counts


def get_accuracy(candidate: Candidate | None) -> float:
    """Return 1 if a candidate is right, else 0; NaN without a candidate or a ground truth."""
    return math.nan if candidate is None or candidate.is_right is None else float(candidate.is_right)


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """Return the mean of the values that are not NaN, with its 95 % bootstrap interval; None without values."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    bounds = bootstrap_interval(np.array(known)[:, None])[:, 0]
    return Estimate.from_bounds(math.fsum(known) / len(known), bounds, len(known))


@dataclass(frozen=True)
class ConfusionMatrix:
    """Confusion matrix of votes (positive: a vote for) and the truth."""

    true_positive: float = 0
    false_positive: float = 0
    false_negative: float = 0
    true_negative: float = 0

    @property
    def true_positive_rate(self) -> float:
        """Share of right candidates with a vote for; NaN without right candidates."""
        right = self.true_positive + self.false_negative
        return self.true_positive / right if right else math.nan

    @property
    def false_positive_rate(self) -> float:
        """Share of wrong candidates with a vote for; NaN without wrong candidates."""
        wrong = self.false_positive + self.true_negative
        return self.false_positive / wrong if wrong else math.nan

    @property
    def balanced_accuracy(self) -> float:
        """Mean accuracy over right and wrong candidates; 0.5 for random votes."""
        return (self.true_positive_rate + 1 - self.false_positive_rate) / 2


def count_confusion(votes: Sequence[GradedJudgement]) -> ConfusionMatrix:
    """Return the confusion matrix of single votes."""
    counts = {True: [0, 0], False: [0, 0]}  # right -> [votes for, votes against]
    for judgement, right in votes:
        counts[right][0] += judgement.votes_for
        counts[right][1] += judgement.votes_against
    return ConfusionMatrix(counts[True][0], counts[False][0], counts[True][1], counts[False][1])


def roc_curve(votes: Sequence[GradedJudgement]) -> list[tuple[float, float]]:
    """Return points (false positive rate, true positive rate) for falling thresholds on the share of votes.

    The points lead from (0, 0) to (1, 1). The list is empty unless there are both right and wrong candidates.
    """
    num_right = sum(right for _, right in votes)
    num_wrong = len(votes) - num_right
    if not num_right or not num_wrong:
        return []
    points = [(0.0, 0.0)]
    for threshold in sorted({judgement.share for judgement, _ in votes}, reverse=True):
        accepted = [right for judgement, right in votes if judgement.share >= threshold]
        points.append(((len(accepted) - sum(accepted)) / num_wrong, sum(accepted) / num_right))
    return points


def area_under_curve(points: Sequence[tuple[float, float]]) -> float:
    """Return the trapezoidal area under the ROC curve; 0.5 for random votes, NaN without points. It is the probability
    that a right candidate has a larger share of votes than a wrong candidate; ties count half."""
    if not points:
        return math.nan
    return math.fsum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))


def compute_best_of_n(votes: Sequence[GradedJudgement], n: int) -> float:
    """Return the expected accuracy of the best-voted of n candidates, drawn from a problem's N without replacement.

    The value is exact: if s candidates have the same share of votes and b a smaller share, one of the s wins with
    probability (C(b + s, n) - C(b, n)) / C(N, n). Ties are broken at random. NaN if N < n.
    """
    if len(votes) < n:
        return math.nan
    expected, below = 0.0, 0
    for share in sorted({judgement.share for judgement, _ in votes}):
        group = [right for judgement, right in votes if judgement.share == share]
        chance = (comb(below + len(group), n) - comb(below, n)) / comb(len(votes), n)
        expected += chance * sum(group) / len(group)
        below += len(group)
    return expected


def compute_majority_of_k(votes: Sequence[GradedJudgement], k: int) -> ConfusionMatrix:
    """Return the expected confusion matrix of the majority of k votes, drawn without replacement (hypergeometric).

    A tie counts as against. Candidates with fewer than k votes are excluded.
    """
    counts = {True: [0.0, 0.0], False: [0.0, 0.0]}  # right -> [majority for, majority against]
    for judgement, right in votes:
        if judgement.votes >= k:
            wins = range(k // 2 + 1, min(k, judgement.votes_for) + 1)
            ways = sum(comb(judgement.votes_for, i) * comb(judgement.votes_against, k - i) for i in wins)
            chance = ways / comb(judgement.votes, k)
            counts[right][0] += chance
            counts[right][1] += 1 - chance
    return ConfusionMatrix(counts[True][0], counts[False][0], counts[True][1], counts[False][1])


def write_results(pool: Pool, prompts: Sequence[Prompt], folder: Path, stopped: str, terminal: Terminal) -> None:
    """Write and print all results; existing files are replaced. `stopped` is why the run ended early, or empty."""
    report = make_report(pool, [prompt.id for prompt in prompts], stopped)
    with explain_write_errors("the results", folder):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for prompt in prompts:
            _write_json(folder / FOLDER / f"{prompt.id:06}.json", make_problem_result(pool, prompt))
        _write_json(folder / "report.json", report)
    print_report(report, terminal)
    terminal.write(f"written: {folder / 'report.json'}, {folder / FOLDER}")


def _write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, with null for NaN."""
    replace_file(path, [msgspec.json.format(msgspec.json.encode(value), indent=1), b"\n"])


def make_problem_result(pool: Pool, prompt: Prompt) -> dict[str, Any]:
    """Return the content of problems/ID.json."""
    choice = pool.choices.get(prompt.id)
    chosen = pool.candidates[choice.candidate] if choice and choice.candidate else None
    return {
        "problem": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.content,
        "ground_truth": prompt.ground_truth,
        "chosen": chosen.key if chosen else None,
        "how": choice.method if choice else None,
        "answer": chosen.answer if chosen else None,
        "solution": chosen.summary if chosen else None,
        "right": chosen.is_right if chosen else None,
        "candidates": [_make_result(pool, one) for one in pool.get_candidates(prompt.id, failed=True)],
        "matches": [_to_fields(match) for (problem, _), match in sorted(pool.matches.items()) if problem == prompt.id],
    }


def _make_result(pool: Pool, candidate: Candidate) -> dict[str, Any]:
    """Return a candidate for problems/ID.json: without messages, with verdicts and the usage of all its calls."""
    judgement = pool.judgements.get(candidate.key)
    verdicts = [_to_fields(verdict) for verdict in pool.get_verdicts(candidate.key)]
    fields = _to_fields(candidate)
    del fields["messages"], fields["asked"]
    return {
        **fields,
        "right": candidate.is_right,
        "verdicts": [{key: one[key] for key in ("vote", "upheld", "report", "failure")} for one in verdicts],
        "judgement": None if judgement is None else _to_fields(judgement),
        **vars(pool.usage[candidate.key]),
    }


def _to_fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "kind"}


def make_report(pool: Pool, problems: Sequence[int], stopped: str) -> dict[str, Any]:
    """Return the content of report.json (docs/evolving.md)."""
    candidates = [one for problem in problems for one in pool.get_candidates(problem)]
    graded = [one for one in candidates if one.is_right is not None]
    choices = [pool.choices[problem].candidate if problem in pool.choices else None for problem in problems]
    table = tabulate_verdicts(pool, graded)
    return {
        "rounds": [summarize_round(pool, problems, number) for number in sorted({one.id.round for one in candidates})],
        "chosen": estimate_mean([get_accuracy(pool.candidates.get(key or "")) for key in choices]),
        "table": table,
        "calibration": _compute_calibration(pool, graded, table),
        "roles": sum_role_costs(pool),
        "failures": count_failures(pool),
        "halted": stopped,
    }


def _compute_calibration(pool: Pool, graded: Sequence[Candidate], table: dict[str, int]) -> dict[str, Any] | None:
    """Return how well votes predict the truth; None if no candidate has both votes and a truth."""
    by_problem: dict[int, list[GradedJudgement]] = defaultdict(list)
    for candidate in graded:
        judgement = pool.judgements.get(candidate.key)
        if judgement is not None and judgement.votes:
            by_problem[candidate.id.problem].append((judgement, bool(candidate.is_right)))
    votes = [one for own in by_problem.values() for one in own]
    if not votes:
        return None
    roc, most_votes = roc_curve(votes), max(judgement.votes for judgement, _ in votes)
    counts = np.array([len(own) for own in by_problem.values()])
    right = np.array([sum(right for _, right in own) for own in by_problem.values()])
    passes = pass_at_k(counts, right, int(counts.max()))
    sizes = range(1, int(counts.max()) + 1)
    return {
        "candidates": len(votes),
        "single": count_confusion(votes),
        "majority": ConfusionMatrix(
            table["right_for"], table["wrong_for"], table["right_against"], table["wrong_against"]
        ),
        "roc": roc,
        "auc": area_under_curve(roc),
        "best_of": {n: estimate_mean([compute_best_of_n(own, n) for own in by_problem.values()]) for n in sizes},
        "oracle": {n: estimate_mean(passes[:, n - 1].tolist()) for n in sizes},
        "votes": {k: compute_majority_of_k(votes, k).balanced_accuracy for k in range(1, most_votes + 1)},
    }


def sum_role_costs(pool: Pool) -> dict[str, dict[str, float]]:
    """Return calls (including failed calls), tokens, money and seconds by role. Parallel seconds are summed."""
    by_role = defaultdict(list)
    for call in pool.all_calls:
        by_role[call.role].append(call)
    return {
        role: {
            "calls": len(calls),
            "failed": sum(bool(call.failure) for call in calls),
            "tokens_read": sum(call.prompt_tokens for call in calls),
            "tokens_written": sum(call.tokens for call in calls),
            "money": math.fsum(call.money for call in calls),
            "seconds": round(math.fsum(call.seconds for call in calls), 3),
        }
        for role, calls in sorted(by_role.items())
    }


def count_failures(pool: Pool) -> dict[str, int]:
    """Count failures by kind, without kinds that have none. Failures are excluded from all accuracies."""
    verdicts = [verdict for own in pool.verdicts.values() for verdict in own.values()]
    grades = [candidate.grade for candidate in pool.candidates.values() if candidate.grade]
    counts = {
        "calls": sum(bool(call.failure) for call in pool.all_calls),
        "candidates": sum(bool(candidate.failure) for candidate in pool.candidates.values()),
        "verdicts": sum(bool(verdict.failure) for verdict in verdicts),
        "struck_out_verdicts": sum(verdict.upheld is False for verdict in verdicts),
        "matches": sum(bool(match.failure) for match in pool.matches.values()),
        "grades": sum(grade.accuracy is None for grade in grades),
    }
    return {name: count for name, count in counts.items() if count}


def print_report(report: dict[str, Any], terminal: Terminal) -> None:
    """Print the rounds, the table of policy and verifiers, the calibration and the costs."""
    lines = ["", f"round  {''.join(f'{name:24}' for name in ACCURACIES).rstrip()}"]
    for summary in report["rounds"]:
        accuracies = "".join(f"{_format_estimate(summary[name]):24}" for name in ACCURACIES)
        lines.append(f"{summary['round']:5}  {accuracies.rstrip()}")
    table = report["table"]
    lines += [
        f"final choice: {_format_estimate(report['chosen'])}",
        "",
        "policy \\ verifiers     for  against",
        f"right             {table['right_for']:8} {table['right_against']:8}",
        f"wrong             {table['wrong_for']:8} {table['wrong_against']:8}",
        *(_format_calibration(report["calibration"]) if report["calibration"] else []),
        "",
        "role                    calls  failed  tokens read  written     money   seconds",
    ]
    for role, cost in report["roles"].items():
        lines.append(
            f"{role:22} {cost['calls']:6} {cost['failed']:7} {cost['tokens_read']:12,} {cost['tokens_written']:8,} "
            f"{cost['money']:9.4f} {cost['seconds']:9.1f}"
        )
    if report["failures"]:
        counted = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report["failures"].items())
        lines.append(f"failures (excluded from all accuracies): {counted}")
    terminal.write("\n".join(lines))


def _format_calibration(calibration: dict[str, Any]) -> list[str]:
    def format_values(values: dict[int, float]) -> str:
        return "  ".join(f"{n}: {value:.3f}" for n, value in values.items())

    single = calibration["single"]
    best_of, oracle = ({n: estimate.value for n, estimate in calibration[key].items()} for key in ("best_of", "oracle"))
    return [
        "",
        f"single votes for      {single.true_positive_rate:.3f} of the right solutions, "
        f"{single.false_positive_rate:.3f} of the wrong ones",
        f"ROC AUC of vote share {calibration['auc']:.3f} (random: 0.5)",
        f"best of n by votes    {format_values(best_of)}",
        f"oracle of n           {format_values(oracle)}",
        f"majority of k votes   {format_values(calibration['votes'])}",
    ]


def _format_estimate(estimate: Estimate | None) -> str:
    """Return the text of an estimate, e.g. `0.812 (0.750 to 0.868)`."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
