"""Training examples from several files. Each file has its own name in metrics and its own weight in an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from alphaapollo.config.schema import PairData, SftData
from alphaapollo.data.files import DataRow, DataRows, convert_rows, to_file_list
from alphaapollo.data.length_limit import check_length_limit
from alphaapollo.data.stream import choose_rows
from alphaapollo.utils.hub import DATA_FILE

E = TypeVar("E")
T = TypeVar("T")
TuningData = SftData | PairData


@dataclass(frozen=True)
class LoadedExamples(Generic[E]):
    """Fine-tuning examples that were loaded from the data files."""

    examples: list[E]  # examples of all files, concatenated
    file_sizes: list[int]  # number of examples of each file
    notices: list[str]  # messages for the user

    def split_by_file(self) -> list[list[E]]:
        """Return one list of examples per file."""
        ends = [sum(self.file_sizes[: index + 1]) for index in range(len(self.file_sizes))]
        return [self.examples[end - size : end] for end, size in zip(ends, self.file_sizes, strict=True)]


class RowPlace(NamedTuple):
    """Where an example is in the data."""

    file: int  # index of the entry of data.train_files
    row: str  # e.g. "train.jsonl, row 7"


def read_examples(
    files: str | Sequence[str],
    read_file: Callable[[str], tuple[DataRows, Callable[[DataRow], T]]],
    max_samples: int,
    data: TuningData,
) -> list[tuple[RowPlace, T]]:
    """Read the examples of all files, at most max_samples if positive.

    read_file: returns the rows of a file, and a function that converts a row. Raises ValueError for invalid rows.
    """
    read: list[tuple[RowPlace, T]] = []
    for number, path in enumerate(to_file_list(files)):
        rows, convert_row = read_file(path)
        places = (RowPlace(number, location) for location in rows.locations)
        read += zip(places, convert_rows(path, rows, convert_row), strict=True)
    return choose_rows(read, max_samples, data.seed, data.shuffle)


def apply_max_length(
    files: str | Sequence[str],
    examples: Sequence[tuple[RowPlace, E]],
    count_tokens: Callable[[E], int],
    plural_noun: str,
    data: TuningData,
    truncate: Callable[[E], E | None] = lambda example: None,
    has_images: Sequence[bool] = (),
) -> LoadedExamples[E]:
    """Drop or truncate examples that are longer than data.max_length.

    Args:
        examples: pairs (place in the data, example).
        count_tokens: returns the length of an example in tokens.
        plural_noun: name of the examples in messages, e.g. "examples".
        truncate: returns a shorter copy of a long example, or None to drop the example.
        has_images: whether each example has images, which are not truncated; empty if none has.

    Raises ValueError if data.truncation=error and an example is too long, or no example remains.
    """
    lengths = [count_tokens(example) for _, example in examples]
    limit, locations = data.max_length, [place.row for place, _ in examples]
    checked = (plural_noun, "data.max_length", limit, data.truncation, has_images)
    num_long = check_length_limit(lengths, locations, *checked)
    fitted = [
        (place.file, example if size <= limit else truncate(example))
        for (place, example), size in zip(examples, lengths, strict=True)
    ]
    remaining = [(number, example) for number, example in fitted if example is not None]
    sizes = Counter(number for number, _ in remaining)
    action = "dropped" if data.truncation == "drop" else f"truncated ({data.truncation})"
    notice = f"{num_long} of {len(lengths)} {plural_noun} are longer than data.max_length and were {action}."
    return LoadedExamples(
        [example for _, example in remaining],
        [sizes[number] for number in range(len(to_file_list(files)))],
        [notice] if num_long else [],
    )


def make_source_names(files: str | Sequence[str]) -> list[str]:
    """Return a unique name for each file: as few last parts of its path as possible, without the suffix.

    Example: `["a/train.parquet", "b/train.jsonl.gz"]` have the names `["a/train", "b/train"]`.
    """
    paths = [Path(DATA_FILE.sub("", file)).expanduser().absolute() for file in to_file_list(files)]
    parts = next(
        (count for count in range(1, 20) if len({path.parts[-count:] for path in paths}) == len(paths)), len(paths)
    )
    return ["/".join(path.parts[-parts:]) for path in paths]
