"""Sandboxes of docker and podman, by their command-line clients.

The first process of a container reads its stdin, which is a pipe of this process: the container ends with this process,
also if it is killed. Limits: a container has no `forward_to`, and `storage_mb` limits each file instead of all files
together, because most storage drivers of docker and podman have no quota.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import re
import secrets
import signal
import stat
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from alphaapollo.plugins.tasks.sandboxes.base import ExecResult, SandboxDamagedError, SandboxFailedError, SandboxSpec
from alphaapollo.plugins.tasks.sandboxes.container_client import (
    CALL_TIMEOUT,
    ContainerClient,
    collect,
    communicate,
    kill,
    last_lines,
)
from alphaapollo.plugins.tasks.sandboxes.streams import OutputBuffer, pack

GRACE = 10.0  # seconds until a client ends, after the processes that it waits for
MAX_COMMAND = 1 << 17  # bytes, with the null byte: a limit of Linux for one argument
TIMED_OUT = -int(signal.SIGKILL)
NO_SHELL = (126, 127)  # exit codes of `exec` if commands have removed the shell
ERROR_LINES = 10  # of a failed build

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")

# The first process kills all others for each line of its stdin, and ends with its stdin. No process of the container
# can kill it. It starts no process, because there may be as many as allowed. bash also removes ended orphans.
SERVE = """trap '' HUP INT QUIT PIPE TERM; echo ready; while read -r _; do kill -9 -1 2>/dev/null; echo killed; done"""
FIRST_PROCESS = ("-c", 'command -v bash >/dev/null && exec bash -c "$0"; exec sh -c "$0"', SERVE)
# Each script begins with an empty line of output: without it, the client could not run the script.
COMMAND = """echo; ulimit -f "$2" 2>/dev/null; cd -- "$1" 2>&1 || exit 126
command -v bash >/dev/null && exec bash -c "$3" 2>&1; exec sh -c "$3" 2>&1"""
CLEAR = """echo; exec 2>&1; p=$1; while p=${p%/*} && [ "$p" ]; do [ -d "$p" ] || rm -f "$p"; done
rm -rf "$1" && mkdir -p "$1" """
READ = 'echo; [ -f "$1" ] && [ ! -L "$1" ] && exec head -c "$2" "$1"'
OOM_KILLS = "echo; cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"


def digest_folder(folder: Path) -> str:
    """Digest of the names, modes and contents of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest.update(os.fsencode(f"{path.relative_to(folder)}\0{status.st_mode:o}\0"))
        if stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


_preparations: dict[tuple[asyncio.AbstractEventLoop, str, str], asyncio.Task[str]] = {}


async def prepare_image(client: ContainerClient, spec: SandboxSpec) -> tuple[str, str]:
    """Build or pull an image, unless this machine has it. Sandboxes of the same image share one build. Returns its name
    and its WORKDIR. Raises ValueError."""
    name = spec.docker_image
    if name.startswith("-"):
        raise ValueError(f"docker_image={name!r} begins with a dash. Use the name of an image.")
    if not name:
        if spec.image is None or not (spec.image / "Dockerfile").is_file():
            where = spec.image or "the task"
            raise ValueError(f"{where} has no Dockerfile. Add one for the sandbox {client.program!r}, or docker_image.")
        name = f"localhost/alphaapollo-sandbox:{digest_folder(spec.image)}"
    key = (asyncio.get_running_loop(), client.program, name)
    if key not in _preparations:
        _preparations[key] = asyncio.create_task(_prepare_image(client, spec, name))
        _preparations[key].add_done_callback(lambda _: _preparations.pop(key))
    return name, await asyncio.shield(_preparations[key])


async def _prepare_image(client: ContainerClient, spec: SandboxSpec, name: str) -> str:
    inspect = ("image", "inspect", "--format", "{{.Config.WorkingDir}}", name)
    code, workdir, _ = await client.call(*inspect)
    if code:
        await client.require()
        verb = ["pull", "--quiet", name]
        if not spec.docker_image and spec.image is not None:
            image_format = ["--format", "docker"] if client.program == "podman" else []  # its default has no SHELL
            verb = ["build", "--quiet", *image_format, "--tag", name, str(spec.image.resolve())]
        try:
            code, _, errors = await client.call(*verb, timeout=spec.build_timeout, with_proxies=True)
        except TimeoutError:
            raise ValueError(
                f"`{client.program} {' '.join(verb)}` took longer than build_timeout={spec.build_timeout:g} s. "
                "Increase it, or build the image before."
            ) from None
        if code:
            raise ValueError(
                f"`{client.program} {' '.join(verb)}` failed with exit code {code}. Correct this error:\n"
                f"{last_lines(errors, ERROR_LINES)}"
            )
        code, workdir, errors = await client.call(*inspect)
        if code:
            raise ValueError(f"{client.program} has no image {name} after `{verb[0]}`: {last_lines(errors, 3)}")
    return workdir.strip() or "/"


def make_run_arguments(spec: SandboxSpec, name: str, image: str) -> list[str]:
    """Return the arguments of docker or podman that start a container."""
    memory = f"{spec.memory_mb}m"
    cpus = min(spec.cpus, os.cpu_count() or 1)  # docker refuses more than the machine has
    arguments = ["run", "--interactive", "--rm", "--name", name, "--pull", "never", "--entrypoint", "sh"]
    arguments += ["--user", "0:0", "--no-healthcheck", "--stop-signal", "KILL"]
    arguments += ["--cpus", f"{cpus:g}", "--memory", memory, "--memory-swap", memory]
    arguments += ["--pids-limit", str(spec.max_processes), "--security-opt", "no-new-privileges", "--cap-drop", "ALL"]
    for capability in CAPABILITIES:
        arguments += ["--cap-add", capability]
    if not spec.allow_internet:
        arguments += ["--network", "none"]
    return [*arguments, *_make_env_arguments(spec.environment), image, *FIRST_PROCESS]


def _make_env_arguments(environment: Mapping[str, str]) -> list[str]:
    return [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]


class ContainerSandbox:
    """Sandbox of the backends docker and podman."""

    def __init__(self, spec: SandboxSpec, backend: str):
        self._spec = spec
        self._client = ContainerClient(backend)
        self._name = f"alphaapollo-{secrets.token_hex(8)}"
        self._container: Process | None = None  # the client, which is attached to the first process
        self._oom_kills = 0
        self.workdir, self.forwarded_port = "/", 0

    async def start(self) -> None:
        spec, backend = self._spec, self._client.program
        if spec.forward_to is not None:
            raise ValueError(
                f"forward_to={spec.forward_to} does not work with the sandbox {backend!r}. Use rootless or bubblewrap."
            )
        if spec.rootfs is not None:
            raise ValueError(
                f"rootfs={spec.rootfs} does not work with the sandbox {backend!r}. Use docker_image, or the sandbox "
                "rootless or bubblewrap."
            )
        try:
            async with asyncio.timeout(spec.build_timeout + CALL_TIMEOUT):
                image, self.workdir = await prepare_image(self._client, spec)
                await self._start_container(image)
        except TimeoutError:
            await self.close()
            raise SandboxFailedError(f"{backend} did not start a container in time") from None
        except BaseException:
            await self.close()
            raise

    async def _start_container(self, image: str) -> None:
        backend = self._client.program
        self._container = await self._client.start(*make_run_arguments(self._spec, self._name, image), stdin=PIPE)
        assert self._container.stdout is not None and self._container.stderr is not None
        if (await self._container.stdout.readline()).strip() == b"ready":
            return
        self._end()
        errors = OutputBuffer(1 << 16)
        await collect(self._container.stderr, errors)
        code, message = await self._container.wait(), last_lines(errors.get_text(), 3)
        if code in (126, 127):
            raise ValueError(f"the image {image} cannot run sh: {message}. Use an image with sh, cat, head, rm, mkdir.")
        raise SandboxFailedError(f"`{backend} run` failed with exit code {code}: {message}")

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        cwd: str = "",
        max_output: int = 1 << 16,
    ) -> ExecResult:
        command = command.encode(errors="replace").decode()
        if "\0" in command or len(command.encode()) >= MAX_COMMAND:
            return ExecResult(126, f"the command is longer than {MAX_COMMAND - 1} bytes, or has a null byte\n")
        file_blocks = str(self._spec.storage_mb << 11)  # blocks of 512 bytes
        arguments = (COMMAND, posixpath.join(self.workdir, cwd), file_blocks, command)
        start, output, reason = time.monotonic(), OutputBuffer(max_output), ""
        code = await self._run_script(*arguments, output=output, timeout=timeout, environment=environment)
        seconds = time.monotonic() - start
        if code == TIMED_OUT:
            reason = f"time limit of {timeout:g} s"
        elif code == 128 + signal.SIGKILL and await self._has_new_oom_kill():
            reason = f"memory limit of {self._spec.memory_mb} MB"
        return ExecResult(code, output.get_text().removeprefix("\n"), code == TIMED_OUT, seconds, reason)

    async def write(self, path: str, source: Path | Mapping[str, bytes]) -> None:
        path = posixpath.normpath(posixpath.join(self.workdir, path))
        output = OutputBuffer(1 << 16)
        code = await self._run_script(CLEAR, path, output=output)
        message = output.get_text()
        if code == 0:
            target = f"{self._name}:{path}"
            archive = b"" if isinstance(source, Path) else pack(source.items(), self._spec.storage_mb)
            arguments = (f"{source.resolve()}/.", target) if isinstance(source, Path) else ("-", target)
            try:
                code, _, message = await self._client.call("cp", *arguments, stdin=archive)
            except TimeoutError:
                code, message = -1, f"it took longer than {CALL_TIMEOUT:g} s"
            except asyncio.CancelledError:
                self._end()
                raise
        if code:
            await self._fail(f"the folder {path} was not written to the sandbox: {last_lines(message, 3)}")

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        path = posixpath.normpath(posixpath.join(self.workdir, path))
        output = OutputBuffer(2 * max_bytes + 4)  # nothing is omitted
        if await self._run_script(READ, path, str(max_bytes + 1), output=output):
            raise FileNotFoundError(f"{path} is not a regular file of the sandbox")
        content = output.get()[1:]
        if len(content) > max_bytes:
            raise ValueError(f"{path} has more than {max_bytes} bytes")
        return content

    async def kill_processes(self) -> None:
        container = await self._get_container()
        assert container.stdin is not None and container.stdout is not None
        try:
            async with asyncio.timeout(GRACE):
                container.stdin.write(b"kill\n")
                await container.stdin.drain()
                reply = await container.stdout.readline()
        except (TimeoutError, ConnectionError):
            reply = b""
        except asyncio.CancelledError:
            self._end()
            raise
        if reply.strip() != b"killed":
            await self._fail("the first process of the container does not answer")

    async def close(self) -> None:
        container, self._container = self._container, None
        if container is None:
            return
        assert container.stdin is not None
        container.stdin.close()
        with contextlib.suppress(TimeoutError, ValueError):  # the container ends without it, because stdin is closed
            await self._client.call("rm", "--force", self._name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(container.wait(), GRACE)
        kill(container)
        await container.wait()

    async def _get_container(self) -> Process:
        if self._container is None or self._container.returncode is not None:
            await self._fail("the container has ended")
        assert self._container is not None
        return self._container

    async def _fail(self, problem: str) -> NoReturn:
        """Raise SandboxDamagedError, or SandboxFailedError if the client or its daemon does not work."""
        try:
            await self._client.require()
        except (ValueError, TimeoutError) as error:
            raise SandboxFailedError(f"{problem}: {error}") from error
        raise SandboxDamagedError(problem)

    def _end(self) -> None:
        """End the container without waiting for it."""
        if self._container is not None and self._container.stdin is not None:
            self._container.stdin.close()

    async def _has_new_oom_kill(self) -> bool:
        output = OutputBuffer(1 << 14)
        await self._run_script(OOM_KILLS, output=output)
        count = sum(map(int, re.findall(r"^oom_kill (\d+)$", output.get_text(), re.MULTILINE)))
        is_new, self._oom_kills = count > self._oom_kills, count
        return is_new

    async def _run_script(
        self,
        script: str,
        *arguments: str,
        output: OutputBuffer,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Run a script in the container and return its exit code.

        After `timeout` seconds, all processes are killed and the code is TIMED_OUT. Raises SandboxFailedError if the
        client cannot run the script, or if a script without a timeout does not end.
        """
        options = ["--workdir", "/", *_make_env_arguments(environment or {})]
        words = ["exec", *options, self._name, "sh", "-c", script, "sh", *arguments]
        for is_retry in (False, True):
            errors = OutputBuffer(1 << 12)
            code = await self._run_client(words, output, errors, timeout)
            if code == TIMED_OUT or output.get().startswith(b"\n"):
                return code
            if not is_retry:
                await self.kill_processes()  # they are as many as allowed, or kill the script
        message = f"`{self._client.program} exec` failed with exit code {code}: {last_lines(errors.get_text(), 3)}"
        await self._get_container()
        if code not in NO_SHELL:
            await self._fail(message)
        output.add(message.encode())
        return code

    async def _run_client(
        self, words: list[str], output: OutputBuffer, errors: OutputBuffer, timeout: float | None
    ) -> int:
        await self._get_container()
        try:
            process = await self._client.start(*words, stdin=DEVNULL)
        except asyncio.CancelledError:  # the client may have started already
            self._end()
            raise
        reading = asyncio.create_task(communicate(process, output, errors))
        try:
            done, _ = await asyncio.wait([reading], timeout=CALL_TIMEOUT if timeout is None else timeout)
            if not done:
                if timeout is None:
                    await self._fail(f"`{self._client.program} exec` did not end in {CALL_TIMEOUT:g} s")
                await self.kill_processes()
                await asyncio.wait([reading], timeout=GRACE)
                return TIMED_OUT
        except asyncio.CancelledError:
            self._end()
            raise
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        assert process.returncode is not None
        return process.returncode
