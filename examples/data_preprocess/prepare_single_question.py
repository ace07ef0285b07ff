r"""Prepare RL data from one question and its answer on the command line.

    python -m examples.data_preprocess.prepare_single_question --question "What is 2+2?" --ground_truth 4

Writes <local_dir>/<split>.parquet with this row for each split.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.rewards.registry import get_grader
from examples.data_preprocess.columns import Dropped
from examples.data_preprocess.common import convert, finish, maths_row, output_folder, run


def prepare(question: str, answer: str, data_source: str, folder: Path, splits: Sequence[str]) -> None:
    """Write the row. Raises ValueError if no grader accepts the data source, or question or answer is empty."""
    get_grader(data_source)
    row = {"question": question, "answer": answer}
    for split in splits:
        make = maths_row(data_source, split)
        try:
            make(row, 0)
        except Dropped as reason:
            raise ValueError(str(reason)) from reason
        made, count = convert([row], make, split)
        finish(made, count, folder / f"{split}.parquet", f"data_source {data_source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", required=True, help="the question")
    parser.add_argument("--ground_truth", "--answer", required=True, help="its answer, or a solution that boxes it")
    parser.add_argument("--data_source", default="math", help="name that selects the grader")
    parser.add_argument("--local_dir", help="where to write (default: outputs/data/single_question)")
    parser.add_argument("--splits", nargs="+", default=["train"], help="files to write")
    args = parser.parse_args()
    folder = output_folder(args.local_dir, "single_question")
    run(lambda: prepare(args.question, args.ground_truth, args.data_source, folder, args.splits))


if __name__ == "__main__":
    main()
