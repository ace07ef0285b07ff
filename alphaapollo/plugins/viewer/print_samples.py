"""Print the samples of a run side by side: `alphaapollo samples`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.observability.sample_metrics import SampleResult, read_sample_result
from alphaapollo.observability.terminal import Terminal, get_last_message, shorten_text
from alphaapollo.runs.checkpoint_folder import check_format
from alphaapollo.types import Outcome
from alphaapollo.utils.disk import open_regular, parse_json
from alphaapollo.utils.hub import expand_home
from alphaapollo.utils.json_types import JsonObject

COLUMN_WIDTH = 38  # minimum number of characters per sample


HEADING_CHARS = 400  # longer prompts, ground truths and reasons of failures are shortened


LoggedSample = tuple[SampleResult, JsonObject]  # and its line in the file


@report_refusals
def print_samples(argv: Sequence[str]) -> int:
    """Print the groups of a step. Returns exit code 2 if the run has no samples of this step."""
    parser = make_parser("samples", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=expand_home, help="a run's folder, also of a run that has not ended")
    parser.add_argument("--step", type=int, help="iteration (default: the last one)")
    parser.add_argument("--val", action="store_true", help="samples of the validation, not of training")
    parser.add_argument("--sort", choices=["reward"], help="print the prompts with the lowest mean reward first")
    parser.add_argument("--groups", type=int, default=4, help="number of prompts (default 4)")
    parser.add_argument("--chars", type=int, default=600, help="longer texts are shortened (default 600)")
    options, terminal = parser.parse_args(argv), Terminal(highlight=False)
    path = find_samples_file(options.run, options.step, options.val)
    groups: Iterator[list[LoggedSample]] = read_groups(path)
    if options.sort:
        groups = iter(sorted(groups, key=compute_mean_reward))
    terminal.write(str(path))
    for group in islice(groups, options.groups):
        print_group(group, options.chars, terminal)
    return 0


def find_samples_file(run: Path, step: int | None, validation: bool) -> Path:
    """Return the newest file (or that of `step`) with samples of training, of a validation, or of main_generation."""
    check_format(run)
    number = "[0-9]*" if step is None else f"{step:06d}"
    names = [f"rollouts/step_{number}.jsonl", f"rollouts/val_{number}.jsonl", "results.jsonl"]
    files = [sorted(run.glob(name)) for name in (names[1:2] if validation else names)]
    newest = next((found[-1] for found in files if found), None)
    if newest is None:
        what = "validation samples" if validation else "samples"
        when = "" if step is None else f" of step {step}"
        raise ValueError(
            f"{run} has no {what}{when}. main_ppo writes rollouts/ in each iteration and validation (data.val_files), "
            "main_sft in validations with data.val_prompts, and main_generation writes results.jsonl."
        )
    return newest


def read_groups(path: Path) -> Iterator[list[LoggedSample]]:
    """Yield the samples of each prompt, the highest reward first. Skips a last line that is not complete yet."""
    with open_regular(path) as file:
        records = (parse_json(line) for line in file if line.endswith(b"\n"))
        samples = ((read_sample_result(record), record) for record in records)
        for _, group in groupby(samples, key=lambda sample: sample[0].problem_id):
            yield sorted(group, key=lambda sample: (sample[0].outcome.failed, -sample[0].reward))


def compute_mean_reward(group: Sequence[LoggedSample]) -> float:
    """Return the mean reward of the samples that did not fail; infinity if all failed."""
    rewards = [result.reward for result, _ in group if not result.outcome.failed]
    return fmean(rewards) if rewards else float("inf")


def print_group(group: Sequence[LoggedSample], max_chars: int, terminal: Terminal) -> None:
    """Print the prompt, and as many samples beside each other as the terminal is wide for."""
    result, record = group[0]
    equal = ", all equal" if result.reward == group[-1][0].reward and len(group) > 1 else ""
    truth = shorten_text(f"ground truth {record['ground_truth']}", HEADING_CHARS)
    reward = f"mean reward {compute_mean_reward(group):.3f}{equal}"
    terminal.write(f"\nprompt {result.problem_id} {result.data_source}   {truth}   {reward}")
    terminal.write(shorten_text(get_last_message(record["prompt"]), HEADING_CHARS) + "\n")
    columns = max(1, min(len(group), terminal.width // COLUMN_WIDTH))
    for start in range(0, len(group), columns):
        part = group[start : start + columns]
        table = Table(box=SIMPLE_HEAD, show_edge=False, width=len(part) * terminal.width // columns)
        for result, record in part:
            table.add_column(Text(shorten_text(describe_sample(result, record), HEADING_CHARS)), ratio=1)
        table.add_row(*(format_answer(record, max_chars) for _, record in part))
        terminal.print(table, "")


def format_answer(record: JsonObject, max_chars: int) -> Text:
    """Return the answer, and the reason of its score, e.g. what tests printed. If the environment replied, each turn
    and each message of a reply has a heading."""
    turns = record["turns"]
    parts: list[tuple[str, str]] = []
    for number, turn in enumerate(turns, 1):
        parts.append((f"turn {number}", turn.get("raw_text") or turn["text"]))
        parts += [(message["role"], get_last_message([message])) for message in turn["observation"] or ()]
    if len(turns) < 2 and len(parts) < 2:
        parts = [("", record["text"])]
    if record["reason"] and not Outcome(record["outcome"]).failed:
        parts.append(("reason of the score", record["reason"]))
    heads = ((f"[{head}]\n" if head else "", "bold") for head, _ in parts)
    texts = [shorten_text(text, max_chars) for _, text in parts]
    return Text("\n\n").join(Text.assemble(head, text) for head, text in zip(heads, texts, strict=True))


def describe_sample(result: SampleResult, record: JsonObject) -> str:
    """Return e.g. `sample 3: reward 0.500` and, on a second line, the components, the length and the stop reason."""
    score = result.failure_reason if result.outcome.failed else f"reward {result.reward:.3f}"
    components = [f"{name} {value:g}" for name, value in record["components"].items() if value is not None]
    end = record["stop_reason"] if result.end == "done" else str(result.end).replace("_", " ")
    return f"sample {result.sample_index}: {score}\n{', '.join([*components, f'{result.num_tokens} tokens', end])}"
