"""Compute, write and print the results of a self-evolution run: report.json and problems/ID.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from alphaapollo.observability.majority_vote import majority_accuracy
from alphaapollo.observability.sample_metrics import Estimate, estimate_means
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.evolving.pool import Candidate, Judgement, Pool, Usage, clean_texts
from alphaapollo.types import JsonObject, Prompt
from alphaapollo.utils.disk import explain_write_errors, replace_file

FOLDER = "problems"
ACCURACIES = ("chosen", "sampled", "majority", "oracle")


def summarize_round(pool: Pool, problems: Sequence[int], round_number: int) -> JsonObject:
    """Return accuracies after a round (means over problems with 95 % intervals), and a table of its verdicts.

    chosen: accuracy of the best candidate so far by votes and brevity. sampled: accuracy of the round's candidates.
    majority: accuracy of the most frequent answer so far (self-consistency). oracle: share of problems with a right
    candidate so far. Candidates without a grade are excluded. An accuracy without candidates is None.
    """
    graded = [
        [candidate for candidate in pool.get_candidates(problem, round_number + 1) if candidate.is_right is not None]
        for problem in problems
    ]
    so_far = [candidates for candidates in graded if candidates]
    of_round = [
        made
        for candidates in so_far
        if (made := [candidate for candidate in candidates if candidate.position.round == round_number])
    ]
    majorities = [
        majority_accuracy(
            [candidate.answer for candidate in candidates],
            [float(bool(candidate.is_right)) for candidate in candidates],
        )
        for candidates in so_far
    ]
    best = [ranked[0] for problem in problems if (ranked := pool.rank_candidates(problem, round_number + 1))]
    return {
        "round": round_number,
        "chosen": estimate_mean([candidate.is_right for candidate in best]),
        "sampled": estimate_mean(
            [sum(bool(candidate.is_right) for candidate in candidates) / len(candidates) for candidates in of_round]
        ),
        "majority": estimate_mean(majorities),
        "oracle": estimate_mean([float(any(candidate.is_right for candidate in candidates)) for candidates in so_far]),
        "table": tabulate_verdicts(pool, [candidate for candidates in of_round for candidate in candidates]),
    }


def compute_round_metrics(pool: Pool, problems: Sequence[int], round_number: int) -> dict[str, float]:
    """Return the metrics of a round for metrics.jsonl. An accuracy without graded problems is NaN."""
    summary, metrics = summarize_round(pool, problems, round_number), dict[str, float]()
    for name in ACCURACIES:
        for suffix, field in (("", "value"), ("/low", "low"), ("/high", "high")):
            value = getattr(summary[name], field, None)
            metrics[f"accuracy/{name}{suffix}"] = math.nan if value is None else value
    metrics |= {f"table/{name}": float(count) for name, count in summary["table"].items()}
    candidates = [candidate for candidate in pool.candidates.values() if candidate.position.round == round_number]
    # includes calls for incomplete candidates
    usage = sum((usage for owner, usage in pool.usage.items() if f".r{round_number}." in owner), Usage())
    metrics["candidates/made"] = float(len(candidates))
    metrics["candidates/failed"] = float(sum(bool(candidate.failure) for candidate in candidates))
    return metrics | {f"cost/{name}": float(value) for name, value in asdict(usage).items()}


def tabulate_verdicts(pool: Pool, candidates: Sequence[Candidate]) -> dict[str, int]:
    """Count right and wrong candidates by their majority vote (for, against); `unjudged` are those without votes."""
    counts = dict.fromkeys(("right_for", "right_against", "wrong_for", "wrong_against", "unjudged"), 0)
    for candidate in candidates:
        judgement = pool.judgements.get(candidate.key)
        if judgement is None or judgement.is_accepted is None:
            counts["unjudged"] += 1
        else:
            counts[f"{'right' if candidate.is_right else 'wrong'}_{'for' if judgement.is_accepted else 'against'}"] += 1
    return counts


def estimate_mean(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean of the known values (neither None nor NaN), with its 95 % bootstrap interval; None if there are
    none."""
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    return estimate_means(np.array(numbers, dtype=float)[:, None])[0]


def compute_calibration(judgements: Sequence[tuple[Judgement, bool]]) -> JsonObject | None:
    """Return how well votes predict the grades; None without judgements that have votes.

    judgements: each with whether its candidate is right. `single` counts votes: positive is a vote for a candidate,
    true is a vote that agrees with the grade. `auc`: ROC AUC of accepting candidates by their share of votes, i.e. the
    share of pairs of a right and a wrong candidate in which the right one has more votes, ties counting half.
    """
    right, wrong = (
        [judgement for judgement, good in judgements if good is kind and judgement.num_votes] for kind in (True, False)
    )
    signs = np.sign(np.subtract.outer(*([judgement.share_of_votes for judgement in group] for group in (right, wrong))))
    single = {
        "true_positive": sum(judgement.votes_for for judgement in right),
        "false_positive": sum(judgement.votes_for for judgement in wrong),
        "false_negative": sum(judgement.votes_against for judgement in right),
        "true_negative": sum(judgement.votes_against for judgement in wrong),
    }
    auc = float((1 + signs.mean()) / 2) if signs.size else math.nan
    return {"candidates": len(right) + len(wrong), "single": single, "auc": auc} if right or wrong else None


def write_results(pool: Pool, prompts: Sequence[Prompt], folder: Path, stop_reason: str, terminal: Terminal) -> None:
    """Write and print all results; existing files are replaced. stop_reason: why the run ended early, or empty."""
    report = make_evolution_report(pool, [prompt.id for prompt in prompts], stop_reason)
    with explain_write_errors("the results", folder):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for prompt in prompts:
            _write_json(folder / FOLDER / f"{prompt.id:06}.json", make_problem_result(pool, prompt))
        _write_json(folder / "report.json", report)
    print_report(report, terminal)
    terminal.write(f"written: {folder / 'report.json'}, {folder / FOLDER}")


