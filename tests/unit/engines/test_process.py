import logging
import os
import subprocess
import sys

import pytest

from alphaapollo.engines.process import build_process_environment, find_last_error, log_library_to_file


def test_library_log_goes_to_its_file_only(tmp_path, capsys):
    path = tmp_path / "engine.log"
    log_library_to_file("some_library", str(path))
    logging.getLogger("some_library.part").info("loading %d layers", 3)
    logging.getLogger("some_library.part").debug("too much")
    assert path.read_text().endswith("INFO some_library.part: loading 3 layers\n")
    assert "too much" not in path.read_text() and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (
            "Traceback\n  raise\nValueError: head size 8\nvllm.v1.EngineDeadError: see above\n",
            "head size 8",
        ),
        ("2026 INFO x: no Error: here\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_of_a_log_is_found(tmp_path, log, last):
    (tmp_path / "engine.log").write_text(log)
    found = find_last_error(str(tmp_path / "engine.log"))
    assert last in found and bool(found) == bool(last)
    assert find_last_error(str(tmp_path / "missing.log")) == ""


def test_an_engine_process_writes_to_its_log_and_dies_with_its_parent(tmp_path):
    log, weights = tmp_path / "engine.log", tmp_path / "weights"
    weights.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    variables = build_process_environment(str(log), [str(weights)]) | {"ALPHAAPOLLO_ENGINE_PARENT": str(parent.pid)}
    code = (
        "from alphaapollo.engines.process import set_up_engine_process; set_up_engine_process(); "
        "import os, time; print('hello', flush=True); os.write(2, b'from C'); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | variables, stdout=subprocess.PIPE)
    while not (log.exists() and "from C" in log.read_text()):
        assert child.poll() is None
    parent.kill()
    parent.wait()
    assert child.wait(20) == 1
    assert child.stdout is not None and child.stdout.read() == b""
    assert log.read_text() == "hello\nfrom C" and not weights.exists()
