"""Small files of a run folder: read back as they were written, without secrets, and readable if damaged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.data.findings import DataFinding
from alphaapollo.planning.memory_plan import MemoryPlan
from alphaapollo.planning.model_memory import Usage
from alphaapollo.planning.plan_table import summarize_memory
from alphaapollo.runs.command_history import read_history, record_in_history
from alphaapollo.runs.metrics_file import make_metrics_record
from alphaapollo.runs.rollout_log import RolloutLog, TrainedRow, pack_trained_rows, read_trained_rows
from alphaapollo.runs.run_plan import RunPlan, read_run_plan, write_run_plan
from alphaapollo.runs.training_examples import (
    ExampleRow,
    LoggedExample,
    make_example_row,
    read_examples,
    write_examples,
)
from alphaapollo.types import Row, Score
from alphaapollo.utils.json_types import finite_or_none
from tests.builders import make_group, make_trajectory, make_turn

GIB = 2**30
SECRET = 'BEGIN "KEY"\nabcdef'  # is escaped in JSON


def make_plan() -> RunPlan:
    usage = {"generate": Usage({"engine weights": GIB, "kv cache": 3 * GIB // 2}), "publish": Usage({"weights": GIB})}
    memory = summarize_memory(MemoryPlan(usage, 80 * GIB, "a GPU of 80 GiB"))
    inputs = {"data.train_files": [("a.parquet", "3f2a")]}
    data = [DataFinding("a.parquet", "the column 'id'", "not read", 3, 4)]
    return RunPlan({"iterations": "8"}, memory, ["key=x has no effect."], inputs, data)


def test_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_run_plan(tmp_path / "run", make_plan())
    assert read_run_plan(tmp_path / "run") == make_plan()
    gib = {"generate": {"engine weights": 1.0, "kv cache": 1.5}, "publish": {"weights": 1.0}}
    assert json.loads((tmp_path / "run/plan.json").read_text()) == {
        "settings": {"iterations": "8"},
        "memory": {"device": "a GPU of 80 GiB", "gib": gib},
        "notices": ["key=x has no effect."],
        "inputs": {"data.train_files": [["a.parquet", "3f2a"]]},
        "data": [
            {"place": "a.parquet", "content": "the column 'id'", "effect": "not read", "rows": 3, "total": 4},
        ],
    }


def test_runs_of_tokens_with_the_same_mask_are_parts() -> None:
    row = Row([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0.0] * 5, [4])
    parts = [(1, False, "a"), (2, True, "bc"), (1, False, "d"), (1, True, "e")]
    assert make_example_row(row, lambda ids: "".join(chr(96 + one) for one in ids)) == ExampleRow(parts)


def test_each_command_is_recorded_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/main", "trainer.seed=1", "a b"])
    with record_in_history(tmp_path / "missing"), record_in_history(tmp_path):
        pass
    for error in (ValueError("x=1 is wrong"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), record_in_history(tmp_path):
            raise error
    records = read_history(tmp_path)
    assert [record.state for record in records] == ["finished", "failed", "interrupted", "failed"]
    assert [record.error for record in records] == ["", "x=1 is wrong", "", "3"]
    assert records[0].command.endswith("trainer.seed=1 'a b'")
    assert records[0].started <= records[0].ended <= records[1].started
    assert "torch" in records[0].versions and read_history(tmp_path / "missing") == []


def test_values_of_trained_tokens_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "trained_000001.npz"
    logprobs = np.array([-1.0, np.nan, -3.0], np.float32)
    rows = TrainedRow(17, 2, 0, logprobs, np.ones(3, np.float32)), TrainedRow(18, 0, 1, None, np.zeros(1, np.float32))
    path.write_bytes(pack_trained_rows(rows))
    first, second = read_trained_rows(path)
    assert (first.prompt_id, first.sample, first.row) == (17, 2, 0)
    np.testing.assert_array_equal(first.logprobs, logprobs)  # type: ignore[arg-type]
    assert first.get_values(2) == (-3.0, 1.0)
    assert (second.row, second.logprobs, second.get_values(0)) == (1, None, (None, 0.0))
    path.write_bytes(pack_trained_rows([]))
    assert read_trained_rows(path) == []
    path.write_bytes(b"PK damaged")
    with pytest.raises(ValueError, match=r"trained_000001.npz cannot be read"):
        read_trained_rows(path)


def test_a_metrics_record_is_json_whatever_the_values() -> None:
    record = make_metrics_record(3, {"critic/score/mean": 0.5, "kl/mean": float("nan"), "a/b": float("inf"), "n/n": 2})
    assert record == {"step": 3, "critic/score/mean": 0.5, "kl/mean": None, "a/b": None, "n/n": 2.0}
    assert finite_or_none(-float("inf")) is None
    with pytest.raises(AssertionError, match="group/name"):
        make_metrics_record(1, {"reward": 1.0})


@pytest.mark.parametrize(
    ("read", "name", "content", "expected"),
    [
        *((read_run_plan, "plan.json", content, None) for content in (b'{"settings": {"a"', b'{"settings": 3}', b"[]")),
        (read_run_plan, "plan.json", b"", None),
        (read_examples, "examples.jsonl", b'x\n{"rows": []}\n\xff\n{"rows": [{"par', [LoggedExample([])]),
        (read_history, "history.jsonl", b'{"command": \xff\n{}\n', []),
    ],
)
def test_missing_files_and_damaged_lines_are_left_out(
    tmp_path: Path, read: Callable[[Path], Any], name: str, content: bytes, expected: Any
) -> None:
    assert not read(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path) == expected


def keep_in_plan(folder: Path, text: str) -> str:
    write_run_plan(folder, RunPlan({"model": text}))
    plan = read_run_plan(folder)
    return plan.settings["model"] if plan else ""


def keep_in_examples(folder: Path, text: str) -> str:
    pair = [ExampleRow([(1, True, "14")], "chosen", -1.5), ExampleRow([(2, True, text)], "rejected", -2.5)]
    write_examples(folder, [LoggedExample(pair, "sums", 0.5), LoggedExample([ExampleRow([])])])
    first, second = read_examples(folder)
    assert (first.rows[0], first.data_source, second) == (pair[0], "sums", LoggedExample([ExampleRow([])]))
    return first.rows[1].parts[0][2]


def keep_in_history(folder: Path, text: str) -> str:
    with pytest.raises(ValueError), record_in_history(folder):
        raise ValueError(text)
    return read_history(folder)[0].error


def keep_in_rollouts(folder: Path, text: str) -> str:
    log = RolloutLog(folder)
    turn = make_turn([7], info={"object": ValueError(text)})
    log.write(1, [make_group(make_trajectory(turn, score=Score(0.0, reason=text)))])
    log.close()
    line = json.loads((folder / "step_000001.jsonl").read_bytes())
    assert line["reason"] == line["turns"][0]["info"]["object"]
    return line["reason"]


@pytest.mark.parametrize("keep", [keep_in_plan, keep_in_examples, keep_in_history, keep_in_rollouts])
def test_secrets_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Callable[[Path, str], str]
) -> None:
    monkeypatch.setenv("PRIVATE_KEY", SECRET)
    assert keep(tmp_path, f"401: {SECRET} is wrong") == "401: $PRIVATE_KEY is wrong"
