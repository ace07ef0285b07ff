"""Run the user's programs in processes of their own (program_host.py)."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.config.schema import Agent
from alphaapollo.processes.host import ProcessDiedError, ProcessError, ProcessHost, make_subprocess_environ
from alphaapollo.rollout.agents.program_host import ERRORS, RESULT, REWARD, TASK
from alphaapollo.utils.json_types import to_json_value

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
        self._host = await ProcessHost.start("alphaapollo.rollout.agents.program_host", settings, environ)
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
            if self._host is not None and self._host.has_closed_output:
                logger.warning("%s; it is started again", HOST_ENDED)
                await self.start()
        host = self._host
        if host is None:
            raise ChildProcessError(HOST_ENDED)
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / TASK).write_text(json.dumps(task, ensure_ascii=False, default=to_json_value), encoding="utf-8")
        variables = dict(environment)
        if self._agent.command:
            variables |= {"ALPHAAPOLLO_TASK": str(folder / TASK), "ALPHAAPOLLO_RESULT": str(folder / REWARD)}
        session, ended = host.send(_encode(folder=str(folder), environment=variables, reward_key=reward_key))
        try:
            await asyncio.shield(ended)
            return self._read_result(folder)
        except ProcessDiedError:
            return ProgramResult(error=HOST_ENDED)
        finally:
            if not ended.done():
                host.send(_encode(end=session))
                await asyncio.wait((ended,))
            shutil.rmtree(folder, ignore_errors=True)  # `close` removes all folders

    async def close(self) -> None:
        """End all programs and the host process. Idempotent."""
        host, self._host = self._host, None
        if host is not None:
            await host.close(CLOSE_TIMEOUT)  # its supervisors then end their programs
        shutil.rmtree(self._folder, ignore_errors=True)

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


def _encode(**order: object) -> bytes:
    return json.dumps(order).encode() + b"\n"
