"""What the scripts share: sources (hub id, local file or folder), questions and answers in them, RL rows, writing."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich import print_json
from rich.console import Console
from rich.progress import track

from alphaapollo.data.files import SUFFIXES, DataRow, read_rows
from alphaapollo.rewards.base import find_grader
from alphaapollo.rewards.extract import after_hashes, last_boxed

QUESTION_KEYS = ("question", "problem", "prompt", "Problem", "instruction")
ANSWER_KEYS = ("answer", "solution", "ground_truth", "final_answer", "target", "boxed_answer")

RL_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {
                "split": pa.string(),
                "index": pa.int64(),
                "question": pa.string(),
                "ground_truth": pa.string(),
                "gt_traj": pa.string(),
                "data_source": pa.string(),
            }
        ),
        "metadata": pa.string(),
        "env_kwargs": pa.struct(
            {
                "question": pa.string(),
                "ground_truth": pa.string(),
                "gt_traj": pa.string(),
                "data_source": pa.string(),
                "seed": pa.int64(),
            }
        ),
    }
)

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Problem:
    """A question and its answer, found in a row of any data set."""

    question: str
    ground_truth: str
    solution: str  # the answer as it stands in the data, often with the way to it
    metadata: dict[str, Any]  # the other columns


class Dropped(Exception):
    """A row that cannot be used; says why, in words that are the same for all such rows."""


@dataclass
class Count:
    """How many rows were kept, and why the others were not."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = "".join(f"\n  {number} dropped: {reason}" for reason, number in self.dropped.most_common())
        return f"{self.kept} rows kept, {self.dropped.total()} dropped{reasons}"


def read_splits(source: str, splits: Sequence[str], config_name: str | None) -> dict[str, list[DataRow]]:
    """The rows of each split that the source has.

    A file is one split: the one that its name ends in or begins with, else the first. In a folder, a split is all files
    named like it (`train.parquet`, `gsm8k_train.jsonl`, `train-00000-of-00002.parquet`).

    Raises:
        ValueError: the source has none of the splits, or cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        split = next((split for split in splits if _belongs(path, split)), splits[0])
        return {split: read_rows(path)}
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        found = {split: [file for file in files if _belongs(file, split)] for split in splits}
        if not any(found.values()):
            names = ", ".join(file.name for file in files) or f"no {', '.join(SUFFIXES)} file"
            raise ValueError(f"{source}: no file is named like one of the splits {', '.join(splits)}; it has {names}.")
        return {split: [row for file in files for row in read_rows(file)] for split, files in found.items() if files}
    if path.is_absolute() or source.startswith((".", "~")) or path.suffix in SUFFIXES or source.count("/") > 1:
        raise ValueError(f"{source}: no such file or folder (working folder: {Path.cwd()}).")
    return _read_hub(source, splits, config_name)


def source_name(source: str) -> str:
    """A short name: the hub id's last part, or the file's or folder's name without suffix and split."""
    path = Path(source).expanduser().resolve() if Path(source).expanduser().exists() else Path(source)
    stem = path.stem if path.suffix in SUFFIXES else path.name
    return re.sub(r"[-_.](train|test|val|validation|dev)$", "", stem)


def data_source_of(source: str, fallback: str) -> str:
    """What goes into the data_source column: the hub id or the file's name if a built-in grader takes it, else
    `fallback`/name (a name that one takes)."""
    name = source_name(source) if Path(source).expanduser().exists() else source
    try:
        find_grader(name)
    except ValueError:
        return f"{fallback}/{name}"
    return name


def find_problem(row: DataRow) -> Problem:
    """The question and answer of a row (Dropped: it has none)."""
    question_key, question = _find(row, QUESTION_KEYS, "question")
    answer_key, answer = _find(row, ANSWER_KEYS, "answer")
    truth = ground_truth_of(answer)
    if not truth:
        raise Dropped("the ground truth is empty")
    solution = row.get("solution")
    return Problem(
        question=question,
        ground_truth=truth,
        solution=solution if isinstance(solution, str) and solution.strip() else answer,
        metadata={key: value for key, value in row.items() if key not in (question_key, answer_key, "solution")},
    )


