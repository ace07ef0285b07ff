"""Measure how often graders and judges agree with labelled answers, in the same processes as in a run.

    alphaapollo audit-graders DATA [KEY=VALUE ...] [--data_source rubric] [--json]

DATA is a data file, e.g. jsonl or parquet. Its rows have `data_source`, `response`, `label` (or `is_correct`: true,
false, or a number from 0 to 1) and, if the grader needs them, `prompt`, `ground_truth` and `rubric`. Rows with
`prompt`, `chosen` and `rejected` are pairs, which the pairwise judge compares. KEY=VALUE sets keys of `reward` and
`custom_reward_function`. A failure is a row without a verdict; failures are counted separately, with their reasons.
`alphaapollo audit RUN` is another command: it finds what a policy exploits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import CustomRewardFunction
from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.reward import ServerReward
from alphaapollo.data.files import BadRow, read_rows_leniently
from alphaapollo.rewards.answers import find_marked_answer
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rewards.registry import check_judges, check_prompts_are_gradable
from alphaapollo.types import JsonObject, Prompt, Score
from alphaapollo.utils.json_types import finite_or_none

MAX_SHOWN = 160  # printed characters of an answer
CONSISTENT = "pairwise/consistent"  # component of the pairwise judge

LabelledAnswer = tuple[Prompt, str, float]  # the response, and whether, or how far, it is right


class AuditConfig(Section):
    """Keys that the audit accepts."""

    reward: ServerReward = ServerReward()
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()


def read_labelled_answers(path: str, data_source: str = "") -> list[LabelledAnswer]:
    """Read labelled answers or pairs. The ground truth of a pair is the other answer. A non-empty `data_source`
    replaces that of every row. Raises ValueError if the file cannot be read, or a row is malformed."""
    answers = list[LabelledAnswer]()
    for index, row in enumerate(read_rows_leniently(path)):
        if isinstance(row, BadRow):
            raise ValueError(str(row))
        if "chosen" in row and "response" not in row:
            pair = {"response": row["chosen"], "ground_truth": row.get("rejected"), "label": 1}
            row = {**row, "data_source": "pairwise", **pair}
        elif data_source:
            row["data_source"] = data_source
        response, label = row.pop("response", None), row.pop("is_correct", row.pop("label", None))
        source, content = row.pop("data_source", None), row.pop("prompt", None)
        is_label = isinstance(label, int | float) and 0 <= label <= 1
        if not isinstance(response, str) or not isinstance(source, str) or not is_label:
            raise ValueError(
                f"{path}, row {index}: data_source={source!r:.80}, response={response!r:.80} and label={label!r:.80} "
                "must be two texts and true, false or a number from 0 to 1."
            )
        truth, columns = row.pop("ground_truth", None), (row.pop("extra_info", None) or {}) | row
        answers.append((Prompt(index, source, content or "", truth, columns), response, float(label)))
    return answers


async def grade(answers: Sequence[LabelledAnswer], config: AuditConfig) -> list[Score]:
    """Grade all answers, in grader processes or by the judge."""
    client = RewardClient(config.reward, config.custom_reward_function)
    await client.start()
    try:
        return await asyncio.gather(*(client.score(prompt, response) for prompt, response, _ in answers))
    finally:
        await client.close()


def compute_statistics(scores: Sequence[Score], labels: Sequence[float]) -> JsonObject:
    """Compare scores with labels, both from 0 to 1. An answer counts as right above 0.5. Failed scores are left out.

    agreement, interval: share of equal verdicts, with its 95 % Wilson interval. kappa: Cohen's (p_o - p_e) / (1 - p_e),
    where p_e is the agreement of independent verdicts that are as often right; None if all labels are equal.
    components: {name: [mean, Pearson correlation with the label]}; the correlation is None if either is constant.
    """
    graded = [(score, label) for score, label in zip(scores, labels, strict=True) if not score.outcome.failed]
    called = np.array([_is_called_right(score) for score, _ in graded], bool)
    is_right = np.array([label > 0.5 for _, label in graded], bool)
    counts = {
        "rows": len(scores),
        "failures": len(scores) - len(graded),
        "false_positives": int((called & ~is_right).sum()),
        "false_negatives": int((is_right & ~called).sum()),
    }
    if not graded:
        return counts
    num_equal, count = int((called == is_right).sum()), len(graded)
    observed, share, share_called = num_equal / count, float(is_right.mean()), float(called.mean())
    by_chance = share * share_called + (1 - share) * (1 - share_called)
    table = pd.DataFrame([score.components | {"reward": score.reward, "label": label} for score, label in graded])
    names, correlations = table.columns.difference(["accuracy", "label"]), table.astype(float).corr()["label"]
    return counts | {
        "agreement": observed,
        "interval": [*binomtest(num_equal, count).proportion_ci(method="wilson")],
        "kappa": None if share in (0, 1) else (observed - by_chance) / (1 - by_chance),
        "components": {name: [float(table[name].mean()), finite_or_none(correlations[name])] for name in names},
    }


def _is_called_right(score: Score) -> bool:
    return (score.reward if score.accuracy is None else score.accuracy) > 0.5


def _print_disagreement(answer: LabelledAnswer, score: Score) -> None:
    """Print an answer that failed, or on which verdict and label differ."""
    prompt, response, label = answer
    is_right = label > 0.5
    if not score.outcome.failed and is_right == _is_called_right(score):
        return
    kind = "failure" if score.outcome.failed else f"false {'negative' if is_right else 'positive'}"
    marked = find_marked_answer(response)
    shown = " ".join((response if marked is None else marked).split())[-MAX_SHOWN:]
    reason = f": {score.reason}" if score.reason else ""
    truth = " ".join((prompt.ground_truth_text or "").split())[-MAX_SHOWN:]
    line = f"row {prompt.id}, {kind}{reason}\n  truth  {truth}\n  answer {shown}"
    print(line.encode("utf-8", "backslashreplace").decode())  # answers may contain lone surrogates


def _print_statistics(report: JsonObject, scores: Sequence[Score]) -> None:
    for reason, count in Counter(score.reason for score in scores if score.outcome.failed).most_common():
        print(f"{count} failures: {reason}")
    if "agreement" in report:
        columns = ["mean", "correlation with the label"]
        print(pd.DataFrame.from_dict(report["components"], "index", float, columns).round(3).to_string())
        if CONSISTENT in report["components"]:
            print(f"decided by the order of the answers: {1 - report['components'][CONSISTENT][0]:.1%} of the pairs")
        low, high = report["interval"]
        kappa = "" if report["kappa"] is None else f", kappa {report['kappa']:.3f}"
        print(f"agreement {report['agreement']:.2%} (95 % interval {low:.2%} to {high:.2%}){kappa}")
    print(
        f"{report['rows']} rows, {report['false_positives']} false positives, {report['false_negatives']} false "
        f"negatives, {report['failures']} failures, {report['rows_per_s']:.0f} rows/s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if done, 1 if the input is invalid or every row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="data file of labelled answers or pairs")
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON on the last line")
    parser.add_argument("--data_source", default="", help="grade all answers as rows of this data source")
    args, keys = parser.parse_known_args(argv)
    try:
        config = load_config(AuditConfig, "eval", keys)
        answers = read_labelled_answers(args.data, args.data_source)
        prompts = [prompt for prompt, _, _ in answers]
        if not config.custom_reward_function.path:
            check_prompts_are_gradable(prompts)
        check_judges(prompts, config.reward, bool(config.custom_reward_function.path))
        start = time.perf_counter()
        scores = asyncio.run(grade(answers, config))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    for answer, score in zip(answers, scores, strict=True):
        _print_disagreement(answer, score)
    report = compute_statistics(scores, [label for _, _, label in answers])
    report["rows_per_s"] = round(len(answers) / (time.perf_counter() - start), 1)
    _print_statistics(report, scores)
    if args.json:
        print(json.dumps(report))
    return int("agreement" not in report)
