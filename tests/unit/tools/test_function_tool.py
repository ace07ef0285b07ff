"""Function tools: schema and calls."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from alphaapollo.tools.base import Session, ToolResult, ToolStatus, make_tools, tools
from alphaapollo.tools.function_tool import FunctionTool, tool


def search(query: str, top_k: Annotated[int, Field(ge=1)] = 3, where: Literal["web", "books"] = "web") -> list[str]:
    """Search for something.

    More about it.

    Args:
        query: what to look for,
            over two lines: with a colon.
        top_k (int): how many.

    Returns:
        where: not an argument.
    """
    return [f"{query} {n} {where}" for n in range(top_k)]


def call(function: object, arguments: dict[str, object], session: Session | None = None) -> ToolResult:
    return asyncio.run(FunctionTool(function).call(arguments, session or Session()))  # type: ignore[arg-type]


def test_schema_from_signature_and_docstring() -> None:
    made = FunctionTool(search)
    assert (made.name, made.description) == ("search", "Search for something.\n\nMore about it.")
    assert made.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for, over two lines: with a colon."},
            "top_k": {"type": "integer", "minimum": 1, "default": 3, "description": "how many."},
            "where": {"type": "string", "enum": ["web", "books"], "default": "web"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def test_results() -> None:
    assert call(search, {"query": "é", "top_k": 2}) == ToolResult('["é 0 web", "é 1 web"]', ToolStatus.OK)
    assert call(search, {"query": "a", "top_k": 0}).status is ToolStatus.REFUSED

    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    assert call(divide, {"a": 1, "b": 2}).text == "0.5"
    assert call(divide, {"a": 1, "b": 0}) == ToolResult("ZeroDivisionError: division by zero", ToolStatus.ERROR)


class Point(BaseModel):
    x: int


def test_async_function_with_session_and_model() -> None:
    async def count(point: Point, session: Session) -> ToolResult:
        """Count."""
        session.state["count"] = session.state.get("count", 0) + point.x
        return ToolResult(str(session.state["count"]), ToolStatus.OK, score=0.5)

    assert list(FunctionTool(count).parameters["properties"]) == ["point"]
    session = Session()
    call(count, {"point": {"x": 2}}, session)
    assert call(count, {"point": {"x": 3}}, session) == ToolResult("5", ToolStatus.OK, score=0.5)


def test_invalid_functions_are_rejected() -> None:
    def silent(a: int) -> int:
        return a

    def untyped(a) -> int:  # type: ignore[no-untyped-def]
        """Has a docstring."""
        return int(a)

    for function, message in ((silent, "no docstring"), (untyped, "a has no type")):
        with pytest.raises(ValueError, match=message):
            FunctionTool(function)


def test_registered_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_entries", dict(tools._entries))  # other tests register a tool of this name

    @tool
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    assert double(2) == 4
    (made,) = make_tools(["double"], {})
    assert made.name == "double" and "double" in tools
    with pytest.raises(ValueError, match="registered twice"):
        tool(double)
    with pytest.raises(ValueError, match="Did you mean 'double'"):
        make_tools(["dobule"], {})
    with pytest.raises(ValueError, match=r"tool_settings\.double\.speed.* none"):
        make_tools(["double"], {"double": {"speed": 1}})
