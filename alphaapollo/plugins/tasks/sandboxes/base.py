"""Sandbox protocol: a small machine of its own, in which the commands of an agent and the tests that grade them run.

    make_sandbox(backend, spec) -> sandbox        start, then any of exec, write, read, kill_processes, finally: close

A sandbox has the files of an image, no network, and nothing else of the machine that runs it. A failure of the sandbox
itself is a SandboxFailedError, or a SandboxDamagedError if commands in it can be the cause; a command that fails, or
exceeds its time limit, is an ExecResult.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class SandboxFailedError(RuntimeError):
    """Error for a failure of the sandbox itself, whose outcome must not become a reward."""


class SandboxDamagedError(SandboxFailedError):
    """Error for a sandbox, or tests in it, that earlier commands can have damaged. After commands of an agent, it is
    their result."""


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox consists of."""

    image: Path | None = None  # folder with a Dockerfile and the files that it copies; None: an empty image
    docker_image: str = ""  # name of an image that exists, instead of the Dockerfile; only docker and podman
    rootfs: Path | None = None  # an unpacked image, instead of this machine's programs; only rootless, bubblewrap
    environment: Mapping[str, str] = field(default_factory=dict)  # variables besides those of the image
    cpus: float = 1.0
    memory_mb: int = 2048  # of all its processes together
    storage_mb: int = 2048  # of all files that are written in it
    max_processes: int = 512
    allow_internet: bool = False  # only docker and podman have a network
    build_timeout: float = 600.0  # seconds until it is started
    forward_to: tuple[str, int] | None = None  # address (host, port) that `Sandbox.forwarded_port` leads to


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command, e.g. `ExecResult(0, "5\\n")`."""

    code: int  # exit code; negative: the number of the signal that ended it
    output: str  # stdout and stderr in their order, cut in the middle above the limit
    timed_out: bool = False
    seconds: float = 0.0
    reason: str = ""  # why the sandbox ended the command: time, memory


class Sandbox(Protocol):
    """A sandbox. Belongs to one event loop, and executes one operation at a time.

    Commands run as its root user in bash, or sh if it has no bash. A cancelled operation ends the sandbox.
    """

    workdir: str
    """Folder in which commands run by default: the image's WORKDIR."""
    forwarded_port: int
    """Port on 127.0.0.1 in the sandbox that leads to `SandboxSpec.forward_to`; 0: there is none."""

    async def start(self) -> None:
        """Start it. Raises ValueError if the image or this machine does not allow it, SandboxFailedError if starting
        fails."""
        ...

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        cwd: str = "",
        max_output: int = 1 << 16,
    ) -> ExecResult:
        """Run a command. environment: variables besides those of the image. Processes that it leaves behind continue to
        run; after `timeout` seconds, all processes are killed."""
        ...

    async def write(self, path: str, source: Path | Mapping[str, bytes]) -> None:
        """Replace the folder `path` by a folder of this machine, or by files {name: content}. Replaces a link, too."""
        ...

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Return the content of a regular file. Raises FileNotFoundError if there is none, also for links; ValueError
        if it is longer."""
        ...

    async def kill_processes(self) -> None:
        """Kill all processes that commands have left running."""
        ...

    async def close(self) -> None:
        """End it and remove everything that belongs to it. Idempotent."""
        ...
