"""Run the user's programs in processes of their own. ProgramRunner starts a host process:

    python -m alphaapollo.rollout.agents.programs PARENT_PID SETTINGS

The host imports the user's file once. For each session it forks a supervisor, which forks the program. When the program
has ended or must end, the supervisor kills all processes that the program has started. It finds even those that left
the program's process group, because they become its children (PR_SET_CHILD_SUBREAPER).

    request    a line of JSON: {"folder", "environment"} starts a session, {"end": number of that request} ends it
    reply      the first reply says why the file cannot be loaded, or is "". Later replies are null. A session's reply
               comes when the session has ended; its folder then has the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from alphaapollo.processes.host import (
    ProcessDiedError,
    ProcessError,
    ProcessHost,
    format_signal,
    reserve_stdin_and_stdout,
)
from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ
from alphaapollo.processes.watchdog import exit_with_parent, list_child_pids
from alphaapollo.utils.json_types import JsonObject, to_json_value
from alphaapollo.utils.user_module import load_user_object

if TYPE_CHECKING:
    from alphaapollo.config.schema import Agent

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
TASK_FILE, RESULT_FILE = "task.json", "result.json"  # files in the folder of a session
REWARD_FILE, ERRORS_FILE = "reward.json", "errors.txt"  # reward of a command; end of the program's output
SHOWN_BYTES = 1 << 16  # last bytes of the program's output that are kept
END_SECONDS = 10.0  # time limit to read the rest of the output after the program has ended
TRACEBACK_LINES = 30
START_TIMEOUT = 120.0  # seconds to import the user's file
CLOSE_TIMEOUT = 10.0  # seconds to end all programs
HOST_ENDED = "the process that starts the agent's programs has ended; it was killed, or the worker stops"
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "OMP_NUM_THREADS"),
)
"""Environment variables that programs inherit. They also get env.agent.environment and the policy's address and key."""
SHOWN_LINES = 10  # last lines of stderr in the reason of a failure
SHOWN_CHARS = 2000


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended: `value` is what it returned, unless it failed with `error`."""

    value: object = None
    error: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)  # of single requests, by id


class ProgramRunner:
    """Runs the program of env.agent. Belongs to one event loop."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._host: ProcessHost | None = None
        self._starting = asyncio.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="alphaapollo-agents-"))

    async def start(self) -> None:
        """Start the host process. Raises ValueError if the user's file cannot be loaded, or a variable is not set."""
        environ = make_subprocess_environ()
        if missing := [name for name in self._agent.environment if name not in environ]:
            raise ValueError(f"env.agent.environment: {missing[0]} is not set. Set it, or remove it from the list.")
        environ = {name: environ[name] for name in {*INHERITED, *self._agent.environment} & environ.keys()}
        settings = json.dumps([self._agent.path, self._agent.command])
        self._host = await ProcessHost.start(make_module_command(__name__, os.getpid(), settings), environ)
        try:
            error = json.loads(await self._host.read_first_reply(START_TIMEOUT))
        except ProcessError:
            error = (
                f"env.agent.path={self._agent.path}: importing this file ended its process, or took longer than "
                f"{START_TIMEOUT:g} s. Move slow code into run()."
            )
        if error:
            await self.close()
            raise ValueError(error)

    async def run(self, task: Mapping[str, object], environment: Mapping[str, str]) -> ProgramResult:
        """Run the program for one task and return how it ended. If the caller is cancelled, the program is ended.

        If the host process was killed, its programs have failed, and the next run starts a new host. Raises
        ChildProcessError after `close`."""
        async with self._starting:
            if self._host is not None and self._host.has_closed_output:
                logger.warning("%s; it is started again", HOST_ENDED)
                await self.start()
        if (host := self._host) is None:
            raise ChildProcessError(HOST_ENDED)
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / TASK_FILE).write_text(json.dumps(task, ensure_ascii=False, default=to_json_value), encoding="utf-8")
        files = {"ALPHAAPOLLO_TASK": str(folder / TASK_FILE), "ALPHAAPOLLO_RESULT": str(folder / REWARD_FILE)}
        variables = {**environment, **(files if self._agent.command else {})}
        order = {"folder": str(folder), "environment": variables}
        session_number, ended = host.send(json.dumps(order).encode() + b"\n")
        try:
            await asyncio.shield(ended)
            return self._read_result(folder)
        except ProcessDiedError:
            return ProgramResult(error=HOST_ENDED)
        finally:
            if not ended.done():
                host.send(b'{"end": %d}\n' % session_number)
                await asyncio.wait((ended,))
            shutil.rmtree(folder, ignore_errors=True)  # `close` removes all folders

    async def close(self) -> None:
        """End all programs and the host process. Idempotent."""
        host, self._host = self._host, None
        if host is not None:
            await host.close(CLOSE_TIMEOUT)  # its supervisors then end their programs
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_result(self, folder: Path) -> ProgramResult:
        errors = folder / ERRORS_FILE
        lines = errors.read_text(errors="replace").splitlines() if errors.exists() else []
        try:
            result = json.loads((folder / RESULT_FILE).read_text())
        except (FileNotFoundError, ValueError):
            result = {"error": "the program ended without a result"}
        rewards = result.get("rewards") or {}
        if "error" not in result:
            return ProgramResult(result["result"], rewards=rewards)
        lines = (lines + result.get("traceback", []))[-SHOWN_LINES:]
        shown = "\n".join(line for line in lines if line != result["error"])[-SHOWN_CHARS:]
        return ProgramResult(error=result["error"] + (f"\n{shown}" if shown else ""), rewards=rewards)


