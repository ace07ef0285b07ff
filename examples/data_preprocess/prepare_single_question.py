r"""Prepare RL data from one question and its answer on the command line.

    python -m examples.data_preprocess.prepare_single_question --question "What is 2+2?" --ground_truth 4

Writes <local_dir>/<split>.parquet with this row for each split.
"""

from __future__ import annotations

import argparse

from alphaapollo.rewards.registry import get_grader
from examples.data_preprocess.common import Script, SourceRow, make_maths_row

OPTIONS = {
    "--question": {"required": True, "help": "the question"},
    "--ground_truth --answer": {"required": True, "help": "its answer, or a solution that boxes it"},
    "--data_source": {"default": "math", "help": "name that selects the grader"},
}


def read_question(args: argparse.Namespace) -> dict[str, list[SourceRow]]:
    """The row, for each split. Raises ValueError if no grader accepts the data source."""
    get_grader(args.data_source)
    return {split: [{"question": args.question, "answer": args.ground_truth}] for split in args.splits}


main = Script(
    __doc__,
    make_maths_row,
    OPTIONS,
    ["train"],
    read_question,
    folder="single_question",
    has_columns=False,
).main

if __name__ == "__main__":
    main()
