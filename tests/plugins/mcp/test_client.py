"""MCP client with real servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")


from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.plugins.mcp import client
from alphaapollo.plugins.mcp.client import McpClient, McpTool
from alphaapollo.tools.base import Session, ToolFailedError, ToolStatus
from alphaapollo.tools.toolbox import ToolBox
from tests.processes import open_server, wait_until

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]

STDIO: dict[str, Any] = {"command": COMMAND}


def with_server(use: Callable[[list[McpTool]], Awaitable[None]], **keys: Any) -> None:
    async def main() -> None:
        server = McpClient("small", **keys)
        try:
            await use(await server.start())
        finally:
            await server.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with open_server(*COMMAND) as url:
        yield f"{url}/mcp"


async def make_calls(tools: list[McpTool]) -> None:
    box = ToolBox(tools, ToolLimits(timeout=20.0))
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
    slow = await ToolBox(tools, ToolLimits(timeout=0.2)).call("sleep", {"seconds": 60}, Session())
    assert slow.status is ToolStatus.TIMEOUT  # and the server continues
    many = await asyncio.gather(*(box.call("add", {"a": n}, Session()) for n in range(20)))
    assert [result.text for result in many] == [str(n) for n in range(20)]


def test_calls_over_stdio() -> None:
    with_server(make_calls, **STDIO)


def test_calls_over_http(url: str) -> None:
    with_server(make_calls, url=url)


def test_dead_server_is_restarted_and_the_call_retried_once(tmp_path: Path) -> None:
    """If it dies twice, the calls in progress raise ToolFailedError; the next call has a new server."""

    async def use(tools: list[McpTool]) -> None:
        box = ToolBox(tools, ToolLimits(timeout=20.0))

        async def count() -> str:
            return (await box.call("count", {}, Session())).text

        assert await count() == "1"
        result = await box.call("die_once", {"mark": str(tmp_path / "died")}, Session())
        assert (result.text, result.status) == ("alive", ToolStatus.OK)
        assert [await count(), await count()] == ["1", "2"]  # a new server
        other = asyncio.create_task(box.call("sleep", {"seconds": 30}, Session()))
        await asyncio.sleep(0.1)
        with pytest.raises(ToolFailedError, match=r"small: Connection closed .*cannot go on"):
            await box.call("die", {}, Session())
        with pytest.raises(ToolFailedError, match="Connection closed"):
            await other
        assert await count() == "1"

    with_server(use, **STDIO)


def test_unreachable_http_server(url: str) -> None:
    async def use(tools: list[McpTool]) -> None:
        box = ToolBox(tools, ToolLimits(timeout=20.0))
        for name, arguments in (("die", {}), ("add", {"a": 1})):
            with pytest.raises(ToolFailedError, match="MCP server small"):
                await box.call(name, arguments, Session())

    with_server(use, url=url)


def test_cancelled_connection_ends_the_server(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    program = f"import os, sys; open({str(mark)!r}, 'w').close(); sys.stdin.read(); os.remove({str(mark)!r})"

    async def main() -> None:
        starting = asyncio.ensure_future(McpClient("x", command=[sys.executable, "-c", program]).start())
        assert await asyncio.to_thread(wait_until, mark.exists)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        assert await asyncio.to_thread(wait_until, lambda: not mark.exists()), "its standard input is still open"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ["/nowhere/server"]}, "Check the command"),
        ({"command": [sys.executable, "-c", "import sys; sys.exit('no licence')"]}, "no licence"),
        ({"url": "http://127.0.0.1:1/mcp"}, "Check the url"),
        ({}, "exactly one of command and url"),
    ],
)
def test_unusable_server_is_a_value_error(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"MCP server x.*{message}"):
        asyncio.run(McpClient("x", **arguments).start())  # type: ignore[arg-type]


def test_time_to_connect_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_TIMEOUT", 0.1)
    with pytest.raises(ValueError, match=r"MCP server x: no connection within 0\.1 s"):
        asyncio.run(McpClient("x", command=["sh", "-c", "cat > /dev/null"]).start())
