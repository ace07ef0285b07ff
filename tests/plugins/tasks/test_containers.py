"""Sandboxes of docker and podman (plugins/tasks/sandboxes/containers.py) with a mock client."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.plugins.tasks.sandboxes.base import (
    ExecResult,
    Sandbox,
    SandboxDamagedError,
    SandboxFailedError,
    SandboxSpec,
)
from alphaapollo.plugins.tasks.sandboxes.container_client import ContainerClient, OutputBuffer
from alphaapollo.plugins.tasks.sandboxes.containers import digest_folder, make_run_arguments
from alphaapollo.plugins.tasks.sandboxes.factory import make_sandbox
from tests.unit.event_loop import in_event_loop

MOCK_CLIENT = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$1" in
version) [ ! -e {folder}/no_daemon ] || { echo "Cannot connect to the daemon." >&2; exit 1; } ;;
image) [ -e {folder}/image ] || exit 1; echo /app ;;
build|pull) sleep 0.1; . {folder}/build; touch {folder}/image ;;
run) . {folder}/run; echo ready
  while read -r _; do touch {folder}/killed; echo killed; done; touch {folder}/ended ;;
exec) . {folder}/exec ;;
esac
"""


class MockClient:
    """Programs docker and podman on PATH. They record their calls, and run scripts of a test instead."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.image = folder / "task"
        self.image.mkdir()
        (self.image / "Dockerfile").write_text("FROM x\n")
        for name in ("build", "run", "exec"):
            self.set_script(name, "")
        for name in ("docker", "podman"):
            (folder / name).write_text(MOCK_CLIENT.replace("{folder}", str(folder)))
            (folder / name).chmod(0o755)

    def set_script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text.replace("{folder}", str(self.folder)))

    def get_calls(self, verb: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.split()[0] == verb]

    def make(self, backend: str = "docker", **options: object) -> Sandbox:
        return make_sandbox(backend, SandboxSpec(**{"image": self.image, **options}))  # type: ignore[arg-type]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MockClient:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return MockClient(tmp_path)


@asynccontextmanager
async def started(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()


def find_values(arguments: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]


def test_arguments_of_a_container() -> None:
    spec = SandboxSpec(environment={"A": "b c"}, cpus=0.5, memory_mb=300, max_processes=40)
    arguments = make_run_arguments(spec, "NAME", "IMAGE")
    for option, value in {
        "--name": "NAME",
        "--network": "none",
        "--cpus": "0.5",
        "--memory": "300m",
        "--memory-swap": "300m",
        "--pids-limit": "40",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--pull": "never",
        "--user": "0:0",
        "--env": "A=b c",
        "--entrypoint": "sh",
        "IMAGE": "-c",
    }.items():
        assert find_values(arguments, option) == [value]
    assert not {"SYS_ADMIN", "SYS_PTRACE", "NET_RAW", "MKNOD"} & set(find_values(arguments, "--cap-add"))
    assert {"--interactive", "--rm"} <= set(arguments)
    arguments = make_run_arguments(SandboxSpec(allow_internet=True, cpus=10_000), "NAME", "IMAGE")
    assert find_values(arguments, "--network") == []
    assert find_values(arguments, "--cpus") == [str(os.cpu_count())], "docker refuses more than the machine has"


@in_event_loop
async def test_a_missing_daemon_is_named(client: MockClient) -> None:
    (client.folder / "no_daemon").touch()
    with pytest.raises(ValueError, match=r"docker version.*Cannot connect to the daemon\. .*rootless"):
        await client.make().start()
    assert client.get_calls("run") == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"forward_to": ("127.0.0.1", 80)}, "forward_to"),
        ({"rootfs": Path("/images/x")}, "/images/x"),
        ({"image": None}, "Dockerfile"),
        ({"image": Path("/none")}, "/none"),
        ({"docker_image": "--privileged"}, "--privileged"),
    ],
)
def test_what_containers_do_not_support_is_named(client: MockClient, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        asyncio.run(client.make(**options).start())


@in_event_loop
async def test_a_failed_build_shows_the_end_of_its_output_and_a_slow_one_the_limit(client: MockClient) -> None:
    client.set_script("build", "seq 1 100 >&2; echo no space left >&2; exit 3")
    with pytest.raises(ValueError) as error:
        await client.make().start()
    assert "exit code 3" in str(error.value) and "\n100\nno space left" in str(error.value)
    assert "\n50\n" not in str(error.value)
    client.set_script("build", "sleep 5")
    with pytest.raises(ValueError, match=r"took longer than build_timeout=0\.2 s"):
        await client.make(build_timeout=0.2).start()


@in_event_loop
async def test_sandboxes_of_an_image_share_one_build(client: MockClient) -> None:
    sandboxes = [client.make() for _ in range(3)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    assert [sandbox.workdir for sandbox in sandboxes] == ["/app"] * 3
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    async with started(client.make()):
        pass
    (build,) = client.get_calls("build")
    assert f"--tag localhost/alphaapollo-sandbox:{digest_folder(client.image)} {client.image}" in build
    assert len(client.get_calls("run")) == 4


@in_event_loop
async def test_a_cancelled_start_leaves_the_build_to_others(client: MockClient) -> None:
    first, second = (asyncio.create_task(client.make().start()) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(client.get_calls("build")) == 1


@in_event_loop
async def test_an_image_is_pulled_if_it_is_missing(client: MockClient) -> None:
    async with started(client.make("podman", docker_image="debian:12")):
        pass
    assert client.get_calls("pull") == ["pull --quiet debian:12"]
    assert client.get_calls("build") == []


def test_digest_depends_on_names_contents_modes_and_links(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "a"
    file.parent.mkdir()
    file.write_text("1")
    file.chmod(0o644)
    digests = [digest_folder(tmp_path)]
    os.utime(file, (0, 0))
    assert digest_folder(tmp_path) == digests[0]
    file.write_text("2")
    digests.append(digest_folder(tmp_path))
    file.chmod(0o755)
    digests.append(digest_folder(tmp_path))
    file.rename(tmp_path / "sub" / "b")
    digests.append(digest_folder(tmp_path))
    for target in ("x", "y"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(target)
        digests.append(digest_folder(tmp_path))
    assert len(set(digests)) == len(digests)


@in_event_loop
async def test_clients_get_no_credentials(client: MockClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "DOCKER_HOST", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "value")
    for verb in ("build", "run", "exec"):
        client.set_script(verb, f"env > {{folder}}/env_{verb}" + "; echo" * (verb == "exec"))
    async with started(client.make()) as sandbox:
        await sandbox.exec("true", timeout=60)
    for verb in ("build", "run", "exec"):
        names = {line.split("=")[0] for line in (client.folder / f"env_{verb}").read_text().splitlines()}
        assert {"PATH", "DOCKER_HOST"} <= names
        assert "OPENAI_API_KEY" not in names
        assert ("HTTPS_PROXY" in names) == (verb == "build")  # podman would pass it to the container


@in_event_loop
async def test_a_command_and_its_result(client: MockClient) -> None:
    client.set_script("exec", "echo; echo output; exit 3")
    async with started(client.make()) as sandbox:
        result = await sandbox.exec("ls", timeout=60, environment={"A": "b"}, cwd="sub")
    assert result == ExecResult(3, "output\n", seconds=result.seconds)
    (call,) = client.get_calls("exec")
    assert call.startswith("exec --workdir / --env A=b alphaapollo-")
    assert "/app/sub 4194304 ls" in (client.folder / "calls").read_text()


@in_event_loop
async def test_a_client_that_cannot_run_commands_is_a_failure_of_the_sandbox(client: MockClient) -> None:
    client.set_script("exec", "echo broken >&2; exit 1")
    async with started(client.make()) as sandbox:
        with pytest.raises(SandboxDamagedError, match="exit code 1: broken"):
            await sandbox.exec("true", timeout=60)
        assert len(client.get_calls("exec")) == 2
        (client.folder / "no_daemon").touch()
        with pytest.raises(SandboxFailedError, match="Cannot connect to the daemon") as error:
            await sandbox.exec("true", timeout=60)
        assert not isinstance(error.value, SandboxDamagedError)  # no command can be the cause


@in_event_loop
async def test_processes_are_killed_if_a_command_cannot_start(client: MockClient) -> None:
    client.set_script("exec", "[ -e {folder}/killed ] || { echo too many >&2; exit 255; }; echo; echo ran")
    async with started(client.make()) as sandbox:
        assert (await sandbox.exec("true", timeout=60)).output == "ran\n"


@in_event_loop
async def test_commands_that_removed_the_shell_are_no_failure_of_the_sandbox(client: MockClient) -> None:
    client.set_script("exec", "echo no sh >&2; exit 127")
    async with started(client.make()) as sandbox:
        result = await sandbox.exec("true", timeout=60)
        assert result.code == 127 and "no sh" in result.output
        with pytest.raises(FileNotFoundError, match="/app/file"):
            await sandbox.read("file")
        with pytest.raises(SandboxFailedError, match="/tests"):
            await sandbox.write("/tests", {"a": b""})


@in_event_loop
async def test_a_time_limit_kills_the_processes(client: MockClient) -> None:
    client.set_script("exec", "echo; echo begin; until [ -e {folder}/killed ]; do sleep 0.05; done; exit 137")
    async with started(client.make()) as sandbox:
        result = await sandbox.exec("true", timeout=0.5)
    assert result == ExecResult(-9, "begin\n", True, result.seconds, "time limit of 0.5 s")
    assert 0.5 <= result.seconds < 60


@in_event_loop
async def test_a_container_that_ended_is_a_failure_of_the_sandbox(client: MockClient) -> None:
    client.set_script("exec", "kill $(cat {folder}/pid); echo gone >&2; exit 137")
    client.set_script("run", "echo $$ > {folder}/pid")
    async with started(client.make()) as sandbox:
        with pytest.raises(SandboxFailedError):
            await sandbox.exec("true", timeout=60)
        with pytest.raises(SandboxFailedError):
            await sandbox.kill_processes()
        with pytest.raises(SandboxFailedError):
            await sandbox.read("/file")


@in_event_loop
async def test_a_container_that_does_not_start(client: MockClient) -> None:
    for code, kind in ((125, SandboxFailedError), (127, ValueError)):
        client.set_script("run", f"echo no cgroups >&2; exit {code}")
        with pytest.raises(kind, match="no cgroups"):
            await client.make().start()


@pytest.mark.parametrize("while_it_starts", [False, True])
@in_event_loop
async def test_a_cancelled_command_ends_the_container(
    client: MockClient, while_it_starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set_script("exec", "echo; sleep 100")
    sandbox = client.make()
    await sandbox.start()
    start = ContainerClient.start

    async def start_slowly(*arguments: Any, **options: Any) -> Any:
        process = await start(*arguments, **options)
        await asyncio.sleep(100 * ("exec" in arguments and while_it_starts))
        return process

    monkeypatch.setattr(ContainerClient, "start", start_slowly)
    command = asyncio.create_task(sandbox.exec("true", timeout=60))
    while not client.get_calls("exec"):
        await asyncio.sleep(0.01)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    while not (client.folder / "ended").exists():
        await asyncio.sleep(0.01)
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxFailedError):
        await sandbox.exec("true", timeout=60)


@pytest.mark.parametrize("sizes", [[3], [10], [11], [4, 4, 4], [1] * 30])
def test_a_buffer_keeps_both_ends(sizes: list[int]) -> None:
    text = bytes(range(65, 65 + sum(sizes)))
    buffer, position = OutputBuffer(10), 0
    for size in sizes:
        buffer.add(text[position : position + size])
        position += size
    note = b"\n... %d bytes are not shown ...\n" % (len(text) - 10)
    assert buffer.get() == (text if len(text) <= 10 else text[:5] + note + text[-5:])
