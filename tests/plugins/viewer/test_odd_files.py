"""Files that no run and no viewer writes: pipes, devices, links to private files, bombs."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from alphaapollo.plugins.viewer.app import make_app
from alphaapollo.plugins.viewer.index import RunIndex
from alphaapollo.plugins.viewer.run_folders import find_runs
from alphaapollo.plugins.viewer.samples import decode_tokens
from tests.plugins.viewer.run_kit import update_index, write_run

DEEP, SPARSE, FIFO, ZERO, PRIVATE = "[" * 100_000, "1.5 GiB", "a pipe", "/dev/zero", "private.txt"
ALIASES = "".join(f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi"))
SMALL_FILES = (
    "config.yaml",
    "format.json",
    "history.jsonl",
    "plan.json",
    "summary.json",
    "status.json",
    "verification.json",
    "examples.jsonl",
)
LOCK = ".lock"  # of the run, beside its folder
ODD_FILES = [
    *((name, DEEP) for name in (*SMALL_FILES, "metrics.jsonl")),
    *zip((*SMALL_FILES, "metrics.jsonl"), cycle((SPARSE, FIFO, ZERO, PRIVATE))),
    *(("config.yaml", text) for text in ("a: [1,", "model: text", "actor_rollout_ref: {model: {path: [1]}}")),
    *((LOCK, text) for text in ("[1]", '"text"', '{"pid": [1]}', '{"pid": 1e400}', '{"pid": "x"}')),
    ("history.jsonl", '{"command": '),
    ("plan.json", '{"settings": '),
    *((name, FIFO) for name in ("suites/a/b/result.json", "model/x.safetensors", "rollouts/trained_000001.npz")),
    ("config.yaml", f"a: &a [{','.join('x' * 9)}]\n{ALIASES}"),
    ("config.yaml", "a: &a " + "x" * 500_000 + "\nb: [" + "*a," * 10_000 + "]"),
    ("config.²³.yaml", "a: 1"),
    ("summary.json", '{"all": [1]}'),
    ("format.json", '{"format": 1e999}'),
]


def test_an_odd_file_stops_neither_its_page_nor_other_runs(tmp_path: Path) -> None:
    """Pipes, devices, links to private files, huge files, aliases that stand for gigabytes."""
    root = tmp_path / "outputs"
    (tmp_path / PRIVATE).write_text('{"secret_value": {"secret_value": "secret_value"}}')
    for number, (name, content) in enumerate(ODD_FILES):
        folder = write_run(root / f"{number:02}", steps=1)
        file = root / f".{number:02}.lock" if name == LOCK else folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if name == "status.json":
            lock = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01"})
            (root / f".{number:02}.lock").write_text(lock)
        if content == FIFO:
            os.mkfifo(file)
        elif content in (ZERO, PRIVATE):
            file.symlink_to(tmp_path / content)  # an absolute path replaces the folder
        else:
            own_host = f'{{"host": "{socket.gethostname()}", '
            file.write_text("" if content == SPARSE else content.replace("{", own_host) if name == LOCK else content)
            os.truncate(file, 3 << 29 if content == SPARSE else file.stat().st_size)
    write_run(root / "good")
    index = update_index(root)
    with closing(index.connect()) as database:
        assert len(database.execute("SELECT DISTINCT run FROM metrics").fetchall()) >= len(ODD_FILES) - 4
    with TestClient(make_app(index, ["testserver"]), raise_server_exceptions=False) as client:
        listed = client.get("/").text
        assert listed.count("unreadable") <= 1  # the summary of another form
        for number in range(1, len(ODD_FILES) + 2):
            for page in ("", "/config", "/health", "/step/1/0", "/examples"):
                response = client.get(f"/runs/{number}{page}")
                what = ODD_FILES[number - 1] if number <= len(ODD_FILES) else "good"
                assert response.status_code == 200 or page, (what[0], what[1][:9])
                assert response.status_code in (200, 404) and "secret_value" not in response.text, (what[0], page)
        assert "secret_value" not in listed and index.problem == ""


def test_links_that_lead_back_and_huge_tokenizers_do_not_stop_the_viewer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "outputs/lab/run")
    for number in range(60):  # 13 million paths of four links
        (tmp_path / f"outputs/{number}").symlink_to(".")
    assert [*find_runs(tmp_path / "outputs")] == [run]
    (run / "model").mkdir()
    (run / "model/tokenizer.json").touch()
    os.truncate(run / "model/tokenizer.json", 3 << 29)
    assert decode_tokens(run, [7]) == ["[7]"]


def write_other_notes(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, path TEXT UNIQUE, more TEXT NOT NULL)")


@pytest.mark.parametrize(
    "write", [write_other_notes, lambda path: path.write_bytes(b"x" * 5000), Path.mkdir, os.mkfifo]
)
def test_notes_that_cannot_be_used_take_no_page_down(tmp_path: Path, write: Callable[[Path], object]) -> None:
    run = write_run(tmp_path / "outputs/first", steps=1)
    write(notes := tmp_path / "viewer.sqlite")
    index = RunIndex(run.parent, tmp_path / "index.sqlite", notes=notes)
    with closing(index.connect()) as database:
        index.update(database)
    client = TestClient(make_app(index, ["testserver"]))
    assert str(notes) in (page := client.get("/").text) and "/runs/1" in page
    assert client.put("/runs/1/notes", json={"note": "x"}).status_code == 409
