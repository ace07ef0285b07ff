"""`alphaapollo audit RUN`: what a policy exploits, from its rollouts (docs/debugging.md#find-exploits)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.observability.terminal import Terminal, shorten_text
from alphaapollo.plugins.sweeps.answer_table import AnswerGroup, AuditedAnswer
from alphaapollo.plugins.sweeps.exploits import find_exploits
from alphaapollo.plugins.viewer.print_samples import LoggedSample, find_samples_file, read_groups
from alphaapollo.plugins.viewer.texts import list_message_texts
from alphaapollo.types import JsonObject
from alphaapollo.utils.hub import expand_home

MIN_ITERATIONS = 10  # iterations to compare: a tenth of a run, and in a short run up to as many, at most a third of it
MAX_ANSWERS = 8192  # of each part; bounds memory
MAX_CHARS = 160


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns exit code 2 if the run has no rollouts of training."""
    parser = make_parser("audit", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=expand_home, help="a run's folder, also of a run that has not ended")
    help_text = "compare the first N iterations with the last N, at most half of the run (default: docs/debugging.md)"
    parser.add_argument("--last", type=int, metavar="N", help=help_text)
    parser.add_argument("--top", type=int, metavar="N", default=10, help="print at most N findings (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    run = options.run
    if options.last is not None and options.last < 1:
        raise ValueError(f"--last={options.last} must be at least 1.")
    find_samples_file(run, None, validation=False)  # raises ValueError for a folder without samples
    files, validations = (sorted((run / "rollouts").glob(f"{kind}_[0-9]*.jsonl")) for kind in ("step", "val"))
    count = options.last or max(len(files) // 10, min(MIN_ITERATIONS, len(files) // 3))
    count = max(1, min(count, len(files) // 2))
    late = read_answers(files[: -count - 1 : -1])
    if not late:
        raise ValueError(f"{run} has no graded answers in rollouts/step_*.jsonl. Give the folder of a run of main_ppo.")
    early = read_answers(files[: min(count, len(files) - 1)])
    findings = find_exploits(early, late, read_answers(validations[:-1][:1]), read_answers(validations[-1:]))
    parts = {"first": describe_part(early), "last": describe_part(late)}
    shown = [{**asdict(one), "answers": [*map(make_row, one.answers)]} for one in findings[: options.top]]
    if options.json:
        print(json.dumps(parts | {"findings": shown}))
    else:
        print_findings(shown, [*parts.values()])
    return 0


def read_answers(files: Sequence[Path]) -> list[AnswerGroup]:
    """Read the groups of files, one file after the other, until there are enough answers. Leaves out failed samples."""
    groups: list[AnswerGroup] = []
    for path in files:
        if sum(map(len, groups)) < MAX_ANSWERS:
            found = ([make_answer(one) for one in group if not one[0].outcome.failed] for group in read_groups(path))
            groups += filter(None, found)
    return groups


def make_answer(sample: LoggedSample) -> AuditedAnswer:
    """Convert a sample of the rollout log."""
    result, record = sample
    return AuditedAnswer(record["step"], "\n".join(list_message_texts(record["prompt"])), record["text"], result)


def describe_part(groups: Sequence[AnswerGroup]) -> JsonObject:
    """Return the first and the last iteration of a part, and its number of answers."""
    steps = [group[0].step for group in groups] or [0]
    return {"from": min(steps), "to": max(steps), "answers": sum(map(len, groups))}


def make_row(answer: AuditedAnswer) -> JsonObject:
    """Return the identity, the reward and the shortened text of an answer."""
    result = answer.result
    identity = {"iteration": answer.step, "prompt": result.problem_id, "sample": result.sample_index}
    return {**identity, "reward": round(result.reward, 4), "text": shorten_text(answer.text, MAX_CHARS)}


def print_findings(findings: Sequence[JsonObject], parts: Sequence[JsonObject]) -> None:
    """Print the findings, each with the answers that show it."""
    terminal = Terminal(highlight=False)
    texts = ["{answers} answers of iterations {from} to {to}".format_map(part) for part in parts]
    terminal.write(f"compared: {' with '.join(texts)}")
    for number, one in enumerate(findings, 1):
        terminal.write("\n{}. {category}: {summary} (effect {effect:.2f}, z {z:.1f})".format(number, **one))
        for row in one["answers"]:
            place = "iteration {iteration}, prompt {prompt}, sample {sample}, reward {reward:g}".format_map(row)
            terminal.write(f"   {place}: {row['text']!r}")
    terminal.write("\nRead answers: alphaapollo samples RUN" if findings else "Nothing found.")
