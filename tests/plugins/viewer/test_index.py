"""Index of run folders: only new lines are read, and replaced or damaged files do not confuse it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.plugins.viewer.index import (
    DAMAGED,
    RunIndex,
    make_pool_rows,
    parse_file_name,
    parse_metrics,
    parse_trajectory,
)
from tests.plugins.viewer.run_kit import write_run

Ask = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Function that updates the index of tmp_path/outputs and returns the rows of a query."""
    (tmp_path / "outputs").mkdir()
    index = RunIndex(tmp_path / "outputs", tmp_path / "index.sqlite")

    def ask(query: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(index.connect()) as database:
            index.update(database)
            return [tuple(row) for row in database.execute(query, values)]

    return ask


@pytest.fixture
def run(ask: Ask, tmp_path: Path) -> Path:
    return write_run(tmp_path / "outputs/project/first")


def add_line(run: Path, **metrics: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def test_metrics_and_trajectories_of_a_run(ask: Ask, run: Path) -> None:
    assert ask("SELECT step, value FROM metrics WHERE name = 'critic/score/mean'") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    columns = "kind, step, line, prompt_id, sample, data_source, reward, tokens, turns, outcome, end, stop_reason"
    assert ask(f"SELECT {columns} FROM trajectories WHERE step = 2") == [
        ("step", 2, 0, 17, 0, "sums", 1.0, 3, 1, "scored", "done", "stop"),
        ("step", 2, 1, 17, 1, "sums", 0.0, 3, 1, "scored", "done", "stop"),
    ]
    content = (run / "rollouts/step_000001.jsonl").read_bytes()
    for offset, size, sample in ask("SELECT offset, bytes, sample FROM trajectories WHERE step = 1"):
        assert json.loads(content[offset : offset + size])["sample"] == sample
    assert parse_file_name("rollouts/val_greedy_000012.jsonl") == ("val_greedy", 12)
    assert parse_file_name("results.jsonl") == ("results", 0)


def test_appended_and_incomplete_lines(ask: Ask, run: Path) -> None:
    count = "SELECT count(*) FROM metrics WHERE name = 'x/y'"
    assert ask(count) == [(0,)]
    add_line(run, step=4, **{"x/y": 1.0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x/')
    assert ask(count) == [(1,)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('y": 2.0}\n')
    assert ask("SELECT step, value FROM metrics WHERE name = 'x/y'") == [(4, 1.0), (5, 2.0)]


def test_resumed_run_replaces_its_later_iterations(ask: Ask, run: Path) -> None:
    assert ask("SELECT max(step) FROM metrics") == [(3,)]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text(lines[0] + lines[1].replace("0.2", "0.9"))
    (run / "new").replace(run / "metrics.jsonl")
    assert ask("SELECT step, value FROM metrics WHERE name = 'critic/score/mean'") == [(1, 0.1), (2, 0.9)]


def test_damaged_lines_are_counted_and_skipped(ask: Ask, run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'not json\n{"step": "four"}\n\xff\xfe\n[1]\n')
    path = run / "rollouts/step_000001.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert ask("SELECT name, damaged FROM files WHERE damaged > 0 ORDER BY name") == [
        ("metrics.jsonl", 4),
        ("rollouts/step_000001.jsonl", 1),
    ]
    assert ask("SELECT line FROM trajectories WHERE step = 1") == [(1,), (2,)]


def test_removed_runs_are_forgotten_and_moved_ones_are_found(ask: Ask, run: Path, tmp_path: Path) -> None:
    assert len(ask("SELECT * FROM runs")) == 1
    run.rename(tmp_path / "outputs/second")
    assert ask("SELECT path FROM runs") == [(str(tmp_path / "outputs/second"),)]
    assert ask("SELECT count(DISTINCT run) FROM trajectories") == [(1,)]
    shutil.rmtree(tmp_path / "outputs/second")
    assert ask("SELECT count(*) FROM trajectories") == [(0,)]


def test_links_are_not_followed(ask: Ask, run: Path, tmp_path: Path) -> None:
    (run / "rollouts").rename(tmp_path / "private")
    (run / "rollouts").symlink_to(tmp_path / "private")
    for name, target in (("other", write_run(tmp_path / "elsewhere/run")), ("itself", run.parent)):
        (run.parent / name).symlink_to(target)
    assert ask("SELECT path FROM runs") == [(str(run),)] and ask("SELECT * FROM trajectories") == []


def test_warnings_are_those_of_the_run(ask: Ask, run: Path) -> None:
    add_line(run, step=4, **{"val/failed": 0.5})
    ((step, text),) = ask("SELECT step, text FROM warnings")
    assert step == 4 and text.startswith("step 4: 50% ")


TRAJECTORY = (
    b'{"prompt_id": %d, "sample": 0, "data_source": "", "reward": 1.0, "components": {}, "outcome": "scored", '
    b'"end": "", "stop_reason": null, "turns": [{"num_tokens": %d}]}'
)
DEEP = b"[" * 100_000 + b"]" * 100_000


def test_bad_files_hide_neither_other_files_nor_other_runs(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = write_run(tmp_path / "outputs/bad"), write_run(tmp_path / "outputs/good")
    (bad / "metrics.jsonl").unlink()
    (bad / "metrics.jsonl").mkdir()
    os.mkfifo(bad / "pool.jsonl")
    for name in ("step_99999999999999999999.jsonl", "step_²³.jsonl", "step_000009.jsonl.jsonl"):
        (bad / "rollouts" / name).write_text("{}\n")
    (bad / "rollouts/step_000000.jsonl").symlink_to("nowhere")
    os.mkdir(os.fsencode(tmp_path / "outputs") + b"/\xff")
    Path(os.fsdecode(os.fsencode(tmp_path / "outputs") + b"/\xff/config.yaml")).touch()
    failures = ask("SELECT name, path FROM files JOIN runs ON id = run WHERE error != ''")
    assert sorted(failures) == [("metrics.jsonl", str(bad)), ("pool.jsonl", str(bad))]
    assert ask("SELECT count(*) FROM trajectories") == [(12,)]
    assert ask("SELECT DISTINCT path FROM metrics JOIN runs ON id = run") == [(str(good),)]
    monkeypatch.setattr(RunIndex, "_read_lines", lambda *_: pytest.fail("an unchanged file is read again"))
    ask("SELECT 1")
    monkeypatch.undo()
    (bad / "metrics.jsonl").rmdir()
    add_line(bad, step=1, **{"x/y": 1.0})
    assert ask("SELECT value FROM metrics WHERE name = 'x/y'") == [(1.0,)]
    assert ask("SELECT name FROM files WHERE error != ''") == [("pool.jsonl",)]


def test_a_run_that_fails_is_reported_after_the_others(
    ask: Ask, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        if folder == run:
            raise RecursionError("too deep")

    write_run(tmp_path / "outputs/second")
    monkeypatch.setattr("alphaapollo.plugins.viewer.index.check_format", fail)
    with pytest.raises(RecursionError):
        ask("SELECT 1")
    monkeypatch.undo()
    run.rename(tmp_path / "moved")
    assert len(ask("SELECT DISTINCT run FROM metrics")) == 1


def test_numbers_of_runs_stay_valid_after_a_new_start(tmp_path: Path) -> None:
    numbers = []
    for name in ("second", "first"):
        write_run(tmp_path / "outputs" / name, steps=1)
        index = RunIndex(tmp_path / "outputs", tmp_path / f"{name}.sqlite", notes=tmp_path / "notes")
        with closing(index.connect()) as database:
            index.update(database)
            numbers.append({Path(row["path"]).name: row["id"] for row in database.execute("SELECT id, path FROM runs")})
    assert numbers == [{"second": 1}, {"second": 1, "first": 2}]


@pytest.mark.parametrize(
    ("parse", "line"),
    [
        (parse_metrics, b'{"step": 1e19, "x/y": 1.0}'),
        (parse_metrics, DEEP),
        (parse_trajectory, TRAJECTORY % (2**63, 1)),
        (parse_trajectory, TRAJECTORY % (1, 2**63)),
        (parse_trajectory, b'{"prompt": ' + DEEP + b"}"),
        (partial(make_pool_rows, 0), b'{"kind": "candidate", "key": "p%s.r0"}' % (b"1" * 40)),
        (partial(make_pool_rows, 0), b'{"kind": "candidate", "key": "p1.r0", "grade": {"accuracy": "x"}}'),
        (partial(make_pool_rows, 0), b'{"kind": "candidate", "votes_for": %d}' % 2**64),
    ],
)
def test_values_that_sqlite_cannot_store_are_damaged_lines(parse: Callable[[bytes], object], line: bytes) -> None:
    with pytest.raises(DAMAGED):
        parse(line)


def test_the_thread_continues_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, updated = iter([sqlite3.OperationalError("database or disk is full")]), threading.Event()

    def update(self: RunIndex, database: sqlite3.Connection) -> None:
        for error in calls:
            raise error
        updated.set()

    monkeypatch.setattr(RunIndex, "update", update)
    monkeypatch.setattr("alphaapollo.plugins.viewer.index.POLL_SECONDS", 0.0)
    index = RunIndex(tmp_path, tmp_path / "index.sqlite")
    index.start()
    assert updated.wait(60)
    index.close()
    assert index.problem == ""
