import importlib
import sys
import threading
from pathlib import Path

import pytest

from alphaapollo.observability import console
from alphaapollo.observability.console import find_activity, find_imported_package
from alphaapollo.utils.heartbeat import HEARTBEAT, Heartbeat


@pytest.fixture(autouse=True)
def empty_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HEARTBEAT, "_open", {})


def test_the_oldest_operation_of_this_process_and_the_workers_it_waits_for() -> None:
    assert find_activity() == ""
    with HEARTBEAT.record_call("compute_values", "critic 0"):
        assert find_activity() == "compute values: critic 0"
        with HEARTBEAT.record_call("update"), HEARTBEAT.record_call("batch"):
            assert find_activity() == "update: critic 0"
            keys = [HEARTBEAT.begin_call("update", f"policy {rank}") for rank in range(4)]
            assert find_activity() == "update: critic 0, policy 0, policy 1, ..."
            for key in keys:
                HEARTBEAT.end_call(key)
    with HEARTBEAT.record_call("prepare"), HEARTBEAT.record_call("read prompts"):
        assert find_activity() == "prepare: read prompts"
    assert find_activity() == ""


def test_a_package_that_is_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import blocks until another thread has looked at it, as the console's thread does."""
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package/__init__.py").write_text("import slow_dependency")
    (tmp_path / "slow_dependency.py").write_text("import sys; sys.look()")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []

    def look() -> None:
        with HEARTBEAT.record_call("prepare"):
            thread = threading.Thread(target=lambda: seen.append(find_activity()))
            thread.start()
            thread.join()

    monkeypatch.setattr(sys, "look", look, raising=False)
    importlib.import_module("slow_package")
    assert seen == ["prepare: importing slow_package"]
    assert find_imported_package(sys._getframe()) == find_imported_package(None) == ""


def test_own_modules_are_not_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("import sys; frame = sys._getframe()", "x", "exec")
    names: dict[str, object] = {"__name__": "alphaapollo.trainer.loop"}
    exec(code, names)
    assert find_imported_package(names["frame"]) == ""  # type: ignore[arg-type]
    monkeypatch.setattr(console, "PACKAGE", "other")
    assert find_imported_package(names["frame"]) == "alphaapollo"  # type: ignore[arg-type]


def test_calls_are_listed_oldest_first() -> None:
    times = iter([0.0, 1.0, 5.0])
    heartbeat = Heartbeat(lambda: next(times))
    heartbeat.begin_call("generate")
    heartbeat.begin_call("grade")
    assert [(call.name, call.seconds) for call in heartbeat.list_active_calls()] == [("generate", 5.0), ("grade", 4.0)]
