"""Shared parts of the examples' make_task scripts: arguments, files, and rows for reinforcement learning."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def parse_arguments(doc: str | None, name: str, **numbers: int) -> argparse.Namespace:
    """Read --out (default: outputs/NAME), and an integer for each of `numbers`: {argument: default}."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs") / name)
    for argument, default in numbers.items():
        parser.add_argument(f"--{argument}", type=int, default=default)
    return parser.parse_args()


def write_tables(folder: Path, tables: Mapping[str, Iterable[Row]]) -> None:
    """Write FOLDER/NAME.parquet for each {NAME: rows}."""
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def make_chat_row(question: str, answer: str) -> Row:
    """Return a row for the warm-up: a chat with one answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_prompt_row(question: str, truth: object, data_source: str, ability: str, split: str, index: int) -> Row:
    """Return a row for reinforcement learning."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


def draw_problems(task: Any, rng: random.Random, want_held_out: bool) -> Iterator[Any]:
    """Yield problems of a task module, which has the functions `draw` and `held_out`: either all or none held out."""
    return (
        problem for problem in iter(lambda: task.draw(rng), None) if task.held_out(problem.question) == want_held_out
    )


def make_lesson_tables(
    task: Any, make_rows: Callable[..., list[Row]], args: argparse.Namespace
) -> dict[str, list[Row]]:
    """Return lessons of a task module for the warm-up, and rows `make_rows(rng, split, count)` for training and
    validation."""
    rng = random.Random(args.seed)
    taught = islice(draw_problems(task, rng, want_held_out=False), args.num_sft)
    return {
        "sft": [{"messages": task.lesson(problem, rng)} for problem in taught],
        "train": make_rows(rng, "train", args.num_rl),
        "val": make_rows(random.Random("held out"), "val", args.num_val),
    }
