r"""Prepare RL training and validation data from maths problems.

    python -m examples.data_preprocess.prepare_informal_math --data_source DigitalLearningGmbH/MATH-lighteval
    python -m examples.data_preprocess.prepare_informal_math --data_source problems.jsonl --val_size 100

Writes <local_dir>/<split>.parquet for each split of the source.
"""

from __future__ import annotations

import argparse
import random

from examples.data_preprocess.common import Script, SourceRow, make_maths_row, read_source

VAL_SIZE = {"type": int, "default": 0, "help": "rows of the first split to hold out as val.parquet"}


def read_and_hold_out(args: argparse.Namespace) -> dict[str, list[SourceRow]]:
    """Read the source, and move --val_size rows of the first split to a split `val`, drawn with a fixed seed."""
    found, size = read_source(args), args.val_size
    if not size:
        return found
    split = next(iter(found))
    rows = found[split]
    if "val" in found or not 0 < size < len(rows):
        few = f"split {split} has only {len(rows)} rows" if size > 0 else "must not be negative"
        why = "the source already has a split val" if "val" in found else few
        raise ValueError(f"--val_size {size}: {why}.")
    chosen = set(random.Random(0).sample(range(len(rows)), size))
    val = [row for index, row in enumerate(rows) if index in chosen]
    return {**found, split: [row for index, row in enumerate(rows) if index not in chosen], "val": val}


main = Script(__doc__, make_maths_row, {"--val_size": VAL_SIZE}, read=read_and_hold_out).main

if __name__ == "__main__":
    main()
