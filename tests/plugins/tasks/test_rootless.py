"""Rootless sandboxes: what commands can do, what they cannot reach, and what is left after them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.plugins.tasks.sandboxes.base import ExecResult, SandboxFailedError, SandboxSpec
from alphaapollo.plugins.tasks.sandboxes.factory import make_sandbox
from alphaapollo.plugins.tasks.sandboxes.mounts import FILTERED
from alphaapollo.plugins.tasks.sandboxes.rootless import NamespaceSandbox

DEADLINE = 60.0
KEYCTL = FILTERED["keyctl"][0][os.uname().machine == "aarch64"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces of Linux")


def needs_bubblewrap(backend: str) -> Any:
    missing = backend == "bubblewrap" and not shutil.which("bwrap")
    return pytest.param(backend, marks=pytest.mark.skipif(missing, reason="needs bubblewrap"))


@pytest.fixture(params=[needs_bubblewrap("rootless"), needs_bubblewrap("bubblewrap")])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def use(backend: str, act: Callable[[NamespaceSandbox], Awaitable[Any]], **options: Any) -> Any:
    """Return what `act` returns with a started sandbox."""

    async def run() -> Any:
        async with asyncio.timeout(DEADLINE):
            sandbox = NamespaceSandbox(SandboxSpec(**{"memory_mb": 256, "max_processes": 64} | options), backend)
            await sandbox.start()
            try:
                return await act(sandbox)
            finally:
                await sandbox.close()

    return asyncio.run(run())


def execute(backend: str, command: str, timeout: float = 20.0, limit: int = 1 << 16, **options: Any) -> ExecResult:
    result: ExecResult = use(backend, lambda box: box.exec(command, timeout=timeout, max_output=limit), **options)
    return result


def make_image(folder: Path, dockerfile: str, files: Mapping[str, str] | None = None) -> Path:
    for name, text in {"Dockerfile": dockerfile, **(files or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_commands_run_as_root_with_few_variables(backend: str) -> None:
    done = execute(backend, "id -u; pwd; env | sort; echo error >&2; exit 3", environment={"COLOUR": "red"})
    lines = done.output.splitlines()
    assert done.code == 3 and not done.timed_out and lines[:2] == ["0", "/"] and lines[-1] == "error"
    assert {line.partition("=")[0] for line in lines[2:-1]} == {
        "COLOUR", "HOME", "LANG", "PATH", "PWD", "SHLVL", "_",
    }  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(
    "command",
    [
        "unshare --user true",
        "mount -t tmpfs none /mnt",
        "touch /usr/bin/mine",
        "touch /etc/mine",
        "mv /bin /old",
        "ln -sf /tmp /usr",
        "echo 1 > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "cat /proc/1/environ",
        "cat /proc/1/mem",
        "ls -l /proc/1/root/",
        "kill -9 1; kill -0 1 && false",
        "mknod /tmp/disk b 254 0",
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'",
        "ls /work || ls /proc/self/cwd/../work",
        "grep '^CapEff' /proc/self/status | grep -v 0000000000000000",
        "ls /proc/1/fd",
        "python3 -c 'import socket; socket.socket(40, 1)'",  # AF_VSOCK
        "python3 -c 'import os; os.sched_setaffinity(0, range(64))'",
        f"python3 -c 'import ctypes as c; exit(c.CDLL(None).syscall({KEYCTL}, 0, c.c_long(-3), 1) < 0)'",
    ],
)
def test_commands_cannot(command: str) -> None:
    assert execute("rootless", command).code != 0


def test_files_of_the_machine_are_not_visible(backend: str, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    done = execute(backend, f"cat {tmp_path}/secret.txt; ls -a / /root /tmp /home; cat /proc/*/environ", timeout=10)
    assert "No such file" in done.output
    for word in ("secret\n", "PYTEST", os.environ.get("PATH", "none")):
        assert word not in done.output


def test_limits_end_commands(backend: str) -> None:
    slow = execute(backend, "echo begun; sleep 100", timeout=0.5)
    assert (slow.code, slow.output, slow.timed_out, slow.reason) == (-9, "begun\n", True, "time limit of 0.5 s")
    hungry = (
        "python3 -c 'import os, time\nfor _ in range(4):\n  if not os.fork(): x = b\"a\" * (100 << 20)\ntime.sleep(30)'"
    )
    assert execute(backend, hungry).reason == "memory limit of 256 MB"
    assert "MemoryError" in execute(backend, "python3 -c 'bytearray(1 << 30)'").output
    full = execute(backend, "head -c 100M /dev/zero > /big", storage_mb=16)
    assert full.code != 0 and ("No space left" in full.output or "File size limit" in full.output)
    assert execute(backend, "for i in $(seq 300); do sleep 30 & done; wait", timeout=5).code != 0


BUFFERS = "import socket, time\nkept = [socket.socketpair() for _ in range(700)]\ntime.sleep(9)"


def test_sockets_are_limited() -> None:
    assert "sockets" in execute("rootless", f'python3 -c "{BUFFERS}"').reason


def test_commands_cannot_name_the_supervisor(backend: str) -> None:
    async def act(box: NamespaceSandbox) -> list[ExecResult]:
        odd = "cp $(command -v sleep) $'/tmp/\\xff'; $'/tmp/\\xff' 0.5; kill -INT 1; kill -9 -1"
        return [await box.exec(command, timeout=9) for command in (odd, "echo $PPID; ls -d /proc/[0-9]*; echo alive")]

    lines = use(backend, act)[1].output.splitlines()
    assert (lines[0], lines[-1]) == ("0", "alive")  # the parent is in another namespace


def test_output_keeps_its_beginning_and_end(backend: str) -> None:
    done = execute(backend, "seq 1 100000", limit=2000)
    assert done.output.startswith("1\n2\n") and done.output.endswith("\n100000\n")
    assert "586895 bytes are not shown" in done.output and len(done.output) < 2100


def test_processes_stay_until_they_are_killed(backend: str) -> None:
    async def act(box: NamespaceSandbox) -> tuple[str, str]:
        count = "ps -e -o comm= | grep -c sleep"
        await box.exec("(setsid sleep 77 &); sleep 78 &", timeout=5)
        before = await box.exec(count, timeout=5)
        await box.kill_processes()
        return before.output, (await box.exec(count, timeout=5)).output

    assert use(backend, act) == ("2\n", "0\n")


def test_files_replace_links_and_are_read_safely(backend: str, tmp_path: Path) -> None:
    make_image(tmp_path, "", {"sub/one.txt": "one"})

    async def act(box: NamespaceSandbox) -> list[Any]:
        await box.exec("mkdir /mine; ln -s /mine /logs2; ln -s /etc/passwd /mine/link; mkfifo /mine/pipe", timeout=5)
        await box.write("/logs2/verifier", {"a/b.txt": b"new"})
        await box.write("/tests", tmp_path)
        shown = await box.exec("ls /mine; cat /logs2/verifier/a/b.txt; stat -c %U /tests/sub/one.txt", timeout=5)
        found: list[Any] = [shown.output.split(), await box.read("/tests/sub/one.txt")]
        for path in ("/mine/link", "/mine/pipe", "/mine", "/none", "/mine/link/x"):
            with pytest.raises(FileNotFoundError):
                await box.read(path)
        with pytest.raises(ValueError, match="more than 2 bytes"):
            await box.read("/tests/sub/one.txt", 2)
        return found

    assert use(backend, act) == [["link", "pipe", "newroot"], b"one"]


def test_dockerfile_is_applied(backend: str, tmp_path: Path) -> None:
    text = """
        FROM debian:bookworm
        ENV NAME=world
        ENV GREETING="hello $NAME"
        WORKDIR /usr/src/app
        COPY *.txt data/ ./
        COPY tool.sh /usr/local/bin/tool
        COPY tool.sh /usr/src
        RUN chmod 755 /usr/local/bin/tool && echo built > built.txt && (sleep 4343 &)
        SHELL ["/bin/bash", "-o", "pipefail", "-c"]
        RUN { false | true; } || echo $0 $NAME >> built.txt
    """
    image = make_image(
        tmp_path, text, {"a.txt": "a", "data/deep/b.txt": "b", "tool.sh": "#!/bin/sh\necho tool $GREETING\n"}
    )
    done = execute(
        backend,
        "pwd; find . -type f | sort; tool; cat built.txt; touch own; touch /usr/local/bin/x; ps -e -o args=",
        image=image,
    )
    files = ["./a.txt", "./built.txt", "./deep/b.txt"]
    shown = ["/usr/src/app", *files, "tool hello world", "built", "/bin/bash world"]
    assert done.output.splitlines()[:7] == shown and "4343" not in done.output
    assert "Read-only file system" in done.output.splitlines()[7]


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM a\nRUN apt-get install -y nothing", r"RUN apt-get install -y nothing failed with exit code \d+"),
        ("FROM a\nFROM b\nCOPY --from=a /x /x", "needs docker or podman"),
    ],
)
def test_images_that_need_more_are_refused(tmp_path: Path, dockerfile: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        execute("rootless", "true", image=make_image(tmp_path, dockerfile))
    with pytest.raises(ValueError, match="needs docker or podman"):
        execute("rootless", "true", docker_image="debian:bookworm")
    with pytest.raises(ValueError, match="Did you mean 'rootless'"):
        make_sandbox("rootles", SandboxSpec())


def unpack_image(folder: Path) -> Path:
    """Make a folder with the content of a small image: a shell, a few programs and their libraries."""
    for program in ("bash", "ls", "cat", "touch"):
        path = str(shutil.which(program))
        needed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for file in [path, *(word for word in needed.split() if word.startswith("/"))]:
            place = folder / ("usr/bin" if file == path else os.path.dirname(file)[1:])
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    folder.chmod(0o755)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "etc").mkdir()
    (folder / "etc/version").write_text("7\n")
    return folder


def test_unpacked_image_replaces_the_programs(backend: str, tmp_path: Path) -> None:
    rootfs = unpack_image(tmp_path / "image")
    done = execute(backend, "ls /bin/; cat /etc/version; touch /mine /bin/mine; ls /work /mine", rootfs=rootfs)
    assert done.output.split("\n")[:5] == ["bash", "cat", "ls", "touch", "7"]
    assert "/bin/mine': Read-only file system" in done.output and "/mine" in done.output.split()
    assert not (rootfs / "mine").exists()
    rootfs.chmod(0o700)
    if backend == "rootless" and os.getuid() == 0:
        with pytest.raises(ValueError, match=r"chmod o\+rx"):
            execute(backend, "true", rootfs=rootfs)


def test_port_leads_to_one_address_of_the_machine(backend: str) -> None:
    async def act() -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"to " + await reader.readline())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        box = NamespaceSandbox(SandboxSpec(forward_to=server.sockets[0].getsockname()[:2]), backend)
        await box.start()
        try:
            command = f"exec 3<>/dev/tcp/127.0.0.1/{box.forwarded_port}; echo you >&3; cat <&3"
            return (await box.exec(command, timeout=10)).output
        finally:
            await box.close()
            server.close()

    assert asyncio.run(asyncio.wait_for(act(), DEADLINE)) == "to you\n"


def list_processes(word: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_text(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended
    return found


def wait_until_ended(word: str) -> None:
    deadline = time.monotonic() + 10
    while left := list_processes(word):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_killed_sandbox_is_a_failure(backend: str) -> None:
    async def act(box: NamespaceSandbox) -> None:
        mark = "sleep 4321"
        running = asyncio.ensure_future(box.exec(mark, timeout=50))
        while not list_processes(mark.replace(" ", "\0")):
            await asyncio.sleep(0.02)
        assert box._process is not None
        os.kill(box._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailedError, match="was killed"):
            await running
        with pytest.raises(SandboxFailedError, match="has ended"):
            await box.exec("true", timeout=5)

    use(backend, act)
    wait_until_ended("sleep\x004321")


def test_a_cancelled_command_ends_its_sandbox(backend: str) -> None:
    async def act(box: NamespaceSandbox) -> None:
        running = asyncio.ensure_future(box.exec("sleep 5432", timeout=50))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    use(backend, act)
    wait_until_ended("sleep\x005432")


DRIVER = """
import asyncio, sys
from alphaapollo.plugins.tasks.sandboxes.base import SandboxSpec
from alphaapollo.plugins.tasks.sandboxes.factory import make_sandbox

async def main():
    sandbox = make_sandbox(sys.argv[1], SandboxSpec())
    await sandbox.start()
    await sandbox.exec("(setsid sleep 6543 &); sleep 6543", timeout=100)

asyncio.run(main())
"""


def test_nothing_is_left_after_the_driver_is_killed(backend: str) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, backend])
    try:
        deadline = time.monotonic() + 20
        while len(list_processes("sleep\x006543")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    wait_until_ended("sleep\x006543")
