r"""Prepare RL training and validation data from maths problems.

    python -m examples.data_preprocess.prepare_informal_math --data_source DigitalLearningGmbH/MATH-lighteval
    python -m examples.data_preprocess.prepare_informal_math --data_source problems.jsonl --val_size 100

Writes <local_dir>/<split>.parquet for each split of the source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from examples.data_preprocess.columns import Columns, chosen_columns, column_arguments
from examples.data_preprocess.common import (
    SourceRow,
    convert,
    data_source_of,
    finish,
    maths_row,
    output_folder,
    read_splits,
    run,
    source_name,
    source_parser,
)


def prepare(
    source: str, folder: Path, splits: Sequence[str], config_name: str | None, val_size: int, columns: Columns
) -> None:
    """Read, convert and write the rows, and print the counts.

    Raises:
        ValueError: the source cannot be read, or a split has no usable row.
    """
    found = read_splits(source, splits, config_name)
    if val_size:
        hold_out(found, val_size)
    data_source = data_source_of(source, fallback="math")
    for split, rows in found.items():
        made, count = convert(rows, maths_row(data_source, split, columns), split, columns)
        finish(made, count, folder / f"{split}.parquet", f"data_source {data_source}")


def hold_out(found: dict[str, list[SourceRow]], size: int) -> None:
    """Move `size` rows of the first split to a split `val`, drawn with a fixed seed."""
    split = next(iter(found))
    rows = found[split]
    if "val" in found or not 0 < size < len(rows):
        few = f"split {split} has only {len(rows)} rows" if size > 0 else "must not be negative"
        why = "the source already has a split val" if "val" in found else few
        raise ValueError(f"--val_size {size}: {why}.")
    chosen = set(random.Random(0).sample(range(len(rows)), size))
    found["val"] = [row for index, row in enumerate(rows) if index in chosen]
    found[split] = [row for index, row in enumerate(rows) if index not in chosen]


def main() -> None:
    parser = source_parser(__doc__)
    parser.add_argument("--val_size", type=int, default=0, help="rows of the first split to hold out as val.parquet")
    column_arguments(parser)
    args = parser.parse_args()
    folder = output_folder(args.local_dir, source_name(args.data_source))
    run(lambda: prepare(args.data_source, folder, args.splits, args.config_name, args.val_size, chosen_columns(args)))


if __name__ == "__main__":
    main()
