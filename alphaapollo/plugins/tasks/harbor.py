"""Task folders of Harbor (folders.py): an agent works in a sandbox, then the tests of the task grade what it left.

    open_trial(folder) -> Trial    exec (the agent's commands), then verify() -> Score

`env.env_name=harbor` lets the policy be the agent, with the tools bash and submit. Programs with `env.env_name=agent`
use `open_trial` themselves (docs/tasks.md).
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Services, StepResult, register_environment
from alphaapollo.environments.classes import ToolClass, make_tools
from alphaapollo.plugins.tasks.folders import HarborTask, read_task
from alphaapollo.plugins.tasks.sandboxes.base import (
    ExecResult,
    Sandbox,
    SandboxDamagedError,
    SandboxFailedError,
    SandboxSpec,
)
from alphaapollo.plugins.tasks.sandboxes.factory import check_backend, make_sandbox
from alphaapollo.plugins.tasks.settings import Harbor
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.tools.base import ToolFailedError
from alphaapollo.types import Score

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # Harbor reads them in this order
SHOWN_CHARS = 1000  # of the end of the output of tests, in the reason of their score
COMMAND_SHARE = 0.9  # of env.tool_limits.timeout, after which a call ends the sandbox


class Trial:
    """One attempt at a task, in a sandbox of its own. Made by `open_trial`."""

    def __init__(self, task: HarborTask, sandbox: Sandbox):
        self.task, self.sandbox = task, sandbox
        self.seconds_left = task.agent_timeout  # of the agent's commands
        self._has_acted, self._damage = False, ""  # why a command ended the sandbox

    @property
    def endpoint(self) -> str:
        """The address inside the sandbox of the endpoint that was passed to open_trial."""
        return f"http://127.0.0.1:{self.sandbox.forwarded_port}/v1"

    async def exec(
        self, command: str, timeout: float = math.inf, environment: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command of the agent. All of its commands together may take [agent] timeout_sec. One that ends the
        sandbox is the last one."""
        limit = max(0.0, min(timeout, self.seconds_left))
        self._has_acted = True
        try:
            result = await self.sandbox.exec(command, timeout=limit, environment=environment, cwd=self.task.workdir)
        except SandboxDamagedError as error:
            self._damage = self._damage or str(error)
            result = ExecResult(-signal.SIGKILL, "", seconds=self.seconds_left, reason=self._damage)
        self.seconds_left -= result.seconds
        return result

    async def solve(self) -> ExecResult:
        """Run the solution of the task, solution/solve.sh. Raises ValueError if there is none."""
        folder = self.task.folder / "solution"
        if not (folder / "solve.sh").is_file():
            raise ValueError(f"{folder}/solve.sh: no such file. Write it to check the task.")
        await self.sandbox.write("/solution", folder)
        return await self.exec("bash /solution/solve.sh", environment=self.task.solution_environment)

    async def verify(self, timeout: float = math.inf) -> Score:
        """Run the tests, which the agent has never seen, and return their reward; the reason is the end of what they
        printed. All that the agent has left running is killed before. A sandbox that has ended, and tests that do not
        end or write no reward, have the reward 0 after a command of the agent, else they raise SandboxFailedError."""
        try:
            return await self._run_tests(min(timeout, self.task.verifier_timeout))
        except SandboxDamagedError as error:
            if not self._has_acted:
                raise
            return Score(0.0, reason=self._damage or str(error))

    async def _run_tests(self, timeout: float) -> Score:
        task, sandbox = self.task, self.sandbox
        await sandbox.kill_processes()
        await sandbox.write("/tests", task.folder / "tests")
        await sandbox.write("/logs", {"verifier/.keep": b"", "agent/.keep": b"", "home/.keep": b""})
        environment = {"HOME": "/logs/home", **task.verifier_environment}  # HOME of the agent may hold anything
        folder = shlex.quote(task.workdir or sandbox.workdir)  # the agent may have removed it
        command = f"cd {folder} 2>/dev/null; bash /tests/test.sh"
        done = await sandbox.exec(command, timeout=timeout, environment=environment, cwd="/")
        printed = done.output.strip()[-SHOWN_CHARS:]
        for path in REWARDS:
            try:
                content = await sandbox.read(path)
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise SandboxDamagedError(f"{task.name}: {error}") from error
            if done.timed_out:
                break  # it may be the reward of a test that was not complete
            return replace(_read_reward(task.name, path, content), reason=printed and f"the tests printed: {printed}")
        said = ", ".join(filter(None, [done.reason or f"exit code {done.code}", printed]))
        raise SandboxDamagedError(f"{task.name}: tests/test.sh wrote no reward ({said})")


