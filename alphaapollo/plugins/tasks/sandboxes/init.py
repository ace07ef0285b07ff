"""Supervisor of a rootless sandbox: it isolates itself, and then executes requests.

It imports only the standard library, mounts.py and streams.py, and nothing after its root has changed. Requests and
replies are frames on the socket at descriptor 0: the length of a JSON header, the header, and `size` bytes of content.
It ends at the end of this socket. The kernel then ends all processes of the sandbox and frees its files, which are in
memory, so nothing is left behind, no matter which process was killed.

Commands run without capabilities, and in a process namespace below that of this process: they cannot name it, so they
cannot signal, limit or trace it. Process 1 of their namespace only kills and reaps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import shutil
import socket
import stat
import subprocess
import tarfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from alphaapollo.plugins.tasks.sandboxes import mounts
from alphaapollo.plugins.tasks.sandboxes.streams import LENGTH, OutputBuffer, make_frame

Header = dict[str, Any]
Reply = tuple[Header, bytes]
WATCH_SECONDS = 0.1
KILL_SECONDS = 10.0  # until all processes must have ended
SOCKET_BYTES = 1 << 18  # a socket may buffer as much, which is memory of no process


class Supervisor:
    """Executes requests. memory: bytes that commands may use."""

    def __init__(self, control: socket.socket, spec: Header, reaper: tuple[int, socket.socket]):
        self.control, self.memory = control, spec["memory_mb"] << 20
        self.limits = {
            resource.RLIMIT_NPROC: spec["max_processes"],
            resource.RLIMIT_DATA: self.memory,
            resource.RLIMIT_FSIZE: spec["storage_mb"] << 20,
            resource.RLIMIT_NOFILE: 4096,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        self.max_processes, self.max_sockets, self.excess = spec["max_processes"], self.memory // SOCKET_BYTES, ""
        self.last_watch = 0.0
        self.reaper, self.reaper_control = reaper
        self.reaper_control.settimeout(KILL_SECONDS)

    def serve(self) -> NoReturn:
        handlers: dict[str, Callable[[Header, bytes], Reply]] = {
            "exec": self.execute,
            "copy": copy,
            "read": read,
            "kill": self.kill,
            "protect": self.protect,
        }
        while True:
            while not select.select([self.control], [], [], WATCH_SECONDS)[0]:
                self.reap()
                self.watch()
            self.reap()
            header, content = receive(self.control)
            try:
                reply, content = handlers[header["op"]](header, content)
            except (OSError, ValueError) as error:  # ValueError: e.g. a null byte
                reply, content = {"error": str(error), "missing": getattr(error, "errno", 0) in (2, 20, 40)}, b""
            send(self.control, reply, content)

    def execute(self, header: Header, _: bytes) -> Reply:
        """Run a command until it ends, or until its time or the memory is exceeded."""
        shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        start, reason, output, self.excess = time.monotonic(), "", OutputBuffer(header["max_output"]), ""
        pipe, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [shell, "-c", header["command"]], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
                cwd=header["cwd"], env=header["environment"], start_new_session=True,
                preexec_fn=lambda: mounts.prepare_command(self.limits),
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: e.g. a null byte
            os.close(pipe)
            return {"code": 126, "seconds": 0.0, "reason": ""}, f"the command cannot start: {error}\n".encode()
        finally:
            os.close(theirs)
        ended, code = os.pidfd_open(process.pid), None
        sources: list[Any] = [self.control, pipe, ended]
        while code is None:
            ready = select.select(sources, [], [], WATCH_SECONDS)[0]
            if self.control in ready:
                os._exit(0)  # the other side is gone, or does not wait for the reply
            if pipe in ready and not read_pipe(pipe, output):
                sources.remove(pipe)
            code = self.reap().get(process.pid)
            if code is None and not reason and time.monotonic() - start > header["timeout"]:
                reason = f"time limit of {header['timeout']:g} s"
                self.kill_all()
            self.watch()
        if select.select([pipe], [], [], 0)[0]:  # processes that it left behind may write on and on
            read_pipe(pipe, output)
        process.returncode = code
        os.close(pipe)
        os.close(ended)
        reply = {"code": code, "seconds": time.monotonic() - start, "reason": reason or self.excess}
        return reply | {"timed_out": bool(reason)}, output.get()

    def protect(self, header: Header, _: bytes) -> Reply:
        mounts.protect(header["workdir"])
        return {}, b""

    def kill(self, header: Header, _: bytes) -> Reply:
        """Kill all processes, and wait for their end."""
        deadline = time.monotonic() + KILL_SECONDS
        while list_processes():
            self.kill_all()
            self.reap()
            if time.monotonic() > deadline:
                raise OSError("processes do not end")
            time.sleep(0.005)
        return {}, b""

    def kill_all(self) -> None:
        self.reaper_control.sendall(b"k")
        self.reaper_control.recv(1)

    def reap(self) -> dict[int, int]:
        """Return {pid: exit code} of children that have ended. The sandbox ends with the reaper."""
        ended = {}
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        if self.reaper in ended:
            os._exit(1)
        return ended

    def watch(self) -> None:
        """Kill all processes if they, or their sockets, use too much memory together or are too many."""
        if time.monotonic() - self.last_watch < WATCH_SECONDS:
            return
        self.last_watch = time.monotonic()
        used, processes = 0, list_processes()
        for pid in processes:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # a name may be no text
                used += sum(int(line.split()[1]) for line in file if line.startswith((b"RssAnon:", b"RssShmem:"))) << 10
        with open("/proc/1/net/sockstat", "rb") as file:
            sockets = int(file.readline().split()[2])
        if used > self.memory:
            self.excess = f"memory limit of {self.memory >> 20} MB"
        elif sockets > self.max_sockets:
            self.excess = f"limit of {self.max_sockets} sockets at {self.memory >> 20} MB of memory"
        elif len(processes) > self.max_processes:
            self.excess = f"limit of {self.max_processes} processes"
        else:
            return
        self.kill_all()


def list_processes() -> list[str]:
    """Return the ids of the processes of commands, also of ended ones that were not reaped."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def read_pipe(pipe: int, output: OutputBuffer) -> bool:
    """Add what can be read to the output. Returns False at the end of the pipe."""
    output.add(data := os.read(pipe, 1 << 16))
    return bool(data)


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def copy(header: Header, content: bytes) -> Reply:
    """Extract an archive in a folder. header["replace"]: in a new file system, mounted there.
    header["rename"]: the name of the only file, unless a folder has this name."""
    path = header["path"]
    if header["replace"]:
        ends = [end for end, letter in enumerate(path) if letter == "/" and end]
        for part in (path[:end] for end in (*ends, len(path))):
            if os.path.islink(part) or not os.path.isdir(part):
                remove(part)
    os.makedirs(path, exist_ok=True)
    if header["replace"]:
        mounts.mount_memory(path, header["storage_mb"])
    rename = header["rename"]
    if rename and os.path.isdir(os.path.join(path, rename)):
        path, rename = os.path.join(path, rename), ""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            member.name = rename or member.name
            target = os.path.join(path, member.name)
            if os.path.lexists(target) and not (member.isdir() and os.path.isdir(target)):
                remove(target)
            archive.extract(member, path, filter="tar")
    return {}, b""