def _write_json(path: Path, value: object) -> None:
    text = msgspec.json.encode(clean_texts(msgspec.to_builtins(value)))
    replace_file(path, [msgspec.json.format(text, indent=1), b"\n"])


def make_problem_result(pool: Pool, prompt: Prompt) -> JsonObject:
    """Return the results of one problem, the content of problems/ID.json."""
    chosen = next(iter(pool.rank_candidates(prompt.id)), None)
    candidates = pool.get_candidates(prompt.id, include_failed=True)
    return {
        "problem": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.content,
        "ground_truth": prompt.ground_truth_in_files,
        "chosen": chosen.key if chosen else None,
        "answer": chosen.answer if chosen else None,
        "solution": chosen.summary if chosen else None,
        "right": chosen.is_right if chosen else None,
        "candidates": [_describe_candidate(pool, candidate) for candidate in candidates],
    }


def _describe_candidate(pool: Pool, candidate: Candidate) -> JsonObject:
    """Return a candidate's fields for problems/ID.json, with its verdicts and usage and without its messages."""
    fields, judgement = msgspec.to_builtins(candidate), msgspec.to_builtins(pool.judgements.get(candidate.key))
    verdicts = judgement.pop("verdicts") if judgement else []
    hidden = ("kind", "messages", "num_prompt_messages")
    return {
        **{name: value for name, value in fields.items() if name not in hidden},
        "right": candidate.is_right,
        "verdicts": [{name: verdict[name] for name in ("vote", "report", "failure")} for verdict in verdicts],
        "judgement": judgement,
        **vars(pool.usage[candidate.key]),
    }


def make_evolution_report(pool: Pool, problems: Sequence[int], stop_reason: str) -> JsonObject:
    """Return the results of the run, the content of report.json (docs/evolving.md)."""
    candidates = [candidate for problem in problems for candidate in pool.get_candidates(problem)]
    graded = [candidate for candidate in candidates if candidate.is_right is not None]
    judged = [
        (pool.judgements[candidate.key], bool(candidate.is_right))
        for candidate in graded
        if candidate.key in pool.judgements
    ]
    numbers = sorted({candidate.position.round for candidate in candidates})
    rounds = [summarize_round(pool, problems, number) for number in numbers]
    return {
        "rounds": rounds,
        "chosen": rounds[-1]["chosen"] if rounds else None,
        "table": tabulate_verdicts(pool, graded),
        "calibration": compute_calibration(judged),
        "roles": sum_role_costs(pool),
        "failures": count_failures(pool),
        "halted": stop_reason,
    }


def sum_role_costs(pool: Pool) -> dict[str, dict[str, float]]:
    """Return calls (failed ones included), tokens, money and seconds by role. Seconds of parallel calls add up."""
    names = ("calls", "failed", "tokens_read", "tokens_written", "money", "seconds")
    rows = [
        (call.role, 1, int(bool(call.failure)), call.prompt_tokens, call.tokens, call.money, call.seconds)
        for call in pool.all_calls
    ]
    sums = pd.DataFrame(rows, columns=["role", *names]).groupby("role").sum().round({"money": 9, "seconds": 3})
    costs = sums.to_dict("index").items()
    return {str(role): {str(name): value for name, value in role_costs.items()} for role, role_costs in costs}


def count_failures(pool: Pool) -> dict[str, int]:
    """Count failures by kind (calls, candidates, verdicts, ...); kinds without failures are left out."""
    candidates = pool.candidates.values()
    counts = {
        "calls": sum(bool(call.failure) for call in pool.all_calls),
        "candidates": sum(bool(candidate.failure) for candidate in candidates),
        "verdicts": sum(
            bool(verdict.failure) for judgement in pool.judgements.values() for verdict in judgement.verdicts
        ),
        "grades": sum(candidate.is_right is None for candidate in candidates if candidate.grade),
    }
    return {name: count for name, count in counts.items() if count}


def print_report(report: JsonObject, terminal: Terminal) -> None:
    """Print accuracies by round, right and wrong solutions by verdict, the calibration, and the cost per role."""
    rounds = pd.DataFrame(report["rounds"], columns=["round", *ACCURACIES])
    table, calibration = report["table"], report["calibration"]
    verdicts = {vote: [table[f"right_{vote}"], table[f"wrong_{vote}"]] for vote in ("for", "against")}
    lines = ["", rounds.to_string(index=False, formatters=dict.fromkeys(ACCURACIES, _format_estimate))]
    lines += [f"final choice: {_format_estimate(report['chosen'])}", "", "policy \\ verifiers"]
    lines.append(pd.DataFrame(verdicts, index=["right", "wrong"]).to_string())
    if calibration:
        votes = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in calibration["single"].items())
        lines += ["", f"single votes: {votes}", f"ROC AUC of vote share {calibration['auc']:.3f} (random: 0.5)"]
    if report["roles"]:
        lines += ["", pd.DataFrame.from_dict(report["roles"], orient="index").to_string()]
    if report["failures"]:
        counted = ", ".join(f"{count} {name}" for name, count in report["failures"].items())
        lines.append(f"failures (excluded from all accuracies): {counted}")
    terminal.write("\n".join(lines))


def _format_estimate(estimate: Estimate | None) -> str:
    """Return the text of an estimate, e.g. `0.812 (0.750 to 0.868)`."""
    if estimate is None or estimate.low is None:
        return "-" if estimate is None else f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
