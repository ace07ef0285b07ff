"""Process that runs the programs of sessions: python -m alphaapollo.rollout.agents.program_host PARENT_PID SETTINGS

It imports the user's file once. For each session it forks a supervisor, which forks the program. When the program has
ended or is to be ended, the supervisor kills all processes that the program has started, also those that left its
process group, because the supervisor adopts them (PR_SET_CHILD_SUBREAPER).

    request    a line of JSON: {"folder", "environment", "reward_key"} of a session, or {"end": number of its request}
    reply      first, why the file cannot be loaded ("": it is loaded); for a session, null when it has ended. Its
               result is in its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from types import FrameType
from typing import Any

from alphaapollo.processes.host import format_signal, reserve_stdin_and_stdout
from alphaapollo.processes.watchdog import exit_with_parent, list_child_pids
from alphaapollo.utils.json_types import JsonObject

PR_SET_CHILD_SUBREAPER = 36
TASK, RESULT = "task.json", "result.json"  # files in the folder of a session
REWARD, ERRORS = "reward.json", "errors.txt"  # reward of a command, and the end of the program's stdout and stderr
SHOWN_BYTES = 1 << 16  # of the program's output
END_SECONDS = 10.0  # time limit to read the rest of it
TRACEBACK_LINES = 30


class Endpoint:
    """Access of a program to the policy: the second argument of `run(task, endpoint)`.

    Attributes:
        base_url: of OpenAI-compatible APIs, ends with /v1.
        anthropic_base_url: of the Anthropic API.
        api_key: API key of this session.
        model: model name for requests.
        reward_key: header x-reward-key of requests that give rewards.
    """

    def __init__(self, environment: dict[str, str], reward_key: str):
        self.base_url = environment["OPENAI_BASE_URL"]
        self.anthropic_base_url = environment["ANTHROPIC_BASE_URL"]
        self.api_key = environment["OPENAI_API_KEY"]
        self.model = environment["OPENAI_MODEL"]
        self.reward_key = reward_key

    def reward(self, request_id: str, value: float) -> None:
        """Add a reward for one answer, whose id is `request_id`. Raises ValueError if there is no such answer."""
        body = json.dumps({"request_id": request_id, "reward": value}).encode()
        headers = {"authorization": f"Bearer {self.api_key}", "x-reward-key": self.reward_key}
        request = urllib.request.Request(f"{self.base_url}/rewards", body, headers)
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]["message"]) from error


def load_agent(path: str) -> Callable[..., object]:
    """Load `run` of the user's file. Raises ValueError if the file or `run` does not exist or has another signature."""
    from alphaapollo.utils.user_module import load_user_object

    run = load_user_object(path, "run", "env.agent.path", "env.agent.path: run")
    try:
        inspect.signature(run).bind("task", "endpoint")
    except TypeError as error:
        raise ValueError(f"env.agent.path={path}: define run(task, endpoint). {error}.") from error
    return run


def serve(parent_pid: int, path: str, command: str) -> None:
    """Start and end programs until the pipe from the parent closes."""
    requests, reply_pipe = reserve_stdin_and_stdout()
    pipe: Any = requests.raw  # without a buffer, so that `select` sees each request
    replies = reply_pipe.fileno()
    exit_with_parent(parent_pid, signal.SIGTERM)
    run, error = None, ""
    try:
        run = load_agent(path) if path else None
    except ValueError as failure:
        error = str(failure)
    os.write(replies, b"0 " + json.dumps(error).encode() + b"\n")
    supervisors: dict[int, int] = {}  # number of the session's request -> pid
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while not error:
        for key, _ in selector.select():
            if key.fd == wake:
                os.read(wake, 1 << 16)
                _report_ended(supervisors, replies)
            elif not (line := pipe.readline()):
                for pid in supervisors.values():
                    os.kill(pid, signal.SIGTERM)
                return
            else:
                order = json.loads(pipe.readline())
                if "end" not in order:
                    supervisors[int(line)] = _fork_supervisor(order, run, command, requests)
                    continue
                if order["end"] in supervisors:
                    os.kill(supervisors[order["end"]], signal.SIGTERM)
                os.write(replies, b"%d null\n" % int(line))


def _report_ended(supervisors: dict[int, int], replies: int) -> None:
    for number, pid in list(supervisors.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del supervisors[number]
            os.write(replies, b"%d null\n" % number)


def _fork_supervisor(
    order: JsonObject, run: Callable[..., object] | None, command: str, requests: BufferedReader
) -> int:
    """Fork the supervisor of a session. Returns its pid."""
    host = os.getpid()
    if pid := os.fork():
        return pid
    try:
        requests.close()  # it has the reward keys of other sessions
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
    """Run a program, then end what it has left running."""
    folder = Path(order["folder"])
    environment = {**os.environ, **order["environment"]}
    supervisor = os.getpid()
    output, write_end = os.pipe()
    program = os.fork()
    if program == 0:
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            exit_with_parent(supervisor, signal.SIGKILL)
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            os.environ.update(order["environment"])
            if run is None:
                _run_command(command, folder, environment)
            else:
                _run_function(run, folder, Endpoint(environment, order["reward_key"]))
            status = 0
        except BaseException:  # noqa: BLE001  the result of the session shows it
            lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
            (folder / RESULT).write_text(json.dumps({"error": lines[-1], "traceback": lines}))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(write_end)
    reading = threading.Thread(target=_keep_end, args=(output, folder / ERRORS), daemon=True)
    reading.start()
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(program, 0)
        if os.WIFSIGNALED(status):
            name = format_signal(os.WTERMSIG(status))
            (folder / RESULT).write_text(json.dumps({"error": f"the program was killed by {name}"}))
    _end_descendants()
    reading.join(END_SECONDS)


def _keep_end(output: int, file: Path) -> None:
    """Read a program's output until all its processes have ended, and write the end of it to a file."""
    end = b""
    while data := os.read(output, SHOWN_BYTES):
        end = (end + data)[-SHOWN_BYTES:]
    file.write_bytes(end)


def _run_function(run: Callable[..., object], folder: Path, endpoint: Endpoint) -> None:
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    (folder / TASK).unlink()  # commands that a model writes cannot read the ground truth
    result = awaitable = run(task, endpoint)
    if inspect.isawaitable(awaitable):

        async def wait() -> object:
            return await awaitable

        result = asyncio.run(wait())
    (folder / RESULT).write_text(json.dumps({"result": result}, default=_convert_number))


def _convert_number(value: Any) -> Any:
    """Convert a number of NumPy or torch."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"run() returned a {type(value).__name__}. Return a number, a dict of numbers, or None.")


def _run_command(command: str, folder: Path, environment: dict[str, str]) -> None:
    code = subprocess.run(["/bin/sh", "-c", command], env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        (folder / RESULT).write_text(json.dumps({"error": f"the command ended with exit code {code}"}))
        return
    result = (folder / REWARD).read_text() if (folder / REWARD).exists() else "null"
    (folder / RESULT).write_text(json.dumps({"result": json.loads(result)}))


def _end_descendants(signal_number: int = 0, frame: FrameType | None = None) -> None:
    """Kill all descendants of this process, and exit if this is a signal handler."""
    while descendants := _list_descendants(os.getpid()):
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # their children become ours
                pass
        time.sleep(0.001)
    if signal_number:
        os._exit(0)


def _list_descendants(pid: int) -> list[int]:
    return [one for child in list_child_pids(pid) for one in [*_list_descendants(child), child]]


if __name__ == "__main__":
    serve(int(sys.argv[1]), *json.loads(sys.argv[2]))
