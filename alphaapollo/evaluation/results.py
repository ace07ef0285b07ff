"""results.jsonl: every sample of a generation, a line each as in the rollout log, appended as groups end.

A prompt is finished when the lines of all its samples are there. What a kill has left besides, a torn line or a part of
a group, goes when the file is opened again, and those prompts are played again: with the same draws.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from alphaapollo.evaluation.figures import Result, result_of_record
from alphaapollo.observability.disk import writing
from alphaapollo.observability.rollout_log import trajectory_lines
from alphaapollo.types import Prompt, TrajectoryGroup


@dataclass(frozen=True)
class Finished:
    """What an earlier process has left."""

    results: list[Result] = field(default_factory=list)  # of whole groups
    lines: frozenset[int] = frozenset()  # that hold them
    num_dropped: int = 0  # lines besides

    @property
    def prompts(self) -> set[int]:
        """Ids of the prompts that need no more samples."""
        return {result.problem for result in self.results}


def read_finished(path: Path, prompts: Mapping[int, Prompt], num_samples: int) -> Finished:
    """Read the results of finished prompts; nothing is changed.

    Raises:
        ValueError: a line belongs to a prompt that `prompts` (by id) does not have, or that reads otherwise now.
    """
    if not path.exists():
        return Finished()
    groups: dict[int, dict[int, tuple[int, Result]]] = defaultdict(dict)
    num_lines = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            num_lines += 1
            result = _read_line(line, prompts, path)
            if result is not None:
                groups[result.problem].setdefault(result.sample, (number, result))
    whole = [own for own in groups.values() if set(own) == set(range(num_samples))]
    return Finished(
        results=[result for own in whole for _, result in own.values()],
        lines=frozenset(number for own in whole for number, _ in own.values()),
        num_dropped=num_lines - num_samples * len(whole),
    )


def _read_line(line: bytes, prompts: Mapping[int, Prompt], path: Path) -> Result | None:
    """None for a line that is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        result, truth = result_of_record(record), record["ground_truth"]
        content = record["prompt"] if record["row_prompt"] is None else record["row_prompt"]
    except (ValueError, KeyError, TypeError):  # a process or a machine died while it was written
        return None
    prompt = prompts.get(result.problem)
    if prompt is None or (prompt.content, prompt.ground_truth) != (content, truth):
        raise ValueError(
            f"{path}: its prompt {result.problem} is not row {result.problem} of data.path: these are results of other "
            "data. Set another trainer.experiment_name, or trainer.resume_mode=disable to begin anew."
        )
    return result


class ResultsFile:
    """The file, open for appending. `with ResultsFile(path, finished) as file: file.append(group)`"""

    def __init__(self, path: Path, finished: Finished):
        self._path = path
        with writing("the results", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if finished.num_dropped:
                _keep_lines(path, finished.lines)
            self._file = path.open("a", encoding="utf-8")

    def append(self, group: TrajectoryGroup) -> None:
        """Write a group's lines; from here on they outlive this process."""
        with writing("the results", self._path):
            self._file.writelines(trajectory_lines(0, [group]))
            self._file.flush()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _keep_lines(path: Path, lines: frozenset[int]) -> None:
    part = path.with_name(f".{path.name}.part")
    with path.open("rb") as old, part.open("wb") as new:
        new.writelines(line for number, line in enumerate(old) if number in lines)
    part.replace(path)
