r"""RL training and validation data from a source of maths problems.

    python -m examples.data_preprocess.prepare_informal_math --data_source DigitalLearningGmbH/MATH-lighteval
    python -m examples.data_preprocess.prepare_informal_math --data_source problems.jsonl --val_size 100

Writes <local_dir>/<split>.parquet for each split that the source has.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.data.files import DataRow
from examples.data_preprocess.common import (
    console,
    convert,
    data_source_of,
    find_problem,
    read_splits,
    rl_row,
    run,
    show_sample,
    source_name,
    write_parquet,
)

INSTRUCTION = r"Reason step by step, and put your final answer in \boxed{}."


def prepare(source: str, folder: Path, splits: Sequence[str], config_name: str | None, val_size: int) -> None:
    """Read, convert, write, and say what was kept.

    Raises:
        ValueError: the source cannot be read, or a split has no usable row.
    """
    found = read_splits(source, splits, config_name)
    if val_size:
        hold_out(found, val_size)
    data_source = data_source_of(source, fallback="math")
    for split, rows in found.items():

        def make(row: DataRow, index: int, split: str = split) -> DataRow:
            problem = find_problem(row)
            prompt = f"{problem.question}\n\n{INSTRUCTION}"
            return rl_row(problem, prompt, data_source, "math", split, index)

        made, count = convert(rows, make, split)
        if not made:
            raise ValueError(f"{source}: split {split} has no usable row: {count}")
        path = folder / f"{split}.parquet"
        write_parquet(made, path)
        show_sample(made)
        console.print(f"{path} (data_source {data_source}): {count}\n")


def hold_out(found: dict[str, list[DataRow]], size: int) -> None:
    """Move `size` rows of the first split, drawn at random but always the same ones, to a split `val`."""
    split = next(iter(found))
    rows = found[split]
    if "val" in found or size >= len(rows):
        why = "there is a split val already" if "val" in found else f"split {split} has only {len(rows)} rows"
        raise ValueError(f"--val_size {size}: {why}.")
    chosen = set(random.Random(0).sample(range(len(rows)), size))
    found["val"] = [row for index, row in enumerate(rows) if index in chosen]
    found[split] = [row for index, row in enumerate(rows) if index not in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_source", required=True, help="hub id, or a file or folder of parquet, json or jsonl")
    parser.add_argument("--local_dir", help="where to write (default: outputs/data/NAME)")
    parser.add_argument("--splits", nargs="+", default=["train", "test"], help="splits to make, where there are such")
    parser.add_argument("--config_name", help="configuration of a hub data set, e.g. main")
    parser.add_argument("--val_size", type=int, default=0, help="rows of the first split to hold out as val.parquet")
    args = parser.parse_args()
    folder = Path(args.local_dir or Path("outputs/data") / source_name(args.data_source)).expanduser()
    run(lambda: prepare(args.data_source, folder, args.splits, args.config_name, args.val_size))


if __name__ == "__main__":
    main()