def _read_reward(name: str, path: str, content: bytes) -> Score:
    """Return the score in a reward file: a number, or an object of numbers with `reward` or a single one."""
    try:
        value = json.loads(content) if path.endswith("json") else float(content)
        values = dict(value) if isinstance(value, dict) else {"reward": value}
        parts = {str(key): float(number) for key, number in values.items() if not isinstance(number, str)}
        reward = parts["reward"] if len(parts) != 1 else next(iter(parts.values()))
        if len(parts) != len(values) or not all(map(math.isfinite, parts.values())):
            raise ValueError("a value is not a finite number")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise SandboxDamagedError(f"{name}: {path} has no reward ({type(error).__name__}: {error})") from error
    return Score(reward, {"accuracy": float(reward >= 1), **{key: one for key, one in parts.items() if len(parts) > 1}})


@asynccontextmanager
async def open_trial(
    folder: str | Path, backend: str = "rootless", rootfs: str = "", endpoint: str = ""
) -> AsyncIterator[Trial]:
    """Context manager for an attempt at a task. endpoint: URL that the agent may reach as `Trial.endpoint`.

    Raises ValueError if the task cannot run in this sandbox, SandboxFailedError if the sandbox fails.
    """
    task = await asyncio.to_thread(read_task, Path(folder))
    if task.unsupported:
        raise ValueError(f"{task.folder}: not supported: {', '.join(task.unsupported)}.")
    address = urlsplit(endpoint)
    spec = SandboxSpec(
        image=None if task.docker_image else task.folder / "environment",
        docker_image=task.docker_image,
        rootfs=Path(rootfs).expanduser() if rootfs else None,
        environment=task.environment,
        cpus=task.cpus,
        memory_mb=task.memory_mb,
        storage_mb=task.storage_mb,
        allow_internet=task.allow_internet,
        build_timeout=task.build_timeout,
        forward_to=(address.hostname or "", address.port or 80) if endpoint else None,
    )
    sandbox = make_sandbox(backend, spec)
    try:
        await sandbox.start()
        yield Trial(task, sandbox)
    finally:
        await asyncio.shield(sandbox.close())


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _get_slots(count: int) -> asyncio.Semaphore:
    """Return the semaphore that all episodes of this event loop share."""
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(count))


class BashAgent:
    """The environment of a task, as methods that are tools."""

    def __init__(self, settings: Harbor, command_timeout: float):
        self._settings, self._command_timeout = settings, command_timeout
        self._slots: asyncio.Semaphore | None = None
        self.is_submitted = False

    async def reset(self, task: str, **_: object) -> None:
        slots = _get_slots(self._settings.max_sandboxes)
        with exclude_from_time_limit():
            await slots.acquire()
        self._slots = slots
        self._opened = open_trial(task, self._settings.backend, self._settings.rootfs)
        self._trial = await self._opened.__aenter__()

    async def bash(self, command: str) -> str:
        """Run a command with bash.

        Args:
            command: the command.
        """
        if self.is_submitted:
            return "the command did not run: the work is submitted"
        try:
            done = await self._trial.exec(command, self._command_timeout)
        except SandboxFailedError as error:
            raise ToolFailedError(str(error)) from error
        self.is_submitted = self._trial.seconds_left <= 0
        code = f"exit code {done.code}" if done.code or not done.output else ""
        return "\n".join(filter(None, [done.output.strip("\n"), done.reason or code]))

    async def submit(self) -> str:
        """Submit your work. Call this when the task is done."""
        self.is_submitted = True
        return ""

    async def get_score(self) -> Score:
        return await self._trial.verify()

    async def close(self) -> None:
        try:
            if hasattr(self, "_trial"):
                await self._opened.__aexit__(None, None, None)
        finally:
            if self._slots is not None:
                self._slots.release()


def _check(config: Env) -> None:
    try:
        check_backend(config.find_plugin_section("harbor").backend)
    except ValueError as error:
        raise ValueError(f"env.harbor.backend: {error}") from None


@register_environment("harbor", check=_check, own_tools=partial(make_tools, BashAgent, {"bash", "submit"}))
class HarborEnvironment(ToolClass):
    """Environment of task folders, with the tools bash and submit. The tests run at the end, also at a limit."""

    def __init__(self, services: Services):
        timeout = COMMAND_SHARE * services.config.tool_limits.timeout
        settings = services.config.find_plugin_section("harbor")
        super().__init__(partial(BashAgent, settings, timeout), False, (), services)

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        if result.done or not self._object.is_submitted:
            return result
        return StepResult(done=True, score=await self._score(""), kept_chars=result.kept_chars, info=result.info)

    async def _score(self, text: str | None) -> Score:
        score: Score = await self._object.get_score()
        return score
