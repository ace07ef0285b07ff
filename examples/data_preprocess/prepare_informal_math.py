r"""Prepare RL training and validation data from maths problems.

    python -m examples.data_preprocess.prepare_informal_math --data_source DigitalLearningGmbH/MATH-lighteval
    python -m examples.data_preprocess.prepare_informal_math --data_source problems.jsonl --val_size 100

Writes <local_dir>/<split>.parquet for each split of the source.
"""

from __future__ import annotations

import random

from examples.data_preprocess.common import SourceRow, maths_row, read_arguments, read_splits, run, write_splits

VAL_SIZE = {"type": int, "default": 0, "help": "rows of the first split to hold out as val.parquet"}


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
    args = read_arguments(__doc__, {"--val_size": VAL_SIZE})

    def prepare() -> None:
        found = read_splits(args.data_source, args.splits, args.config_name)
        if args.val_size:
            hold_out(found, args.val_size)
        write_splits(args, lambda source, split: maths_row(source, split, args.columns), "math", found=found)

    run(prepare)


if __name__ == "__main__":
    main()
