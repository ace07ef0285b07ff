"""Rootless sandboxes: namespaces of the kernel, without a daemon or an image store. init.py is their first process.

This machine's programs (/usr), or an unpacked image, are the base of the image; the instructions of a Dockerfile are
applied to it. bubblewrap creates the same namespaces on machines where other programs must not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from alphaapollo.plugins.tasks.sandboxes.base import ExecResult, SandboxDamagedError, SandboxFailedError, SandboxSpec
from alphaapollo.plugins.tasks.sandboxes.dockerfile import DEFAULT_PATH, Copy, Image, Run, read_dockerfile
from alphaapollo.plugins.tasks.sandboxes.streams import LENGTH, list_folder, make_frame, pack
from alphaapollo.utils.json_types import JsonObject

BOOT = "import sys; sys.path.append(sys.argv[1]); from alphaapollo.plugins.tasks.sandboxes.init import main; main()"
PACKAGES = str(Path(__file__).resolve().parents[4])
DEFAULTS = {
    "PATH": DEFAULT_PATH,
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
BUBBLEWRAP = ["--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--as-pid-1"]
MAX_CONNECTIONS = 64  # of a sandbox to its port at a time; each takes two descriptors of this process
GRACE = 15.0  # seconds beyond the time limit of an operation until the sandbox counts as failed
_numbers = itertools.count()


class NamespaceSandbox:
    """Sandbox of the backends rootless and bubblewrap."""

    def __init__(self, spec: SandboxSpec, backend: str):
        self._spec, self._backend = spec, backend
        self._image = Image("scratch", (), "/", {}, ())
        self._storage_mb = min(spec.storage_mb, spec.memory_mb)  # files are in memory
        self._process: asyncio.subprocess.Process | None = None
        self._forwarder: asyncio.Server | None = None
        self._connections = 0
        self._busy = asyncio.Lock()
        self.workdir, self.forwarded_port = "/", 0

    async def start(self) -> None:
        spec = self._spec
        if spec.docker_image and spec.rootfs is None:
            raise ValueError(f"the image {spec.docker_image} needs docker or podman. Use one, or an unpacked image.")
        if spec.rootfs and (not spec.rootfs.is_dir() or spec.rootfs.stat().st_mode & 0o5 != 0o5):
            raise ValueError(f"{spec.rootfs}: no folder that other users can read. Unpack an image there, chmod o+rx.")
        if spec.image is not None:
            self._image = read_dockerfile(spec.image)
        if self._image.unsupported:
            lines = "; ".join(self._image.unsupported)
            raise ValueError(
                f"{spec.image}/Dockerfile: needs docker or podman: {lines}. Use one, or an unpacked image."
            )
        self.workdir = self._image.workdir
        try:
            async with asyncio.timeout(spec.build_timeout):
                await self._start_first_process()
                for step in self._image.steps:
                    await self._apply(step)
                await self._request({"op": "protect", "workdir": self.workdir})
        except TimeoutError:
            await self.close()
            raise SandboxFailedError(f"the sandbox did not start in {spec.build_timeout:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        cwd: str = "",
        max_output: int = 1 << 16,
    ) -> ExecResult:
        own = {**self._image.environment, **self._spec.environment, **(environment or {})}
        return await self._execute(command, timeout, own, cwd or self.workdir, max_output)

    async def _execute(
        self, command: str, timeout: float, environment: Mapping[str, str], cwd: str, max_output: int
    ) -> ExecResult:
        header = {
            "op": "exec",
            "command": command,
            "timeout": timeout,
            "environment": {**DEFAULTS, **environment},
            "cwd": cwd,
            "max_output": max_output,
        }
        reply, output = await self._request(header, timeout=timeout)
        text = output.decode(errors="replace")
        return ExecResult(reply["code"], text, reply.get("timed_out", False), reply["seconds"], reply["reason"])

    async def write(self, path: str, source: Path | Mapping[str, bytes]) -> None:
        header = {"op": "copy", "path": path, "rename": "", "replace": True, "storage_mb": self._storage_mb}
        sources = list_folder(source) if isinstance(source, Path) else [*source.items()]
        await self._request(header, await asyncio.to_thread(pack, sources, self._storage_mb))

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        reply, content = await self._request({"op": "read", "path": path, "max_bytes": max_bytes})
        if reply["too_long"]:
            raise ValueError(f"{path} has more than {max_bytes} bytes")
        return content

    async def kill_processes(self) -> None:
        await self._request({"op": "kill"})

    async def close(self) -> None:
        process, self._process = self._process, None
        if self._forwarder is not None:
            self._forwarder.close()
        if process is not None:
            self._writer.close()  # it ends at the end of its socket
            try:
                await asyncio.wait_for(process.wait(), GRACE)
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _start_first_process(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", BOOT, PACKAGES]
        if self._backend == "bubblewrap":
            if (program := shutil.which("bwrap")) is None:
                raise ValueError("bubblewrap is not installed. Install it, or use the sandbox rootless.")
            command = [
                program,
                *BUBBLEWRAP,
                "--die-with-parent",
                "--bind",
                "/",
                "/",
                "--dev-bind",
                "/dev",
                "/dev",
                *command,
            ]
        spec = self._spec
        ours, theirs = socket.socketpair()
        passing, passed = socket.socketpair()  # for the descriptor of a listening socket
        with passing:
            setting = {
                "backend": self._backend,
                "cpus": spec.cpus,
                "memory_mb": spec.memory_mb,
                "storage_mb": self._storage_mb,
                "max_processes": spec.max_processes,
                "folders": [os.path.dirname(step.target) for step in self._image.steps if isinstance(step, Copy)],
                "rootfs": str(spec.rootfs.resolve()) if spec.rootfs else "",
                "number": next(_numbers),
                "passed": passed.fileno() if spec.forward_to else None,
            }
            with theirs, passed:  # their ends belong to the sandbox alone, so that its end is noticed
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=theirs.fileno(), stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL, env={}, cwd="/", start_new_session=True,
                    pass_fds=[passed.fileno()],
                )  # fmt: skip
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            try:
                reply, _ = await self._request(setting)
            except SandboxFailedError as error:
                if self._process is None:  # it was killed
                    raise
                raise ValueError(
                    f"this machine cannot start the sandbox {self._backend}: {error}. It needs Linux 5.12 and user "
                    "namespaces (docs/tasks.md). Allow them, or use another sandbox."
                ) from error
            if spec.forward_to:
                self.forwarded_port = reply["port"]
                _, descriptors, _, _ = socket.recv_fds(passing, 1, 1)
                listener = socket.socket(fileno=descriptors[0])
                self._forwarder = await asyncio.start_server(self._forward, sock=listener)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client in the sandbox with the address that it may reach."""
        assert self._spec.forward_to is not None
        self._connections += 1
        try:
            if self._connections > MAX_CONNECTIONS:
                return
            with contextlib.suppress(OSError):
                their_reader, their_writer = await asyncio.open_connection(*self._spec.forward_to)
                try:
                    await asyncio.gather(_pipe(reader, their_writer), _pipe(their_reader, writer))
                finally:
                    their_writer.close()
        finally:
            self._connections -= 1
            writer.close()

    async def _apply(self, step: Copy | Run) -> None:
        """Apply an instruction of the Dockerfile."""
        if isinstance(step, Copy):
            folder, name, content = await asyncio.to_thread(_pack_copy, step, self._storage_mb)
            await self._request({"op": "copy", "path": folder, "rename": name, "replace": False}, content)
            return
        command = f"exec {shlex.join([*step.shell, step.command])}" if step.shell else f"exec {step.command}"
        done = await self._execute(command, self._spec.build_timeout, step.environment, step.workdir, 1 << 16)
        await self.kill_processes()  # as at the end of docker's container
        if done.code:
            said = done.reason or done.output.strip()[-300:]
            raise ValueError(
                f"{self._spec.image}/Dockerfile: RUN {step.command[:200]} failed with exit code {done.code} ({said}). "
                "It may need a network, root, or programs of its image. Use docker, podman or an unpacked image."
            )

    async def _request(
        self, header: JsonObject, content: bytes = b"", timeout: float = GRACE
    ) -> tuple[JsonObject, bytes]:
        """Send a request and return its reply. A failure, and a cancelled request, end the sandbox."""
        async with self._busy:
            if self._process is None:
                raise SandboxDamagedError("the sandbox has ended")
            try:
                async with asyncio.timeout(timeout + GRACE):
                    self._writer.write(make_frame(header, content))
                    await self._writer.drain()
                    (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                    reply: JsonObject = json.loads(await self._reader.readexactly(size))
                    answer = await self._reader.readexactly(reply["size"])
            except (OSError, EOFError, TimeoutError) as error:  # TimeoutError is an OSError
                await self.close()
                ended = "does not answer" if isinstance(error, TimeoutError) else "was killed"
                raise SandboxDamagedError(f"the first process of the sandbox {ended}") from error
            except asyncio.CancelledError:
                await asyncio.shield(self.close())
                raise
        if reason := reply.get("error"):
            if reply.get("missing") and header.get("op") == "read":
                raise FileNotFoundError(reason)
            raise SandboxDamagedError(reason)
        return reply, answer


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


def _pack_copy(step: Copy, max_mb: int) -> tuple[str, str, bytes]:
    """Return the folder of a COPY, the new name of its only file, and the archive."""
    is_folder = step.target.endswith("/") or len(step.sources) != 1
    folder, name = (step.target, "") if is_folder else os.path.split(step.target)
    sources = [(str(path.relative_to(base)), path) for base, path in step.list_files()]
    return folder, name, pack(sources, max_mb, step.mode)
