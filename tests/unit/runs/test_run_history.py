"""history.jsonl: one line per command that worked in a run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from alphaapollo.runs.run_history import read_history, record_in_history


def test_each_command_is_recorded_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/main", "trainer.seed=1", "a b"])
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value-123")
    with record_in_history(tmp_path):
        pass
    for error in (ValueError("very-secret-value-123 is wrong"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), record_in_history(tmp_path):
            raise error
    records = read_history(tmp_path)
    assert [record.state for record in records] == ["finished", "failed", "interrupted", "failed"]
    assert [record.error for record in records] == ["", "$SOME_API_KEY is wrong", "", "3"]
    assert records[0].command.endswith("trainer.seed=1 'a b'")
    assert records[0].started <= records[0].ended <= records[1].started
    assert "torch" in records[0].versions


def test_damaged_lines_are_skipped_and_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    with record_in_history(tmp_path / "missing"):
        pass
    assert read_history(tmp_path / "missing") == []
    with record_in_history(tmp_path):
        pass
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"command": \xff\n{}\n')
    assert len(read_history(tmp_path)) == 1
