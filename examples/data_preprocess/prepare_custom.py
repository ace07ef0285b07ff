r"""Prepare RL data from selected rows of your own file.

    python -m examples.data_preprocess.prepare_custom --data_source mine.jsonl --sample_indices 0,3,10-12

Writes <local_dir>/<split>.parquet. Row indices start at 0. Unusable rows are counted with their reasons.
"""

from __future__ import annotations

import argparse

from alphaapollo.data.files import DataRow
from examples.data_preprocess.common import MakeRow, maths_row, read_arguments, read_splits, run, write_splits

INDICES = {"default": "", "help": "rows, e.g. 0,3,10-12 (default: all)"}


def read_indices(text: str, num_rows: int) -> list[int]:
    """Parse `0,3,10-12` to 0, 3, 10, 11, 12. Raises ValueError for another format or an index out of range."""
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"--sample_indices {text}: {part!r} is not an index or range. Example: 0,3,10-12.")
        if int(last or first) >= num_rows:
            raise ValueError(f"--sample_indices {text}: the rows are 0 to {num_rows - 1}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


def prepare(args: argparse.Namespace) -> None:
    """Write the selected rows of the source's only split, or all rows.

    Raises:
        ValueError: the source cannot be read, has several splits, lacks these rows, or has no usable row.
    """
    found = read_splits(args.data_source, args.splits, args.config_name)
    if len(found) > 1:
        raise ValueError(f"{args.data_source}: has the splits {', '.join(found)}; choose one with --splits.")
    ((split, rows),) = found.items()
    chosen = read_indices(args.sample_indices, len(rows)) if args.sample_indices else list(range(len(rows)))

    def make(data_source: str, split: str) -> MakeRow:
        make_row = maths_row(data_source, split, args.columns)

        def make_chosen(row: DataRow, place: int) -> DataRow:
            return make_row(row, chosen[place])

        return make_chosen

    write_splits(args, make, "math", "custom/{}", found={split: [rows[index] for index in chosen]})


def main() -> None:
    args = read_arguments(__doc__, {"--sample_indices": INDICES})
    run(lambda: prepare(args))


if __name__ == "__main__":
    main()
