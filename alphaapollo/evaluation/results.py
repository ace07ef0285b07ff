"""Read and write results.jsonl of a generation: one line per sample, in the format of the rollout log.

The lines of a group are appended when the group ends. A prompt is finished when all its samples have a line. After a
kill, incomplete lines and groups are removed, and their prompts are generated again with the same random draws.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from alphaapollo.evaluation.metrics import SampleResult, read_sample_result
from alphaapollo.observability.disk import explain_write_errors, replace_file
from alphaapollo.observability.rollout_log import format_trajectory_lines
from alphaapollo.types import Prompt, TrajectoryGroup


@dataclass(frozen=True)
class FinishedResults:
    """Results of finished prompts, written by an earlier process."""

    results: list[SampleResult] = field(default_factory=list)  # results of complete groups
    lines: frozenset[int] = frozenset()  # line numbers of `results`
    num_dropped: int = 0  # number of other lines

    @property
    def prompt_ids(self) -> set[int]:
        """Ids of finished prompts."""
        return {result.problem for result in self.results}


def read_finished_results(path: Path, prompts: Mapping[int, Prompt], num_samples: int) -> FinishedResults:
    """Read the results of finished prompts without changing the file. Raises ValueError if the prompt of a line is
    missing in `prompts` (by id), or has changed."""
    if not path.exists():
        return FinishedResults()
    groups: dict[int, dict[int, tuple[int, SampleResult]]] = defaultdict(dict)
    num_lines = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            num_lines += 1
            result = _read_line(line, prompts, path)
            if result is not None:
                groups[result.problem].setdefault(result.sample, (number, result))
    complete = [group for group in groups.values() if set(group) == set(range(num_samples))]
    return FinishedResults(
        results=[result for group in complete for _, result in group.values()],
        lines=frozenset(number for group in complete for number, _ in group.values()),
        num_dropped=num_lines - num_samples * len(complete),
    )


def _read_line(line: bytes, prompts: Mapping[int, Prompt], path: Path) -> SampleResult | None:
    """Parse a line. Returns None for an incomplete line. Raises ValueError if the line belongs to other data."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        result, truth = read_sample_result(record), record["ground_truth"]
        content = record["prompt"] if record["row_prompt"] is None else record["row_prompt"]
    except (ValueError, KeyError, TypeError):  # the process or machine died while writing
        return None
    prompt = prompts.get(result.problem)
    if prompt is None or (prompt.content, prompt.ground_truth) != (content, truth):
        raise ValueError(
            f"{path}: prompt {result.problem} differs from row {result.problem} of data.path, so the results belong to "
            "other data. Set another trainer.experiment_name, or trainer.resume_mode=disable to start from scratch."
        )
    return result


@contextmanager
def open_results(path: Path, finished: FinishedResults) -> Iterator[Callable[[TrajectoryGroup], None]]:
    """Open results.jsonl and remove lines of unfinished prompts. Context manager that yields an `append(group)`."""
    with explain_write_errors("the results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if finished.num_dropped:
            with path.open("rb") as old:
                replace_file(path, (line for number, line in enumerate(old) if number in finished.lines))
        file = path.open("a", encoding="utf-8")

    def append(group: TrajectoryGroup) -> None:
        with explain_write_errors("the results", path):
            file.writelines(format_trajectory_lines(0, [group]))
            file.flush()

    with file:
        yield append
