"""Read and write results.jsonl of main_generation: one line per sample, in the format of the rollout log.

When all samples of a prompt are graded, their lines are appended. If the process is killed, the next run
removes incomplete lines and prompts without all samples, and generates these prompts again with the same random seeds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alphaapollo.evaluation.metrics import SampleResult, read_sample_result
from alphaapollo.runs.rollout_log import format_trajectory_lines, replace_images, save_image
from alphaapollo.types import Prompt, TrajectoryGroup
from alphaapollo.utils.disk import explain_write_errors, replace_file


@dataclass(frozen=True)
class FinishedResults:
    """Results in results.jsonl that an earlier process wrote for prompts whose samples are all graded."""

    results: list[SampleResult] = field(default_factory=list)
    line_numbers: frozenset[int] = frozenset()  # lines of the file that contain `results`
    num_dropped: int = 0  # number of other lines in the file

    @property
    def problem_ids(self) -> set[int]:
        """Ids of the prompts whose samples are all finished."""
        return {result.problem_id for result in self.results}


def read_finished_results(path: Path, prompts: Mapping[int, Prompt], num_samples: int) -> FinishedResults:
    """Read the results of prompts that have all `num_samples` samples. Does not change the file.

    prompts: prompt id -> prompt. Raises ValueError if the prompt or ground truth of a line differs from `prompts`.
    """
    if not path.exists():
        return FinishedResults()
    groups: dict[int, dict[int, tuple[int, SampleResult]]] = defaultdict(dict)
    num_lines = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            num_lines += 1
            result = _parse_result_line(line, prompts, path)
            if result is not None:
                groups[result.problem_id].setdefault(result.sample_index, (number, result))
    complete = [group for group in groups.values() if set(group) == set(range(num_samples))]
    return FinishedResults(
        results=[result for group in complete for _, result in group.values()],
        line_numbers=frozenset(number for group in complete for number, _ in group.values()),
        num_dropped=num_lines - num_samples * len(complete),
    )


def _parse_result_line(line: bytes, prompts: Mapping[int, Prompt], path: Path) -> SampleResult | None:
    """Parse a line of results.jsonl; None if it is incomplete. Raises ValueError if its prompt is not in `prompts`."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        result, truth = read_sample_result(record), record["ground_truth"]
        content = record["prompt"] if record["row_prompt"] is None else record["row_prompt"]
    except (ValueError, KeyError, TypeError):  # the process or machine died while writing
        return None
    number, prompt = result.problem_id, prompts.get(result.problem_id)
    same = prompt is not None and truth in (prompt.ground_truth_in_files, prompt.ground_truth_text)
    if prompt is None or not same or replace_images(prompt.content) != content:
        raise ValueError(
            f"prompt {number} in {path} differs from row {number} of data.path, so these results belong to "
            "other data. Set another trainer.experiment_name, or trainer.resume_mode=disable to start from scratch."
        )
    return result


@contextmanager
def open_results_writer(path: Path, finished: FinishedResults) -> Iterator[Callable[[TrajectoryGroup], None]]:
    """Open results.jsonl for appending, after removing the lines of unfinished prompts.

    Context manager that yields a function `append(group)`, which writes the lines of one prompt's samples.
    """
    with explain_write_errors("the results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if finished.num_dropped:
            with path.open("rb") as old:
                replace_file(path, (line for number, line in enumerate(old) if number in finished.line_numbers))
        file = path.open("a", encoding="utf-8")

    def append(group: TrajectoryGroup) -> None:
        with explain_write_errors("the results", path):
            file.writelines(format_trajectory_lines(0, [group], partial(save_image, path.parent)))
            file.flush()

    with file:
        yield append
