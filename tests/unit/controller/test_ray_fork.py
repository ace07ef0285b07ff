"""Workers of a local Ray are forked from the run's fork server, if it has not imported Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.controller.ray_fork import prepend_script
from alphaapollo.processes.fork_server import share_fork_server

SCRIPT = Path(sys.modules[prepend_script.__module__].__file__ or "")
DEFAULT_WORKER = """import os, sys
import module_of_the_user
open(sys.argv[1], "w").write(f"default {sys.argv[2:]} {os.getpgrp() == os.getpid()}")
"""
SETUP_WORKER = "import sys\nopen(sys.argv[2], 'w').write(f'setup {sys.argv[3:]}')"


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("preload", ["decimal", "ray", None])
def test_default_worker_runs_in_a_forked_process(
    tmp_path: Path, preload: str | None, safe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the modules of PYTHONPATH, also if Python leaves out the script's folder."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "module_of_the_user.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    setup, default, output = tmp_path / "setup_worker.py", tmp_path / "default_worker.py", tmp_path / "output"
    setup.write_text(SETUP_WORKER)
    default.write_text(DEFAULT_WORKER)
    raylet = ["raylet", f"--python_worker_command={sys.executable} {setup} {default} {output} --language=PYTHON --id=3"]
    name, option = prepend_script(raylet)
    command = option.partition("=")[2].split()
    assert name == "raylet" and command[:3] == [sys.executable, str(SCRIPT), str(setup)]
    if preload:
        with share_fork_server([preload], [preload], {}):
            subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    else:
        subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    expected = "default ['--id=3'] True" if preload == "decimal" else "setup ['--language=PYTHON', '--id=3']"
    assert output.read_text().startswith(expected)
