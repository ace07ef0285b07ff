r"""Prepare RL data from selected rows of your own file.

    python -m examples.data_preprocess.prepare_custom --data_source mine.jsonl --sample_indices 0,3,10-12

Writes <local_dir>/<split>.parquet. Row indices start at 0. Unusable rows are counted with their reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.data_preprocess.columns import Columns, chosen_columns, column_arguments
from examples.data_preprocess.common import (
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


def prepare(
    source: str, indices: str, folder: Path, splits: Sequence[str], config_name: str | None, columns: Columns
) -> None:
    """Write the selected rows of the source's only split, or all rows.

    Raises:
        ValueError: the source cannot be read, has several splits, lacks these rows, or has no usable row.
    """
    found = read_splits(source, splits, config_name)
    if len(found) > 1:
        raise ValueError(f"{source}: has the splits {', '.join(found)}; choose one with --splits.")
    ((split, rows),) = found.items()
    chosen = read_indices(indices, len(rows)) if indices else list(range(len(rows)))
    data_source = data_source_of(source, fallback="math")
    make = maths_row(data_source, split, columns)
    made, count = convert(
        [rows[index] for index in chosen], lambda row, place: make(row, chosen[place]), split, columns
    )
    finish(made, count, folder / f"{split}.parquet", f"data_source {data_source}")


def main() -> None:
    parser = source_parser(__doc__)
    parser.add_argument("--sample_indices", default="", help="rows, e.g. 0,3,10-12 (default: all)")
    column_arguments(parser)
    args = parser.parse_args()
    folder = output_folder(args.local_dir, f"custom/{source_name(args.data_source)}")
    run(
        lambda: prepare(
            args.data_source, args.sample_indices, folder, args.splits, args.config_name, chosen_columns(args)
        )
    )


if __name__ == "__main__":
    main()
