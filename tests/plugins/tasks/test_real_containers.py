"""Sandboxes of docker and podman in real containers.

They are skipped where neither docker nor podman can run a container. Settings that podman needs on a machine can be in
the file that $CONTAINERS_CONF names. The image consists of programs of this machine, because tests have no network.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from alphaapollo.plugins.tasks.sandboxes.base import ExecResult, Sandbox, SandboxSpec
from alphaapollo.plugins.tasks.sandboxes.containers import digest_folder
from alphaapollo.plugins.tasks.sandboxes.factory import make_sandbox
from tests.unit.event_loop import in_event_loop

BASE_IMAGE = f"localhost/alphaapollo-test-{os.getpid()}"
PROGRAMS = ("bash", "sh", "cat", "head", "ls", "ln", "mkdir", "rm", "seq", "sleep", "id", "dd", "touch")


@asynccontextmanager
async def started(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()


def make_root_archive() -> bytes:
    """Return an archive of a few programs of this machine and their libraries: the files of an image."""
    files = {f"bin/{name}": path for name in PROGRAMS if (path := shutil.which(name))}
    for path in list(files.values()):
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        files |= {library.lstrip("/"): library for library in re.findall(r"/\S+", listed)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:
        for folder in ("etc", "proc", "root", "tmp"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for name, path in files.items():
            member = archive.gettarinfo(os.path.realpath(path), name)
            member.uid = member.gid = 0
            with open(path, "rb") as file:
                archive.addfile(member, file)
    return buffer.getvalue()


def find_backend() -> tuple[str, str]:
    """Return the client that can run a container here, or "" and the reason."""
    problems = []
    for name in ("podman", "docker"):
        run = [name, "run", "--rm", "--network", "none", "--memory", "64m", BASE_IMAGE, "/bin/sh", "-c", "exit 0"]
        try:
            for command, content in (([name, "import", "-", BASE_IMAGE], make_root_archive()), (run, b"")):
                subprocess.run(command, input=content, capture_output=True, check=True, timeout=120)
            return name, ""
        except FileNotFoundError:
            problems.append(f"{name} is not installed")
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines()
            problems.append(f"{name}: {lines[-1] if lines else error}")
        except subprocess.TimeoutExpired as error:
            problems.append(str(error))
    return "", "; ".join(problems)


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    name, problem = find_backend()
    if not name:
        pytest.skip(f"no containers on this machine: {problem}")
    yield name
    subprocess.run([name, "rmi", "--force", BASE_IMAGE], capture_output=True, check=False, timeout=120)


@pytest.fixture
def spec(backend: str, tmp_path: Path) -> Iterator[SandboxSpec]:
    """A small image with WORKDIR /app, ENV and RUN."""
    folder = tmp_path / "environment"
    folder.mkdir()
    lines = (f"FROM {BASE_IMAGE}", "WORKDIR /app", "COPY file .", "ENV GREETING=hello", "RUN echo built > built")
    (folder / "Dockerfile").write_text("\n".join(lines))
    (folder / "file").write_text("copied\n")
    yield SandboxSpec(image=folder, environment={"NAME": "a b"}, memory_mb=128, storage_mb=1, max_processes=60)
    tag = f"localhost/alphaapollo-sandbox:{digest_folder(folder)}"
    subprocess.run([backend, "rmi", "--force", tag], capture_output=True, check=False, timeout=120)


def list_containers(backend: str) -> str:
    command = [backend, "ps", "--all", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@in_event_loop
async def test_commands(backend: str, spec: SandboxSpec) -> None:
    async with started(make_sandbox(backend, spec)) as sandbox:
        assert sandbox.workdir == "/app"
        result = await sandbox.exec(
            "pwd; cat file built; echo $GREETING $NAME $EXTRA; echo error >&2; id -u; exit 3",
            timeout=60,
            environment={"EXTRA": "x  y"},
        )
        expected = "/app\ncopied\nbuilt\nhello a b x y\nerror\n0\n"
        assert result == ExecResult(3, expected, seconds=result.seconds)
        assert (await sandbox.exec("[[ -n $BASH ]] && pwd", timeout=60, cwd="/etc")).output == "/etc\n"
        assert (await sandbox.exec("pwd", timeout=60, cwd="/none")).code == 126
        output = (await sandbox.exec("seq 1 100000; echo end", timeout=60, max_output=100)).output
        assert len(output) < 200 and output.startswith("1\n2\n") and output.endswith("end\n")
        assert "lo:" in (devices := (await sandbox.exec("cat /proc/net/dev", timeout=60)).output)
        assert len(devices.splitlines()) == 3  # no network: two lines of titles and lo


@in_event_loop
async def test_limits(backend: str, spec: SandboxSpec) -> None:
    async with started(make_sandbox(backend, spec)) as sandbox:
        result = await sandbox.exec("echo begin; sleep 100 & sleep 100", timeout=1)
        assert result == ExecResult(-9, "begin\n", True, result.seconds, "time limit of 1 s")
        result = await sandbox.exec("x=a; while :; do x=$x$x; done", timeout=60)
        assert (result.code, result.reason) == (137, "memory limit of 128 MB")
        await sandbox.exec("dd if=/dev/zero of=/large bs=1M count=3", timeout=60)
        with pytest.raises(ValueError, match="1048575"):
            await sandbox.read("/large", (1 << 20) - 1)
        assert len(await sandbox.read("/large", 1 << 20)) == 1 << 20
        for bomb in ("while :; do sleep 100 & done", "b() { b & b & }; b; while :; do kill -9 -1; done"):
            assert (await sandbox.exec(bomb, timeout=2)).timed_out
            assert (await sandbox.exec("echo works", timeout=60)).output == "works\n"


@in_event_loop
async def test_files(backend: str, spec: SandboxSpec, tmp_path: Path) -> None:
    source = tmp_path / "tests"
    (source / "sub").mkdir(parents=True)
    (source / "test.sh").write_text("echo test")
    (source / "sub" / "x").write_bytes(b"\0\xff")
    async with started(make_sandbox(backend, spec)) as sandbox:
        await sandbox.exec("mkdir /kept /logs; touch /kept/a /logs/old; ln -s /kept /tests; touch /file", timeout=60)
        await sandbox.write("/tests", source)
        await sandbox.write("/logs", {"verifier/.keep": b"", "a/b": b"text"})
        await sandbox.write("/file/new", {"c": b"1"})  # a file becomes a folder
        assert await sandbox.read("/tests/sub/x") == b"\0\xff"
        assert await sandbox.read("/logs/verifier/.keep") == b""
        assert await sandbox.read("file") == b"copied\n"
        assert (await sandbox.exec("ls /kept /logs /file; ls -ln /logs/a", timeout=60)).output.split("\n")[:9] == [
            "/file:", "new", "", "/kept:", "a", "", "/logs:", "a", "verifier"
        ]  # fmt: skip
        assert (await sandbox.exec("ls -ln /tests", timeout=60)).output.count(" 0 0 ") == 2
        await sandbox.exec("ln -s /app/file /link", timeout=60)
        for path in ("/link", "/none", "/tests", "/dev/zero"):
            with pytest.raises(FileNotFoundError, match=path):
                await sandbox.read(path)
        await sandbox.exec("rm -rf /bin", timeout=60)
        assert (await sandbox.exec("echo", timeout=60)).code == 127
        await sandbox.kill_processes()


def test_containers_end_with_a_killed_process(backend: str, spec: SandboxSpec) -> None:
    code = f"""
import asyncio
from pathlib import Path
from alphaapollo.plugins.tasks.sandboxes.base import SandboxSpec
from alphaapollo.plugins.tasks.sandboxes.factory import make_sandbox

async def main():
    sandbox = make_sandbox({backend!r}, SandboxSpec(image=Path({str(spec.image)!r})))
    await sandbox.start()
    print(sandbox._name, flush=True)
    await sandbox.exec("sleep 1000", timeout=1000)

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name in list_containers(backend)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while name in list_containers(backend):
        assert time.monotonic() < deadline
        time.sleep(0.1)
