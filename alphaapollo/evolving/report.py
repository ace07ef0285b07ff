"""Results of an evolution: problems/ID.json, report.json and the console."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.algorithms.accuracy_estimates import pass_at_k
from alphaapollo.evaluation.metrics import Estimate
from alphaapollo.evolving import metrics
from alphaapollo.evolving.metrics import ACCURACIES, ConfusionMatrix, GradedJudgement, estimate_mean
from alphaapollo.evolving.pool import Candidate, Pool
from alphaapollo.observability.disk import replace_file, writing
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Prompt

FOLDER = "problems"


def write_results(pool: Pool, prompts: Sequence[Prompt], folder: Path, stopped: str, terminal: Terminal) -> None:
    """Write and print all results, replacing earlier ones. stopped: why the run ended early, or an empty string."""
    report = make_report(pool, [prompt.id for prompt in prompts], stopped)
    with writing("the results", folder):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for prompt in prompts:
            _write_json(folder / FOLDER / f"{prompt.id:06}.json", make_problem_result(pool, prompt))
        _write_json(folder / "report.json", report)
    print_report(report, terminal)
    terminal.write(f"written: {folder / 'report.json'}, {folder / FOLDER}")


def _write_json(path: Path, value: Any) -> None:
    """NaN becomes null."""
    replace_file(path, [msgspec.json.format(msgspec.json.encode(value), indent=1), b"\n"])


def make_problem_result(pool: Pool, prompt: Prompt) -> dict[str, Any]:
    """Content of problems/ID.json."""
    choice = pool.choices.get(prompt.id)
    chosen = pool.candidates[choice.candidate] if choice and choice.candidate else None
    return {
        "problem": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.content,
        "ground_truth": prompt.ground_truth,
        "chosen": chosen.key if chosen else None,
        "how": choice.how if choice else None,
        "answer": chosen.answer if chosen else None,
        "solution": chosen.summary if chosen else None,
        "right": chosen.right if chosen else None,
        "candidates": [_make_candidate_result(pool, one) for one in pool.candidates_of_problem(prompt.id, failed=True)],
        "matches": [_fields(match) for (problem, _), match in sorted(pool.matches.items()) if problem == prompt.id],
    }


def _make_candidate_result(pool: Pool, candidate: Candidate) -> dict[str, Any]:
    """A candidate without its messages, with its verdicts and the usage of all its calls."""
    judgement = pool.judgements.get(candidate.key)
    verdicts = [_fields(verdict) for verdict in pool.verdicts_of(candidate.key)]
    fields = _fields(candidate)
    del fields["messages"], fields["asked"]
    return {
        **fields,
        "right": candidate.right,
        "verdicts": [{key: one[key] for key in ("vote", "upheld", "report", "failure")} for one in verdicts],
        "judgement": None if judgement is None else _fields(judgement),
        **vars(pool.usage[candidate.key]),
    }


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "kind"}


def make_report(pool: Pool, problems: Sequence[int], stopped: str) -> dict[str, Any]:
    """Content of report.json (docs/evolving.md)."""
    candidates = [one for problem in problems for one in pool.candidates_of_problem(problem)]
    graded = [one for one in candidates if one.right is not None]
    choices = [pool.choices[problem].candidate if problem in pool.choices else None for problem in problems]
    table = metrics.tabulate_verdicts(pool, graded)
    return {
        "rounds": [
            metrics.summarize_round(pool, problems, number)
            for number in sorted({one.place.round for one in candidates})
        ],
        "chosen": estimate_mean([metrics.accuracy_of(pool.candidates.get(key or "")) for key in choices]),
        "table": table,
        "calibration": _calibration(pool, graded, table),
        "roles": sum_role_costs(pool),
        "failures": count_failures(pool),
        "halted": stopped,
    }


def _calibration(pool: Pool, graded: Sequence[Candidate], table: dict[str, int]) -> dict[str, Any] | None:
    """How well votes predict the truth; None if no candidate has both."""
    by_problem: dict[int, list[GradedJudgement]] = defaultdict(list)
    for candidate in graded:
        judgement = pool.judgements.get(candidate.key)
        if judgement is not None and judgement.votes:
            by_problem[candidate.place.problem].append((judgement, bool(candidate.right)))
    votes = [one for own in by_problem.values() for one in own]
    if not votes:
        return None
    roc, most_votes = metrics.roc_curve(votes), max(judgement.votes for judgement, _ in votes)
    counts = np.array([len(own) for own in by_problem.values()])
    right = np.array([sum(right for _, right in own) for own in by_problem.values()])
    passes = pass_at_k(counts, right, int(counts.max()))
    sizes = range(1, int(counts.max()) + 1)
    return {
        "candidates": len(votes),
        "single": metrics.confusion_of_votes(votes),
        "majority": ConfusionMatrix(
            table["right_for"], table["wrong_for"], table["right_against"], table["wrong_against"]
        ),
        "roc": roc,
        "auc": metrics.area_under_curve(roc),
        "best_of": {n: estimate_mean([metrics.best_of_n(own, n) for own in by_problem.values()]) for n in sizes},
        "oracle": {n: estimate_mean(passes[:, n - 1].tolist()) for n in sizes},
        "votes": {k: metrics.majority_of_k(votes, k).balanced_accuracy for k in range(1, most_votes + 1)},
    }


def sum_role_costs(pool: Pool) -> dict[str, dict[str, float]]:
    """Calls (including failed ones), tokens, money and seconds by role. Seconds are summed; calls overlap."""
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
    """Number of failures by kind. Failures are excluded from all accuracies."""
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
        accuracies = "".join(f"{_format(summary[name]):24}" for name in ACCURACIES)
        lines.append(f"{summary['round']:5}  {accuracies.rstrip()}")
    table = report["table"]
    lines += [
        f"final choice: {_format(report['chosen'])}",
        "",
        "policy \\ verifiers     for  against",
        f"right             {table['right_for']:8} {table['right_against']:8}",
        f"wrong             {table['wrong_for']:8} {table['wrong_against']:8}",
        *(_calibration_lines(report["calibration"]) if report["calibration"] else []),
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


def _calibration_lines(calibration: dict[str, Any]) -> list[str]:
    def listed(values: dict[int, float]) -> str:
        return "  ".join(f"{n}: {value:.3f}" for n, value in values.items())

    single = calibration["single"]
    best_of, oracle = ({n: estimate.value for n, estimate in calibration[key].items()} for key in ("best_of", "oracle"))
    return [
        "",
        f"single votes for      {single.true_positive_rate:.3f} of the right solutions, "
        f"{single.false_positive_rate:.3f} of the wrong ones",
        f"ROC AUC of vote share {calibration['auc']:.3f} (random: 0.5)",
        f"best of n by votes    {listed(best_of)}",
        f"oracle of n           {listed(oracle)}",
        f"majority of k votes   {listed(calibration['votes'])}",
    ]


def _format(estimate: Estimate | None) -> str:
    """`0.812 (0.750 to 0.868)`"""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
