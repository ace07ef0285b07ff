from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphaapollo.planning.memory import Usage
from alphaapollo.planning.memory_plan import MemoryPlan
from alphaapollo.planning.plan_table import summarize_memory
from alphaapollo.runs.run_history import RunPlan, read_run_plan, write_run_plan

GIB = 2**30


def make_plan() -> RunPlan:
    usage = {"generate": Usage({"engine weights": GIB, "kv cache": 3 * GIB // 2}), "publish": Usage({"weights": GIB})}
    memory = summarize_memory(MemoryPlan(usage, 80 * GIB, "a GPU of 80 GiB"))
    inputs = {"data.train_files": [("a.parquet", "3f2a")]}
    return RunPlan({"iterations": "8"}, memory, ["key=x has no effect."], inputs)


def test_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_run_plan(tmp_path / "run", make_plan())
    assert read_run_plan(tmp_path / "run") == make_plan()
    gib = {"generate": {"engine weights": 1.0, "kv cache": 1.5}, "publish": {"weights": 1.0}}
    assert json.loads((tmp_path / "run/plan.json").read_text()) == {
        "settings": {"iterations": "8"},
        "memory": {"device": "a GPU of 80 GiB", "gib": gib},
        "notices": ["key=x has no effect."],
        "inputs": {"data.train_files": [["a.parquet", "3f2a"]]},
    }


def test_missing_or_damaged_plan(tmp_path: Path) -> None:
    assert read_run_plan(tmp_path) is None
    for content in ('{"settings": {"a"', '{"settings": 3}', "[]", ""):
        (tmp_path / "plan.json").write_text(content)
        assert read_run_plan(tmp_path) is None


def test_secrets_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "very-secret-value")
    write_run_plan(tmp_path, RunPlan({"model": "http://x/?key=very-secret-value"}))
    assert read_run_plan(tmp_path) == RunPlan({"model": "http://x/?key=$JUDGE_API_KEY"})
