"""What an evolution came to, as report.json and in the console."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphaapollo.algorithms.accuracy_estimates import pass_at_k
from alphaapollo.evaluation.figures import Figure
from alphaapollo.evolving.calibration import Confusion, Votes, area_under, best_of, confusion, majority_of, roc
from alphaapollo.evolving.figures import RoundFigures, Table, agreement, mean_figure, round_figures
from alphaapollo.evolving.pool import Pool
from alphaapollo.evolving.records import Candidate
from alphaapollo.observability.disk import writing
from alphaapollo.observability.json_values import finite
from alphaapollo.observability.terminal import Terminal


@dataclass(frozen=True)
class RoleCost:
    """What a role took."""

    calls: int
    failed: int
    tokens_read: int
    tokens_written: int
    money: float
    seconds: float  # of its calls, added up; they overlap


@dataclass(frozen=True)
class Calibration:
    """Of the verifiers, by candidates with votes and a truth."""

    candidates: int
    single: Confusion  # of each vote by itself
    majority: Confusion
    roc: list[tuple[float, float]]
    auc: float
    best_of: dict[int, Figure]  # n -> accuracy of the one with most votes among n of a problem's
    oracle: dict[int, Figure]  # n -> is any of n right?
    votes: dict[int, float]  # k -> balanced accuracy of the majority of k votes


@dataclass(frozen=True)
class Report:
    rounds: list[RoundFigures]
    chosen: Figure | None  # at the end, by evolving.select
    table: Table  # of all rounds
    calibration: Calibration | None  # None: no candidate has votes and a truth
    roles: dict[str, RoleCost]
    failures: dict[str, int]  # what could not be had -> how often
    halted: str


def make_report(pool: Pool, problems: Sequence[int], halted: str) -> Report:
    candidates = [one for problem in problems for one in pool.of_problem(problem)]
    graded = [one for one in candidates if one.right is not None]
    rounds = sorted({one.place.round for one in candidates})
    return Report(
        rounds=[round_figures(pool, problems, number) for number in rounds],
        chosen=mean_figure([_accuracy_of_choice(pool, problem) for problem in problems]),
        table=agreement(pool, graded),
        calibration=_calibration(pool, graded),
        roles=role_costs(pool),
        failures=failures(pool),
        halted=halted,
    )


def _accuracy_of_choice(pool: Pool, problem: int) -> float:
    choice = pool.choices.get(problem)
    chosen = pool.candidates[choice.candidate] if choice and choice.candidate else None
    return math.nan if chosen is None or chosen.right is None else float(chosen.right)


def _calibration(pool: Pool, graded: Sequence[Candidate]) -> Calibration | None:
    by_problem: dict[int, list[Votes]] = defaultdict(list)
    for one in graded:
        judgement = pool.judgements.get(one.key)
        if judgement is not None and judgement.right is not None:
            votes = Votes(judgement.votes_for, judgement.votes_against, bool(one.right))
            by_problem[one.place.problem].append(votes)
    everything = [votes for own in by_problem.values() for votes in own]
    if not everything:
        return None
    points, most = roc(everything), max(votes.count for votes in everything)
    largest = max(map(len, by_problem.values()))
    counts = np.array([len(own) for own in by_problem.values()])
    passes = pass_at_k(counts, np.array([sum(one.right for one in own) for own in by_problem.values()]), largest)
    sizes = range(1, largest + 1)
    return Calibration(
        candidates=len(everything),
        single=confusion(everything),
        majority=majority_table(everything),
        roc=points,
        auc=area_under(points),
        best_of=_figures({n: [best_of(own, n) for own in by_problem.values()] for n in sizes}),
        oracle=_figures({n: passes[:, n - 1].tolist() for n in sizes}),
        votes={k: majority_of(everything, k).balanced_accuracy for k in range(1, most + 1)},
    )


def majority_table(votes: Sequence[Votes]) -> Confusion:
    """Of the majorities as they were."""
    counts = Counter((one.right, one.votes_for > one.votes_against) for one in votes)
    return Confusion(counts[True, True], counts[False, True], counts[True, False], counts[False, False])


def _figures(values: dict[int, list[float]]) -> dict[int, Figure]:
    return {n: figure for n, own in values.items() if (figure := mean_figure(own)) is not None}


def role_costs(pool: Pool) -> dict[str, RoleCost]:
    """By role, those that failed with the others: they cost time, and calls."""
    by_role = defaultdict(list)
    for call in pool.all_calls:
        by_role[call.role].append(call)
    return {
        role: RoleCost(
            calls=len(calls),
            failed=sum(bool(call.failure) for call in calls),
            tokens_read=sum(call.prompt_tokens for call in calls),
            tokens_written=sum(call.tokens for call in calls),
            money=math.fsum(call.money for call in calls),
            seconds=round(math.fsum(call.seconds for call in calls), 3),
        )
        for role, calls in sorted(by_role.items())
    }


def failures(pool: Pool) -> dict[str, int]:
    """What could not be had; none of it is in any figure as wrong."""
    graded = [one.grade for one in pool.candidates.values() if one.grade]
    counts = {
        "calls": sum(bool(call.failure) for call in pool.all_calls),
        "candidates": sum(bool(one.failure) for one in pool.candidates.values()),
        "verdicts": sum(bool(one.failure) for own in pool.verdicts.values() for one in own.values()),
        "struck_out_verdicts": sum(one.upheld is False for own in pool.verdicts.values() for one in own.values()),
        "matches": sum(bool(match.failure) for match in pool.matches.values()),
        "grades": sum(grade.accuracy is None for grade in graded),
    }
    return {name: count for name, count in counts.items() if count}


def write_report(report: Report, folder: Path) -> Path:
    """report.json; whole or absent."""
    path, part = folder / "report.json", folder / ".report.json.part"
    with writing("the report", path):
        part.write_text(json.dumps(_plain(asdict(report)), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    return path


def _plain(value: Any) -> Any:
    """As JSON has it: nan is null."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return finite(value) if isinstance(value, float) else value