def ground_truth_of(answer: str) -> str:
    r"""The last `\boxed{}`, else what follows `####`, else the whole answer."""
    for found in (last_boxed(answer), after_hashes(answer)):
        if found is not None:
            return found
    return answer.strip()


def rl_row(problem: Problem, prompt: str, data_source: str, ability: str, split: str, index: int) -> DataRow:
    """One row of the full RL schema."""
    facts = {
        "question": problem.question,
        "ground_truth": problem.ground_truth,
        "gt_traj": problem.solution,
        "data_source": data_source,
    }
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index, **facts},
        "metadata": json.dumps(problem.metadata, default=str),
        "env_kwargs": facts,
    }


def convert(rows: Sequence[DataRow], make: Callable[[DataRow, int], DataRow], what: str) -> tuple[list[DataRow], Count]:
    """`make(row, index)` for every row, with a progress bar; rows that raise Dropped are counted."""
    made, count = [], Count()
    for index, row in enumerate(track(rows, what, console=console)):
        try:
            made.append(make(row, index))
        except Dropped as reason:
            count.dropped[str(reason)] += 1
    count.kept = len(made)
    return made, count


def write_parquet(rows: Iterable[DataRow], path: Path) -> None:
    """Write whole or not at all: to a file beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=RL_SCHEMA), partial)
    partial.replace(path)


def show_sample(rows: Sequence[DataRow]) -> None:
    """Print the first row."""
    console.print("A sample row:")
    print_json(data=rows[0], ensure_ascii=False)


def run(script: Callable[[], None]) -> None:
    """Run a script's work; what is wrong with its input is one line, without a traceback."""
    try:
        script()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def _belongs(file: Path, split: str) -> bool:
    name = re.sub(r"-\d+-of-\d+$", "", file.stem)  # hub shards
    return re.search(rf"(^|[-_.]){re.escape(split)}$|^{re.escape(split)}[-_.]", name) is not None


def _read_hub(source: str, splits: Sequence[str], config_name: str | None) -> dict[str, list[DataRow]]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"{source}: no such local file or folder, and reading it from the hub needs the datasets library: "
            "pip install datasets. Or download its files and give their folder as --data_source."
        ) from error
    try:
        loaded = datasets.load_dataset(source, config_name)
    except Exception as error:  # whatever the hub, the network or the data set's own code raise
        raise ValueError(f"{source}: cannot be loaded from the hub ({type(error).__name__}: {error}).") from error
    found = {split: loaded[split].to_list() for split in splits if split in loaded}
    if not found:
        known = ", ".join(loaded)
        raise ValueError(f"{source}: has none of the splits {', '.join(splits)}; it has {known}. Set --splits.")
    return found


def _find(row: DataRow, keys: Sequence[str], what: str) -> tuple[str, str]:
    """The first of the columns that holds text, and its text."""
    present = [key for key in keys if row.get(key) is not None]
    if not present:
        raise Dropped(f"no {what} (looked for {', '.join(keys)})")
    problems = []
    for key in present:
        text = _as_text(row[key])
        if text and _is_unicode(text):
            return key, text
        problems.append("is not text" if text is None else "is not valid Unicode" if text else "is empty")
    raise Dropped(f"the {what} {problems[0]} (column {present[0]})")


def _as_text(value: Any) -> str | None:
    """Text and numbers as text; of a chat, what the user said last; None for anything else."""
    if isinstance(value, list):
        said = [part.get("content") for part in value if isinstance(part, dict) and part.get("role") == "user"]
        value = said[-1] if said else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def _is_unicode(text: str) -> bool:
    """Half a surrogate pair, which JSON can hold, cannot be written anywhere."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
