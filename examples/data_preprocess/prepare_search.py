r"""Prepare RL data and a search corpus from questions with passages, in the columns of HotpotQA.

    python -m examples.data_preprocess.prepare_search --data_source hotpotqa/hotpot_qa --config_name distractor

Reads `question`, `answer` and `context`: {title: [...], sentences: [[...], ...]}. Writes <local_dir>/<split>.parquet,
and the passages of all splits, each title once, to <local_dir>/corpus/passages.jsonl, which
`python -m alphaapollo.tools.retrieval build` indexes.
"""

from __future__ import annotations

import argparse
import json

from alphaapollo.data.files import DataRow
from examples.data_preprocess import common
from examples.data_preprocess.columns import Dropped, find_problem, is_unicode


def read_passages(row: DataRow) -> dict[str, str]:
    """Return {title: text} of the row's passages. Raises Dropped if it has none."""
    context = row.get("context")
    if not isinstance(context, dict) or not {"title", "sentences"} <= context.keys():
        raise Dropped("no passages (column context: {title, sentences})")
    pairs = zip(context["title"], context["sentences"], strict=False)
    passages = {title: "".join(sentences) for title, sentences in pairs}
    if not all(is_unicode(title + text) for title, text in passages.items()):
        raise Dropped("a passage is not valid Unicode (column context)")
    return passages


def make_row(args: argparse.Namespace, data_source: str, split: str) -> common.MakeRow:
    def make(row: DataRow, index: int) -> DataRow:
        problem = find_problem({key: value for key, value in row.items() if key != "context"}, args.columns)
        args.passages.update(read_passages(row))
        return common.rl_row(problem, problem.question, data_source, "search", split, index)

    return make


SCRIPT = common.Script(__doc__, make_row, {}, ["train", "validation"], fallback="search", folder="search/{}")


def prepare(args: argparse.Namespace) -> None:
    """Write each split and the corpus. Raises ValueError if the source cannot be read or has no usable row."""
    args.passages = passages = dict[str, str]()
    corpus = SCRIPT.write(args) / "corpus" / "passages.jsonl"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"contents": f"{title}\n{text}"}, ensure_ascii=False) for title, text in passages.items())
    corpus.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    common.console.print(f"{corpus}: {len(passages)} passages\n")


def main() -> None:
    args = SCRIPT.parse()
    common.run(lambda: prepare(args))


if __name__ == "__main__":
    main()
