"""Rejection sampling: which answers of a generation become supervised data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alphaapollo.data.files import read_rows
from examples.data_preprocess.prepare_right_answers import prepare
from tests.builders import write_rows
from tests.unit.data_preprocess.scripts import check_counts
from tests.unit.data_preprocess.scripts import made as made_rows


def record(number: int, text: str, accuracy: float = 1.0, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    turn = {"text": text, "observation": None, "num_tokens": tokens, "reward": 0.0}
    prompt = [{"role": "user", "content": f"{number}+{number}?"}]
    asked = {"prompt_id": number, "sample": 0, "data_source": "openai/gsm8k", "prompt": prompt}
    graded = {"ground_truth": str(2 * number), "reward": accuracy, "components": {"accuracy": accuracy}}
    ended = {"outcome": "scored", "reason": "", "end": "done", "turns": [turn], "rows": [{}]}
    return asked | graded | ended | changes


def made(tmp_path: Path, records: list[dict[str, Any]], **options: Any) -> list[tuple[str, str]]:
    """(question, answer) of each row."""
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(one) + "\n" for one in records) + '{"prompt_id": 5, "sam')
    prepare([str(results)], tmp_path, **{"min_accuracy": 1.0, "max_answers": 4, "shortest": False} | options)
    rows = [row["messages"] for row in read_rows(str(tmp_path / "train.parquet"))]
    assert all([message["role"] for message in chat] == ["user", "assistant"] for chat in rows)
    return [(chat[0]["content"], chat[1]["content"]) for chat in rows]


SAID = [
    record(1, "it is surely 2", tokens=5),
    record(1, "2", tokens=1),
    record(1, "3", accuracy=0.0),
    record(1, "2", tokens=1),
    record(1, "so 2", tokens=2),
    record(2, "4 4 4 4", end="token_limit"),
    record(2, "?", outcome="grader_failed", reward=None),
    record(3, "6"),
    record(3, " \n"),
]


def test_right_answers_are_kept_once_and_other_reasons_are_reported(tmp_path: Path, capsys) -> None:
    rows = made(tmp_path, SAID)
    assert rows == [("1+1?", "it is surely 2"), ("1+1?", "2"), ("1+1?", "so 2"), ("3+3?", "6")]
    told = capsys.readouterr().out
    assert "2 problems" in told
    reasons = ("wrong", "duplicate", "truncated", "failed", "incomplete line", "empty turn")
    check_counts(told, 4, dict.fromkeys(reasons, 1))


def test_prepare_preference_and_prepare_sft_read_the_results_of_a_generation(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "results.jsonl", SAID)
    pairs, said = made_rows("prepare_preference", tmp_path, source)
    found = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in pairs]
    assert found == [("it is surely 2", "3"), ("2", "3"), ("so 2", "3")]
    assert all(row["prompt"] == [{"role": "user", "content": "1+1?"}] for row in pairs)
    assert "1 dropped: no pair" in said
    rows, _ = made_rows("prepare_sft", tmp_path, source, "--max_solutions", 1)
    chats = [row["messages"][1]["content"] for row in rows]
    assert chats == ["it is surely 2", "6"]
