"""Valid and invalid tool calls."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.tools.base import Session, Tool, ToolFailedError, ToolResult, ToolStatus, cut_middle
from alphaapollo.tools.function_tool import FunctionTool
from alphaapollo.tools.toolbox import ToolBox
from tests.unit import virtual_time


async def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


def box(**limits: Any) -> ToolBox:
    return ToolBox([FunctionTool(add), FunctionTool(sleep), FunctionTool(repeat)], ToolLimits(**limits))


def call(toolbox: ToolBox, name: str, arguments: Any) -> ToolResult:
    return asyncio.run(toolbox.call(name, arguments, Session()))


def test_valid_call() -> None:
    for arguments in ({"a": 1, "b": 2}, '{"a": 1, "b": 2}'):
        result = call(box(), "add", arguments)
        assert (result.text, result.status, result.score) == ("3", ToolStatus.OK, None)
        assert 0 < result.seconds < 5


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("add", '{"a": 1', "add: .*JSON: .*column 8"),
        ("add", "", "add: .*JSON: .*column 1 "),
        ("add", "[" * 30_000, "add: .*not JSON"),
        ("add", "[1]", r"add: .*\[1\] .*'object'"),
        ("ad", "{}", r"'ad'\. Did you mean 'add'\? .*add, repeat, sleep\."),
        ("add", {"a": "one"}, r"add: argument 'a': 'one' .*'integer'.* a, b\."),
        ("add", {"b": 1}, "add: argument: 'a' .*required"),
        ("add", {"a": 1, "c": 2}, "add: argument: .*'c' was unexpected"),
        ("repeat", {"text": "x" * (1 << 20), "times": 1}, "repeat: 1048600 bytes .*65536"),
    ],
)
def test_invalid_call_is_refused_with_the_reason(name: str, arguments: Any, reason: str) -> None:
    result = call(box(), name, arguments)
    assert result.status is ToolStatus.REFUSED and re.search(reason, result.text), result.text


def test_lone_surrogates_do_not_reach_tokenizers_and_logs() -> None:
    assert call(box(), "repeat", '{"text": "\\ud800a", "times": 2}').text == "?a?a"
    assert call(box(), "\ud800", "{}").status is ToolStatus.REFUSED


def test_limits_of_time_and_output() -> None:
    result = call(box(timeout=0.05), "sleep", {"seconds": 30})
    assert (result.text, result.status) == ("sleep: no answer within 0.05 s", ToolStatus.TIMEOUT)
    assert result.seconds < 5
    text = call(box(max_output=6), "repeat", {"text": "ab", "times": 10}).text
    assert text == "aba\n... [14 characters cut] ...\nbab"
    assert cut_middle("abcd", 4) == "abcd"


def test_concurrency_limit() -> None:
    running = [0]

    async def count() -> int:
        """Count running calls."""
        running.append(running[-1] + 1)
        await asyncio.sleep(0.4)
        running.append(running[-1] - 1)
        return 1

    async def main(at_a_time: int) -> int:
        toolbox = ToolBox([FunctionTool(count)], ToolLimits(max_concurrent=at_a_time, timeout=2.0))
        results = await asyncio.gather(*(toolbox.call("count", {}, Session()) for _ in range(6)))
        assert all(result.text == "1" for result in results)  # the wait does not count for the timeout
        return max(running)

    assert virtual_time.run(main(1)) == 1
    assert virtual_time.run(main(6)) == 6


def test_seconds_of_a_call_do_not_include_the_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("alphaapollo.tools.toolbox.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def tick() -> int:
        """Let five seconds pass."""
        await asyncio.sleep(0)
        clock[0] += 5
        return 1

    async def main() -> list[float]:
        toolbox = ToolBox([FunctionTool(tick)], ToolLimits(max_concurrent=1))
        return [one.seconds for one in await asyncio.gather(*(toolbox.call("tick", {}, Session()) for _ in range(3)))]

    assert asyncio.run(main()) == [5.0, 5.0, 5.0]


class Echo:
    """Tool that returns its text. The first calls raise the errors."""

    name = "echo"
    description = "Echoes."
    text_argument: str | None = "text"

    def __init__(self, *errors: Exception, type: str = "object"):
        self.parameters = {"type": type}
        self._errors, self.is_closed = list(errors), False

    async def call(self, arguments: dict[str, Any], session: Session) -> ToolResult:
        if self._errors:
            raise self._errors.pop()
        return ToolResult(arguments["text"], ToolStatus.OK)

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("error", [ToolFailedError("gone"), KeyError("gone"), TimeoutError("gone")])
def test_exception_of_a_tool_is_a_tool_failure_and_retried_once(error: Exception) -> None:
    assert call(ToolBox([Echo(error)], ToolLimits()), "echo", {"text": "a"}).text == "a"
    with pytest.raises(ToolFailedError, match="gone"):
        call(ToolBox([Echo(error, error)], ToolLimits()), "echo", {})


def test_call_text() -> None:
    async def main(name: str, text: str) -> ToolResult:
        toolbox = ToolBox([FunctionTool(add), echo := Echo()], ToolLimits())
        result = await toolbox.call_text(name, text, Session())
        await toolbox.close()
        assert echo.is_closed
        return result

    assert asyncio.run(main("echo", '{"not": json')).text == '{"not": json'
    assert asyncio.run(main("add", '{"a": 3}')).text == "3"
    assert asyncio.run(main("add", "3")).status is ToolStatus.REFUSED
    assert asyncio.run(main("other", "3")).status is ToolStatus.REFUSED


@pytest.mark.parametrize(
    ("tools", "fact"),
    [
        ([FunctionTool(add), FunctionTool(add)], r"same name: add\."),
        ([Echo(type="objekt")], "not a JSON schema"),
        ([Echo(type="array")], "'object', not 'array'"),
    ],
)
def test_invalid_toolboxes(tools: list[Tool], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ToolBox(tools, ToolLimits())


def test_session_closers_run_once_in_reverse_order() -> None:
    seen: list[str] = []

    async def second() -> None:
        seen.append("second")

    async def main() -> None:
        session = Session()
        session.on_close(lambda: seen.append("first"))
        session.on_close(second)
        await session.close()
        await session.close()

    asyncio.run(main())
    assert seen == ["second", "first"]
