r"""Prepare RL data from selected rows of your own file.

    python -m examples.data_preprocess.prepare_custom --data_source mine.jsonl --sample_indices 0,3,10-12

Writes <local_dir>/<split>.parquet. Row indices start at 0. Unusable rows are counted with their reasons.
"""

from __future__ import annotations

import argparse

from examples.data_preprocess.common import MakeRow, Script, SourceRow, make_maths_row, read_source

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


def read_chosen(args: argparse.Namespace) -> dict[str, list[SourceRow]]:
    """Read the selected rows of the source's only split, or all rows. Raises ValueError if it has several splits."""
    found = read_source(args)
    if len(found) > 1:
        raise ValueError(f"{args.data_source}: has the splits {', '.join(found)}; choose one with --splits.")
    ((split, rows),) = found.items()
    args.chosen = read_indices(args.sample_indices, len(rows)) if args.sample_indices else range(len(rows))
    return {split: [rows[index] for index in args.chosen]}


def make_chosen(args: argparse.Namespace, data_source: str, split: str) -> MakeRow:
    make_row = make_maths_row(args, data_source, split)
    return lambda row, position: make_row(row, args.chosen[position])


main = Script(__doc__, make_chosen, {"--sample_indices": INDICES}, read=read_chosen, folder="custom/{}").main

if __name__ == "__main__":
    main()
