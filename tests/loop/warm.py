"""Programs forked from one warm process that has imported torch, vLLM and alphaapollo. A start takes half a second
instead of ten.

pytest --- warm process (imports once) --- process with main_ppo.main(argv)
                                       --- process with its engine core
                                       --- process that checks a setting with vLLM
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from alphaapollo.processes import entry_point, fork_server
from alphaapollo.processes.fork_server import ForkedContext

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTS = "tests.loop.warm_imports"
ACCEPT_ARGUMENTS = ("alphaapollo.", "tests.loop.", "tests.plugins.")  # modules whose `main` does
KEPT: set[int] = set()  # pids of forked processes that are kept for later tests (stack.py)


@cache
def start_warm_process() -> None:
    """Start the imports in the background, once. The first program waits until they are finished."""
    multiprocessing.forkserver._forkserver._stop()  # other tests may have started one
    CONTEXT.set_forkserver_preload([IMPORTS])
    multiprocessing.forkserver.ensure_running()


def find_warm_process() -> int | None:
    """Pid of the warm process, None if it has been stopped. The next program then starts another one."""
    return multiprocessing.forkserver._forkserver._forkserver_pid


def children_of_the_warm_process() -> set[int]:
    """Pids of the running processes that were forked from the warm process, without those that are kept."""
    pid = find_warm_process()
    if pid is None:
        return set()
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()} - KEPT


def prepare_forked_process() -> None:
    """Give the forked process a session of its own. What it starts is forked from the warm process, too."""
    assert IMPORTS in sys.modules, "an import failed, which a fork server does not report"
    entry_point.exits_at_once = True
    os.setsid()
    fork_server._inherited_modules = frozenset(sys.modules)  # a command shares no fork server of its own
    multiprocessing.forkserver.ensure_running = lambda: None  # of the engine core
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    multiprocessing.context._concrete_contexts["spawn"] = ForkedContext()  # of checks that import vLLM


def run_command(
    module: str, words: Sequence[str], output: Path, environment: dict[str, str], folder: Path, typed: str = ""
) -> int:
    """Run `python -m module words` in this process, with a text as its input. Returns the exit code."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdin = io.StringIO(typed)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    try:
        if not module.startswith(ACCEPT_ARGUMENTS):
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        return importlib.import_module(module).main(list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else end.code is not None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_program(*command: Any) -> None:
    prepare_forked_process()
    os._exit(run_command(*command))


class Program:
    """A running command `python -m module words` in its own session, with its output in a file."""

    def __init__(
        self,
        module: str,
        words: Sequence[object],
        output: Path,
        environment: dict[str, str],
        folder: Path,
        warm: bool,
        typed: str = "",
    ):
        self.output = output
        output.touch()
        self._process: subprocess.Popen[bytes] | multiprocessing.context.ForkServerProcess
        words = [str(word) for word in words]
        if warm:
            self._process = CONTEXT.Process(
                target=run_program, args=(module, words, output, environment, folder, typed)
            )
            self._process.start()
        else:
            with output.open("w") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *words], cwd=folder, stdout=file, stderr=file, env=environment,
                    start_new_session=True,
                )  # fmt: skip
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float | None = None) -> int | None:
        """Exit code, negative for a signal; None if it still runs after `seconds`."""
        if isinstance(self._process, subprocess.Popen):
            try:
                return self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
        self._process.join(seconds)
        return self._process.exitcode

    def wait_for(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Wait until a condition holds. Fails if the program ends first."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.wait(0.02) is None and time.monotonic() < end, self.printed[-4000:]

    def signal(self, number: int) -> None:
        if self.wait(0) is None:
            os.kill(self.pid, number)
