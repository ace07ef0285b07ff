"""Command-line clients of docker and podman, as processes with bounded output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass

from alphaapollo.plugins.tasks.sandboxes.streams import OutputBuffer

CALL_TIMEOUT = 120.0  # seconds of a call that runs no command of the agent

# What the clients read of this process's environment. A container gets none of it.
PREFIXES = ("DOCKER_", "CONTAINER_", "CONTAINERS_", "BUILDAH_", "PODMAN_", "STORAGE_", "REGISTRY_", "XDG_")
VARIABLES = ("PATH", "HOME", "USER", "TMPDIR", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True)
class ContainerClient:
    """Command-line client, docker or podman."""

    program: str

    async def start(self, *arguments: str, stdin: int, with_proxies: bool = False) -> Process:
        """Start the client. Raises ValueError if it is not installed."""
        names = [name for name in os.environ if name in VARIABLES or name.startswith(PREFIXES)]
        names += [name for name in PROXIES if with_proxies and name in os.environ]
        environment = {name: os.environ[name] for name in names}
        try:
            return await asyncio.create_subprocess_exec(
                *(self.program, *arguments),
                env=environment,
                cwd=tempfile.gettempdir(),  # podman leaves a file `oom` there
                stdin=stdin,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise ValueError(
                f"the sandbox {self.program!r} needs the program {self.program}, which is not on PATH. Install it, or "
                "use the sandbox rootless."
            ) from error

    async def call(
        self, *arguments: str, timeout: float = CALL_TIMEOUT, stdin: bytes = b"", with_proxies: bool = False
    ) -> tuple[int, str, str]:
        """Run the client: exit code, stdout, stderr. Raises TimeoutError, and ValueError as `start` does."""
        output, errors = OutputBuffer(1 << 20), OutputBuffer(1 << 16)
        process = await self.start(*arguments, stdin=PIPE, with_proxies=with_proxies)
        async with asyncio.timeout(timeout):
            await communicate(process, output, errors, stdin)
        assert process.returncode is not None
        return process.returncode, output.get_text(), errors.get_text()

    async def require(self) -> None:
        """Check that the client works. Raises ValueError."""
        code, _, errors = await self.call("version")
        if code:
            fix = "Start its daemon" if self.program == "docker" else "Correct its configuration"
            problem = last_lines(errors, 3).rstrip(".")
            raise ValueError(f"`{self.program} version` failed: {problem}. {fix}, or use the sandbox rootless.")


async def communicate(process: Process, output: OutputBuffer, errors: OutputBuffer, stdin: bytes = b"") -> None:
    """Read what a process writes, until it ends. Kills it if this is cancelled."""
    assert process.stdout is not None and process.stderr is not None
    try:
        sending = [_send(process.stdin, stdin)] if process.stdin is not None else []
        await asyncio.gather(collect(process.stdout, output), collect(process.stderr, errors), *sending)
        await process.wait()
    finally:
        kill(process)
        await process.wait()


async def collect(stream: asyncio.StreamReader, output: OutputBuffer) -> None:
    """Read a stream to its end."""
    while chunk := await stream.read(1 << 16):
        output.add(chunk)


async def _send(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the process has ended, and its exit code says why
        stream.write(content)
        await stream.drain()
        stream.close()


def kill(process: Process) -> None:
    """Kill a client and what it has started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def last_lines(text: str, count: int) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
