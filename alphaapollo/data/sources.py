"""Sources of examples: each file is a source, with a name in metrics and a weight in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from alphaapollo.data.files import file_list

E = TypeVar("E")


@dataclass(frozen=True)
class LoadedExamples(Generic[E]):
    """Examples that a fine-tuning task loaded from its files.

    Example: `LoadedExamples([row, row, row], sizes=[2, 1], notices=["data.train_files: 1 of 4 examples ..."])`.
    """

    examples: list[E]  # of all files, concatenated
    sizes: list[int]  # examples of each file
    notices: list[str]  # messages for the user

    def by_source(self) -> list[list[E]]:
        """The examples of each file."""
        ends = [sum(self.sizes[: index + 1]) for index in range(len(self.sizes))]
        return [self.examples[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def source_names(files: str | Sequence[str]) -> list[str]:
    """A short unique name for each file: the last parts of its path, without the suffix.

    Example: `["a/train.parquet", "b/train.parquet"]` are `["a/train", "b/train"]`.
    """
    paths = [Path(file).expanduser().absolute().with_suffix("") for file in file_list(files)]
    parts = next(
        (count for count in range(1, 20) if len({path.parts[-count:] for path in paths}) == len(paths)), len(paths)
    )
    return ["/".join(path.parts[-parts:]) for path in paths]
