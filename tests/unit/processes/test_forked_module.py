"""Processes forked from a server that has imported their module."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.processes import forked_module
from alphaapollo.processes.entry_point import run_in_temp_folder
from alphaapollo.processes.forked_module import SERVER, start_server
from alphaapollo.processes.host import ProcessDiedError, ProcessHost

MODULE = '''
import os, sys
from alphaapollo.processes.host import reserve_stdin_and_stdout

def main(words):
    """Answer with the words, the folder, a variable, the first folder of modules, and whether the title has a name."""
    requests, replies = reserve_stdin_and_stdout()
    title = open("/proc/self/cmdline").read()
    reply = [words, os.getcwd(), os.environ.get("COLOUR"), sys.path[0], __name__ in title]
    replies.write(f"0 {reply}\\n".encode())
    replies.flush()
    requests.readline()
    sys.exit(7)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "forked_example.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(SERVER, "")
    monkeypatch.setattr(forked_module, "_servers", {})
    return "forked_example"


async def run(module: str, *arguments: str) -> tuple[Any, str, int]:
    """Return the first reply, how the process ended, and its parent's pid."""
    host = await ProcessHost.fork(module, *arguments)
    parent = int(Path(f"/proc/{host.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    reply = await host.read_first_reply(60)
    host._handle.stdin.write(b"\n")  # type: ignore[union-attr]
    how = await host.end_and_describe_exit(60)
    await host.close()
    return eval(reply), how, parent


def test_a_process_has_the_state_of_its_creator(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_server(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'first'}{os.pathsep}{tmp_path}")
    reply, how, _ = asyncio.run(run(module, "a", "b c"))
    own = str(Path(forked_module.__file__).parents[2])
    assert reply == [["a", "b c"], str(tmp_path), "red", own, True] and how == "exit code 7"


def test_processes_that_inherit_the_variable_share_a_server_and_replace_a_dead_one(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, first = asyncio.run(run(module))
    own = forked_module._servers
    monkeypatch.setattr(forked_module, "_servers", {})  # as another process
    _, how, second = asyncio.run(run(module))
    assert first == second == next(iter(own.values()))._forkserver_pid and how == "exit code 7"
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    _, how, third = asyncio.run(run(module))
    assert third != first and how == "exit code 7"
    monkeypatch.setattr(forked_module, "_make_key", lambda module: f"other installation:{module}:")
    assert asyncio.run(run(module))[2] not in (first, third)


def test_each_command_of_a_process_has_its_own_server(module: str) -> None:
    """Its socket is in the command's temporary folder, which is removed at the end."""
    parents = list[int]()

    def command() -> int:
        parents.append(asyncio.run(run(module))[2])
        return 0

    for _ in range(2):
        assert run_in_temp_folder(command) == 0
    first, second = parents
    assert first != second and not forked_module._servers and SERVER not in os.environ


def test_processes_end_with_their_server(module: str) -> None:
    async def kill_server() -> str:
        host = await ProcessHost.fork(module)
        await host.read_first_reply(60)
        os.kill(start_server(module)._forkserver_pid, signal.SIGKILL)
        how = await host.end_and_describe_exit(60)
        await host.close()
        return how

    assert asyncio.run(kill_server()) == "SIGKILL"


def test_a_module_that_cannot_be_imported_is_an_error(module: str, tmp_path: Path) -> None:
    (tmp_path / "forked_example.py").write_text("raise OSError('no disk')")
    with pytest.raises(ProcessDiedError, match="forked_example cannot be imported in a process of its own"):
        asyncio.run(ProcessHost.fork(module))