def read(header: Header, _: bytes) -> Reply:
    """Return the content of a regular file."""
    descriptor = os.open(header["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(2, "it is no regular file", header["path"])
    with open(descriptor, "rb") as file:
        content = file.read(header["max_bytes"] + 1)
        return {"too_long": len(content) > header["max_bytes"]}, content[: header["max_bytes"]]


def receive(control: socket.socket) -> tuple[Header, bytes]:
    def read_exactly(size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            if not (part := control.recv(min(size - len(content), 1 << 20))):
                os._exit(0)  # the program that uses this sandbox has ended
            content += part
        return bytes(content)

    header = json.loads(read_exactly(LENGTH.unpack(read_exactly(LENGTH.size))[0]))
    return header, read_exactly(header["size"])


def send(control: socket.socket, header: Header, content: bytes = b"") -> None:
    try:
        control.sendall(make_frame(header, content))
    except OSError:
        os._exit(0)


def main() -> None:
    control = socket.socket(fileno=0)
    spec, _ = receive(control)
    try:
        os.chdir(spec["rootfs"] or "/")  # while its parent folders can be searched
        if spec["backend"] == "rootless":
            mounts.enter_namespaces()
        reaper = mounts.build_root(spec)
        mounts.restrict(spec)
        port = 0
        if spec["passed"] is not None:
            with (
                socket.socket(fileno=spec["passed"]) as passed,
                socket.create_server(("127.0.0.1", 0), backlog=128) as listener,
            ):
                port = listener.getsockname()[1]
                socket.send_fds(passed, [b"1"], [listener.fileno()])
    except OSError as error:
        send(control, {"error": str(error)})
        return
    send(control, {"port": port})
    try:
        Supervisor(control, spec, reaper).serve()
    except Exception:  # noqa: BLE001  the other side shows it
        send(control, {"error": traceback.format_exc()})
