from __future__ import annotations

import _thread
import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo import run_process
from alphaapollo.run_process import RunFailed, make_metrics_reader, run_in_child_process
from tests.processes import is_running

PROGRAM = """
import json, os, pathlib, sys, time

def main(words):
    what, folder = words[0], pathlib.Path(words[1])
    folder.mkdir(exist_ok=True)
    (folder / "pid").write_text(str(os.getpid()))
    if what == "refuse":
        print("error in the configuration:\\n  trainer.sed: unknown key")
        return 2
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "critic/score/mean": step / 2}) + "\\n")
            file.flush()
    if what == "fail":
        print("a notice\\nerror: the disk is full\\nmake room")
        return 1
    if what == "wait":
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            (folder / "told").touch()
            return 130
    print("done")
    return 0
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program_of_test_follow.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Tests may run as a background job, for which a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(what: str, folder: Path, on_iteration: run_process.OnIteration | None = None) -> None:
    run_in_child_process("program_of_test_follow", [what, str(folder)], folder, on_iteration, show=True)


def is_gone(folder: Path) -> bool:
    return not is_running(int((folder / "pid").read_text()))


def test_output_of_the_run_is_shown_and_each_iteration_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, told = tmp_path / "run", []
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "critic/score/mean": 0.0}\n')  # of an earlier start
    run("work", folder, lambda step, metrics: told.append((step, metrics["critic/score/mean"])))
    assert told == [(1, 0.5), (2, 1.0)]
    assert "done" in capsys.readouterr().out


def test_refusal_is_a_value_error_and_a_failure_shows_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.sed: unknown key"):
        run("refuse", tmp_path / "run")
    with pytest.raises(RunFailed, match=r"^the disk is full\nmake room$"):
        run("fail", tmp_path / "run")


def test_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            threading.Thread(target=_thread.interrupt_main).start()

    with pytest.raises(KeyboardInterrupt):
        run("wait", folder, interrupt)
    assert (folder / "told").exists()
    assert is_gone(folder)


def test_what_the_callback_raises_ends_the_run(tmp_path: Path) -> None:
    def stop(step: int, metrics: dict[str, float]) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        run("wait", tmp_path / "run", stop)
    assert is_gone(tmp_path / "run")


def test_it_runs_inside_an_event_loop(tmp_path: Path) -> None:
    async def cell() -> None:
        run("work", tmp_path / "run")

    asyncio.run(cell())


def test_run_dies_with_its_parent_program(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            run("wait", tmp_path / "run")
        finally:
            os._exit(1)
    while not (tmp_path / "run/metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    while not is_gone(tmp_path / "run"):
        time.sleep(0.05)


def test_new_lines_of_a_file_that_a_resume_replaces(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "a/b": 1}\n')
    read_new_metrics = make_metrics_reader(file)
    part = tmp_path / "part"
    part.write_text('{"step": 1}\n')
    part.replace(file)
    assert read_new_metrics() == []
    with file.open("a") as more:
        more.write('{"step": 2, "a/b": 3}\n{"st')
    assert read_new_metrics() == [{"step": 2, "a/b": 3}]
    assert read_new_metrics() == []
    with file.open("a") as more:
        more.write('ep": 3}\n')
    assert read_new_metrics() == [{"step": 3}]
