"""Run the user's programs in processes of their own (program_host.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.config.schema import Agent
from alphaapollo.rewards.grader_processes.protocol import make_subprocess_environ
from alphaapollo.rollout.agents.program_host import ERRORS, RESULT, REWARD, TASK
from alphaapollo.utils.json_types import JsonObject, to_json_value

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0  # seconds to import the user's file
CLOSE_TIMEOUT = 10.0  # seconds to end all programs
HOST_ENDED = "the process that starts the agent's programs has ended; it was killed, or the worker stops"
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "OMP_NUM_THREADS"),
)
"""Environment variables that a program has, besides env.agent.environment and its address and key of the policy."""
SHOWN_LINES = 10  # last lines of stderr in the reason of a failure
SHOWN_CHARS = 2000


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended: `value` is what it returned, unless it failed with `error`."""

    value: object = None
    error: str = ""


class ProgramRunner:
    """Runs the program of env.agent. Belongs to one event loop."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._host: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[bool]] = {}  # session id -> whether its program has ended
        self._starting = asyncio.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="alphaapollo-agents-"))
        self._count = 0

    async def start(self) -> None:
        """Start the host process. Raises ValueError if the user's file cannot be loaded, or a variable is not set."""
        settings = json.dumps([self._agent.path, self._agent.command])
        environ = make_subprocess_environ()
        if missing := [name for name in self._agent.environment if name not in environ]:
            raise ValueError(f"env.agent.environment: {missing[0]} is not set. Set it, or remove it from the list.")
        kept = {*INHERITED, *self._agent.environment}
        environ = {name: value for name, value in environ.items() if name in kept}
        host = [sys.executable, "-P", "-m", "alphaapollo.rollout.agents.program_host", str(os.getpid()), settings]
        self._host = await asyncio.create_subprocess_exec(
            *host,
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the driver alone
        )
        assert self._host.stdout is not None
        try:
            line = await asyncio.wait_for(self._host.stdout.readline(), START_TIMEOUT)
        except TimeoutError:
            line = b""
        if not line:
            await self.close()
            raise ValueError(
                f"env.agent.path={self._agent.path}: importing this file ended its process, or took longer than "
                f"{START_TIMEOUT:g} s. Move slow code into run()."
            )
        if error := json.loads(line)["error"]:
            await self.close()
            raise ValueError(error)
        self._reading = asyncio.create_task(self._read_replies(self._host.stdout))

    async def run(
        self, task: Mapping[str, object], environment: Mapping[str, str], reward_key: str = ""
    ) -> ProgramResult:
        """Run the program for one task and return how it ended. If the caller is cancelled, the program is ended.

        If the host process was killed, its programs have failed, and the next run starts a new host. Raises
        ChildProcessError if it was closed.

        Args:
            task: JSON object, the program's input.
            environment: environment variables in addition to those of the host.
            reward_key: key of the session's rewards, which is no environment variable.
        """
        async with self._starting:
            if self._host is not None and self._reading is not None and self._reading.done():
                logger.warning("%s; it is started again", HOST_ENDED)
                await self._host.wait()
                await self.start()
        if self._host is None:
            raise ChildProcessError(HOST_ENDED)
        self._count += 1
        session_id = str(self._count)
        folder = self._folder / session_id
        folder.mkdir()
        (folder / TASK).write_text(json.dumps(task, ensure_ascii=False, default=to_json_value), encoding="utf-8")
        variables = dict(environment)
        if self._agent.command:
            variables |= {"ALPHAAPOLLO_TASK": str(folder / TASK), "ALPHAAPOLLO_RESULT": str(folder / REWARD)}
        order = {"id": session_id, "folder": str(folder), "environment": variables, "reward_key": reward_key}
        ended = self._waiting[session_id] = asyncio.get_running_loop().create_future()
        try:
            self._write(order)
            has_ended = await asyncio.shield(ended)
            return self._read_result(folder) if has_ended else ProgramResult(error=HOST_ENDED)
        finally:
            if not ended.done():
                self._write({"end": session_id})
                await asyncio.shield(ended)
            del self._waiting[session_id]
            shutil.rmtree(folder, ignore_errors=True)  # `close` removes all folders

    async def close(self) -> None:
        """End all programs and the host process. Idempotent."""
        host, self._host = self._host, None
        if host is not None:
            assert host.stdin is not None
            host.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                host.kill()  # its supervisors then end their programs, and with them the pipe that is read
            await host.wait()
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=CLOSE_TIMEOUT)
            self._reading.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, order: JsonObject) -> None:
        if self._host is not None and self._host.stdin is not None:
            self._host.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read_replies(self, replies: asyncio.StreamReader) -> None:
        """Read the ids of ended sessions until the host ends, which ends all sessions."""
        try:
            while line := await replies.readline():
                if ended := self._waiting.get(line.decode().strip()):  # None: its caller was cancelled twice
                    ended.set_result(True)
        finally:
            for ended in self._waiting.values():
                if not ended.done():
                    ended.set_result(False)

    def _read_result(self, folder: Path) -> ProgramResult:
        errors = folder / ERRORS
        lines = errors.read_text(errors="replace").splitlines() if errors.exists() else []
        try:
            result = json.loads((folder / RESULT).read_text())
        except (FileNotFoundError, ValueError):
            result = {"error": "the program ended without a result"}
        if "error" not in result:
            return ProgramResult(result["result"])
        lines = (lines + result.get("traceback", []))[-SHOWN_LINES:]
        shown = "\n".join(line for line in lines if line != result["error"])[-SHOWN_CHARS:]
        return ProgramResult(error=result["error"] + (f"\n{shown}" if shown else ""))