def print_report(report: Report, terminal: Terminal) -> None:
    """The rounds, the table, the verifiers, the costs."""
    lines = ["", "round  chosen                  sampled                 majority                oracle"]
    for own in report.rounds:
        figures = (own.chosen, own.sampled, own.majority, own.oracle)
        lines.append(f"{own.round:5}  " + "".join(f"{_figure(figure):24}" for figure in figures).rstrip())
    lines.append(f"chosen at the end: {_figure(report.chosen)}")
    table = report.table
    lines += [
        "",
        "policy \\ verifiers     for  against",
        f"right             {table.right_for:8} {table.right_against:8}",
        f"wrong             {table.wrong_for:8} {table.wrong_against:8}",
    ]
    if (calibration := report.calibration) is not None:
        single = calibration.single
        lines += [
            "",
            f"a verifier's vote: for {single.true_positive_rate:.3f} of the right, {single.false_positive_rate:.3f} of "
            f"the wrong; area under the ROC of the vote share {calibration.auc:.3f} (a coin: 0.5)",
            "best of n by votes  " + "  ".join(f"{n}: {figure.value:.3f}" for n, figure in calibration.best_of.items()),
            "oracle              " + "  ".join(f"{n}: {figure.value:.3f}" for n, figure in calibration.oracle.items()),
            "majority of k votes " + "  ".join(f"{k}: {value:.3f}" for k, value in calibration.votes.items()),
        ]
    lines += ["", "role                    calls  failed  tokens read  written     money   seconds"]
    for role, cost in report.roles.items():
        lines.append(
            f"{role:22} {cost.calls:6} {cost.failed:7} {cost.tokens_read:12,} {cost.tokens_written:8,} "
            f"{cost.money:9.4f} {cost.seconds:9.1f}"
        )
    if report.failures:
        counted = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.failures.items())
        lines.append(f"failed, and in no figure: {counted}")
    terminal.print("\n".join(lines), markup=False, soft_wrap=True)


def _figure(figure: Figure | None) -> str:
    """`0.812 (0.750 to 0.868)`"""
    if figure is None:
        return "-"
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} ({figure.low:.3f} to {figure.high:.3f})"
