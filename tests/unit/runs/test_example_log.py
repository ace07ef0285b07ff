"""Examples of a fine-tuning run are read back as they were written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from alphaapollo.runs.run_history import (
    ExampleRow,
    LoggedExample,
    make_example_row,
    read_examples,
    write_examples,
)
from alphaapollo.types import Row


def spell(ids: Sequence[int]) -> str:
    return "".join(chr(96 + number) for number in ids)


def test_runs_of_tokens_with_the_same_mask_are_parts() -> None:
    row = Row([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0.0] * 5, [4])
    assert make_example_row(row, spell) == ExampleRow(
        [(1, False, "a"), (2, True, "bc"), (1, False, "d"), (1, True, "e")]
    )


def test_examples_are_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "very-secret-value")
    pair = [
        ExampleRow([(1, True, "14")], "chosen", -1.5),
        ExampleRow([(2, True, "very-secret-value")], "rejected", -2.5),
    ]
    write_examples(tmp_path, [LoggedExample(pair, "sums", 0.5), LoggedExample([ExampleRow([])])])
    first, second = read_examples(tmp_path)
    assert (first.data_source, first.margin, first.rows[0]) == ("sums", 0.5, pair[0])
    assert first.rows[1].parts == [(2, True, "$SOME_TOKEN")] and second == LoggedExample([ExampleRow([])])


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    assert read_examples(tmp_path) == []
    (tmp_path / "examples.jsonl").write_bytes(b'not json\n{"rows": []}\n\xff\n{"rows": [{"par')
    assert read_examples(tmp_path) == [LoggedExample([])]


def test_secrets_with_quotes_and_line_breaks_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE_KEY", secret := 'BEGIN "KEY"\nabcdef')
    write_examples(tmp_path, [LoggedExample([ExampleRow([(2, True, secret)])])])
    assert read_examples(tmp_path)[0].rows[0].parts == [(2, True, "$PRIVATE_KEY")]