class Endpoint:
    """Access of a program to the policy: the second argument of `run(task, endpoint)`.

    Attributes:
        base_url: base URL of OpenAI-compatible APIs, ends with /v1.
        anthropic_base_url: base URL of the Anthropic API.
        api_key: API key of this session.
        model: model name for requests.
    """

    def __init__(self, rewards: dict[str, float]):
        self.base_url, self.anthropic_base_url = os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"]
        self.api_key, self.model = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"]
        self._rewards = rewards

    def reward(self, request_id: str, value: float) -> None:
        """Add a reward for one answer, whose id is `request_id`."""
        self._rewards[request_id] = self._rewards.get(request_id, 0.0) + float(value)


def serve(parent_pid: int, path: str, command: str) -> None:
    """Start and end programs until the pipe from the parent closes."""
    requests, reply_pipe = reserve_stdin_and_stdout()
    pipe: Any = requests.raw  # without a buffer, so that `select` sees each request
    replies = reply_pipe.fileno()
    exit_with_parent(parent_pid, signal.SIGTERM)
    run, error = None, ""
    try:
        run = load_user_object(path, "run", "env.agent.path", "env.agent.path: run") if path else None
    except ValueError as failure:
        error = str(failure)
    os.write(replies, b"0 " + json.dumps(error).encode() + b"\n")
    if error:
        return
    supervisors: dict[int, int] = {}  # number of the session's request -> pid
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, the signal would not write to `waker`
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == wake:
                os.read(wake, 1 << 16)
                for number, pid in list(supervisors.items()):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        del supervisors[number]
                        os.write(replies, b"%d null\n" % number)
            elif not (number_line := pipe.readline()):
                return  # the supervisors end with this process
            else:
                number, order = int(number_line), json.loads(pipe.readline())
                if "end" not in order:
                    supervisors[number] = _fork_supervisor(order, run, command, requests)
                    continue
                if order["end"] in supervisors:
                    os.kill(supervisors[order["end"]], signal.SIGTERM)
                os.write(replies, b"%d null\n" % number)


def _fork_supervisor(
    order: JsonObject, run: Callable[..., object] | None, command: str, requests: BufferedReader
) -> int:
    """Fork the supervisor of a session. Returns its pid."""
    host = os.getpid()
    if pid := os.fork():
        return pid
    try:
        requests.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _end_descendants)
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        exit_with_parent(host, signal.SIGTERM)
        _supervise(order, run, command)
    finally:
        os._exit(0)


def _supervise(order: JsonObject, run: Callable[..., object] | None, command: str) -> None:
    """Run a program, then end the processes that it has left running."""
    folder, supervisor = Path(order["folder"]), os.getpid()
    output, write_end = os.pipe()
    program = os.fork()
    if program == 0:
        rewards: dict[str, float] = {}
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            exit_with_parent(supervisor, signal.SIGKILL)
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            os.environ.update(order["environment"])
            result = _run_function(run, folder, rewards) if run else _run_command(command, folder)
            text = json.dumps({**result, "rewards": rewards}, default=_convert_number)
        except BaseException:  # noqa: BLE001  the result of the session shows it
            lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
            text = json.dumps({"error": lines[-1], "traceback": lines, "rewards": rewards})
        try:
            (folder / RESULT_FILE).write_text(text)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(write_end)
    reading = threading.Thread(target=_keep_end, args=(output, folder / ERRORS_FILE), daemon=True)
    reading.start()
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(program, 0)
        if os.WIFSIGNALED(status):
            name = format_signal(os.WTERMSIG(status))
            (folder / RESULT_FILE).write_text(json.dumps({"error": f"the program was killed by {name}"}))
    _end_descendants()
    reading.join(END_SECONDS)


def _keep_end(output: int, file: Path) -> None:
    """Read a program's output until all its processes have ended, and write the end of it to a file."""
    end = b""
    while data := os.read(output, SHOWN_BYTES):
        end = (end + data)[-SHOWN_BYTES:]
    file.write_bytes(end)


def _run_function(run: Callable[..., object], folder: Path, rewards: dict[str, float]) -> JsonObject:
    task = json.loads((folder / TASK_FILE).read_text(encoding="utf-8"))
    (folder / TASK_FILE).unlink()  # commands that a model writes cannot read the ground truth
    result = run(task, Endpoint(rewards))
    return {"result": asyncio.run(_await(result)) if inspect.isawaitable(result) else result}


async def _await(result: Awaitable[object]) -> object:
    return await result


def _convert_number(value: object) -> object:
    """Convert a number of NumPy or torch."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"run() returned a {type(value).__name__}. Return a number, a dict of numbers, or None.")


def _run_command(command: str, folder: Path) -> JsonObject:
    if code := subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode:
        return {"error": f"the command ended with exit code {code}"}
    return {"result": json.loads((folder / REWARD_FILE).read_text()) if (folder / REWARD_FILE).exists() else None}


def _end_descendants(signal_number: int = 0, frame: FrameType | None = None) -> None:
    """Kill all descendants of this process, and exit if this is a signal handler."""
    while descendants := _list_descendants(os.getpid()):
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # reap them: their children become ours
                pass
        time.sleep(0.001)
    if signal_number:
        os._exit(0)


def _list_descendants(pid: int) -> list[int]:
    return [below for child in list_child_pids(pid) for below in [*_list_descendants(child), child]]


if __name__ == "__main__":
    serve(int(sys.argv[1]), *json.loads(sys.argv[2]))
