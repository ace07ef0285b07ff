"""MCP client with real servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.processes.network import find_connection_error, find_free_port
from alphaapollo.tools.base import Session, ToolFailedError, ToolStatus
from alphaapollo.tools.mcp_client import McpClient, find_root_cause
from alphaapollo.tools.toolbox import ToolBox
from tests.processes import wait_until

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]

Play = Callable[[ToolBox], Awaitable[None]]


def with_server(server: McpClient, play: Play, timeout: float = 20.0) -> None:
    async def main() -> None:
        try:
            await play(ToolBox(await server.start(), ToolLimits(timeout=timeout)))
        finally:
            await server.close()

    asyncio.run(main())


def stdio() -> McpClient:
    return McpClient("small", command=COMMAND)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = find_free_port()
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as program:
        try:
            assert wait_until(lambda: not find_connection_error("127.0.0.1", port), 60)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            program.kill()


async def play_calls(box: ToolBox) -> None:
    assert box.names == ["add", "count", "die", "die_once", "draw", "fail", "reject", "sleep"]
    schema = box.schemas()[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    good = await box.call("add", '{"a": 1, "b": 2}', Session())
    assert (good.text, good.status) == ("3", ToolStatus.OK)
    bad = await box.call("fail", "{}", Session())
    assert bad.status is ToolStatus.ERROR and "fail" in bad.text
    rejected = await box.call("reject", "{}", Session())
    assert (rejected.text, rejected.status) == ("not these arguments", ToolStatus.ERROR)
    for arguments in ('{"a": "x"}', '{"a": 1, "c": 2}', "{}", "{"):
        assert (await box.call("add", arguments, Session())).status is ToolStatus.REFUSED
    drawn = await box.call("draw", {}, Session())
    assert (drawn.text, list(drawn.images)) == ("a square\n[image]", [b"\x89PNG square"])
    many = await asyncio.gather(*(box.call("add", {"a": n}, Session()) for n in range(20)))
    assert [result.text for result in many] == [str(n) for n in range(20)]


def test_calls_over_stdio() -> None:
    with_server(stdio(), play_calls)


def test_calls_over_http(url: str) -> None:
    with_server(McpClient("small", url=url), play_calls)


def test_dead_server_is_restarted_and_the_call_retried(tmp_path: Path) -> None:
    async def play(box: ToolBox) -> None:
        assert (await box.call("count", {}, Session())).text == "1"
        result = await box.call("die_once", {"mark": str(tmp_path / "died")}, Session())
        assert (result.text, result.status) == ("alive", ToolStatus.OK)
        assert (await box.call("count", {}, Session())).text == "1"  # a new server

    with_server(stdio(), play)


def test_server_that_dies_twice_fails_the_call() -> None:
    """The calls in progress raise ToolFailedError; the next call has a new server."""

    async def play(box: ToolBox) -> None:
        assert (await box.call("count", {}, Session())).text == "1"
        assert (await box.call("count", {}, Session())).text == "2"
        other = asyncio.create_task(box.call("sleep", {"seconds": 30}, Session()))
        await asyncio.sleep(0.5)
        with pytest.raises(ToolFailedError, match=r"small: Connection closed .*cannot go on"):
            await box.call("die", {}, Session())
        with pytest.raises(ToolFailedError, match="Connection closed"):
            await other
        assert (await box.call("count", {}, Session())).text == "1"  # a new server

    with_server(stdio(), play)


def test_unreachable_http_server(url: str) -> None:
    async def play(box: ToolBox) -> None:
        with pytest.raises(ToolFailedError, match="MCP server small"):
            await box.call("die", {}, Session())
        with pytest.raises(ToolFailedError, match="MCP server small"):
            await box.call("add", {"a": 1}, Session())

    with_server(McpClient("small", url=url), play)


def test_slow_call_times_out_without_ending_the_server() -> None:
    async def play(box: ToolBox) -> None:
        slow = await box.call("sleep", {"seconds": 60}, Session())
        assert slow.status is ToolStatus.TIMEOUT
        assert (await box.call("add", {"a": 5}, Session())).text == "5"

    with_server(stdio(), play, timeout=3.0)


def test_cancelled_connection_ends_the_server(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    program = f"import os, sys; open({str(mark)!r}, 'w').close(); sys.stdin.read(); os.remove({str(mark)!r})"

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await McpClient("x", command=[sys.executable, "-c", program]).start()
        assert mark.exists()
        assert await asyncio.to_thread(wait_until, lambda: not mark.exists()), "its standard input is still open"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ["/nowhere/server"]}, "Check the command"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "Check the command"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit('no licence')"]}, "no licence"),
        ({"url": "http://127.0.0.1:1/mcp"}, "Check the url"),
    ],
)
def test_missing_server_is_a_value_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"MCP server x: .*{message}"):
        asyncio.run(McpClient("x", **arguments).start())  # type: ignore[arg-type]


def test_command_and_url_are_exclusive() -> None:
    for arguments in ({}, {"command": ["a"], "url": "b"}):
        with pytest.raises(ValueError, match="exactly one of command and url"):
            McpClient("x", **arguments)  # type: ignore[arg-type]


def test_root_cause() -> None:
    assert find_root_cause(ExceptionGroup("a", [ExceptionGroup("b", [OSError("c")]), ValueError("d")])) == "OSError: c"
