"""The shell of docs/agents.md as it is printed there, with hostile commands."""

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.unit.rollout.agents.test_runner import find_processes

PAGE = Path(__file__).parents[4] / "docs" / "agents.md"
if shutil.which("bwrap") is None:
    pytest.skip("install bubblewrap to run these tests", allow_module_level=True)


@pytest.fixture
def run_shell(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# shell\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setenv("OPENAI_API_KEY", "the-key-of-the-session")
    names: dict = {}
    exec(code, names)
    (tmp_path / "work").mkdir()
    return lambda command: names["run_shell"](command, str(tmp_path / "work"))


def test_commands_work_in_their_folder(run_shell, tmp_path):
    assert run_shell("echo one > file && cat file && pwd") == "one\n/work\n"
    assert (tmp_path / "work" / "file").read_text() == "one\n"


def test_no_variable_file_and_process_of_the_program_is_seen(run_shell, tmp_path):
    (tmp_path / "task.json").write_text("the ground truth")
    commands = ("env", "cat /proc/*/environ /proc/*/cmdline", f"cat {tmp_path}/task.json", "ls / /tmp /root /home")
    seen = "".join(map(run_shell, commands))
    assert "the-key-of-the-session" not in seen and "the ground truth" not in seen
    assert str(os.getpid()) not in run_shell("ls /proc").split()
    assert run_shell("touch /usr/written /etc/written").count("cannot touch") == 2


def test_nothing_listens_on_the_loopback_interface(run_shell):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected"
        assert "connected" not in run_shell(connect)


def test_output_is_bounded_and_processes_end(run_shell, tmp_path):
    mark = f"mark{os.getpid()}"
    assert len(run_shell(f"(exec -a {mark} sleep 1000) & kill -9 -1; yes")) <= 10_000
    assert len(run_shell("yes")) == 10_000
    run_shell(f"setsid bash -c 'exec -a {mark} sleep 1000' > /dev/null 2>&1 &")
    assert wait_until(lambda: not find_processes(mark)), "a process is still running"
