"""The tool python_code."""

from __future__ import annotations

import asyncio

import pytest

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.tools import python_code
from alphaapollo.tools.base import Session, ToolFailedError, ToolResult, ToolStatus
from alphaapollo.tools.python_code import PythonCode, format_result
from alphaapollo.tools.sandbox import SandboxResult, SandboxStatus, SandboxUnavailableError, SnippetSandbox
from alphaapollo.tools.toolbox import ToolBox


@pytest.fixture(autouse=True)
def use_sandbox(sandbox: SnippetSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_code, "get_default_sandbox", lambda: sandbox)


def call(tool: PythonCode, *snippets: str) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        session = Session()
        toolbox = ToolBox([tool], ToolLimits())
        results = [await toolbox.call_text("python_code", snippet, session) for snippet in snippets]
        await session.close()
        return results

    return asyncio.run(main())


def test_output_and_last_value() -> None:
    (result,) = call(PythonCode(), "print('a')\n6 * 7")
    assert (result.text, result.status, result.score) == ("a\n42", ToolStatus.OK, None)


def test_keep_state(sandbox: SnippetSandbox) -> None:
    results = call(PythonCode(), "x = 1", "x")
    assert results[1].status is ToolStatus.ERROR and "NameError: name 'x' is not defined" in results[1].text
    results = call(PythonCode(keep_state=True), "x = 1", "x + 1")
    assert (results[1].text, results[1].status) == ("2", ToolStatus.OK)
    assert "kept" in PythonCode(keep_state=True).description
    assert not sandbox._sessions  # the end of an episode ends them


def test_timeout_and_restart() -> None:
    tool = PythonCode(timeout=0.5, keep_state=True)
    _, slow, after = call(tool, "x = 1", "print('begun')\nwhile True: pass", "2")
    assert (slow.text, slow.status) == ("begun\n[stopped after 0.5 s]", ToolStatus.TIMEOUT)
    assert "restarted" in after.text and after.text.endswith("\n2")


@pytest.mark.parametrize(
    ("status", "out", "err", "reason", "text"),
    [
        (SandboxStatus.ERROR, "a\n", "Traceback\n", "exit code 1", "a\nTraceback"),
        (SandboxStatus.OUTPUT, "a\n", "", "stopped after 16 MiB", "a\n[stopped after 16 MiB]"),
    ],
)
def test_format_result(status: SandboxStatus, out: str, err: str, reason: str, text: str) -> None:
    assert format_result(SandboxResult(status, out, err, 0.1, "mode", reason)) == text


def test_unavailable_sandbox_is_a_tool_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(sandbox: SnippetSandbox) -> None:
        raise SandboxUnavailableError("no seccomp filter")

    monkeypatch.setattr(python_code, "get_default_sandbox", SnippetSandbox)
    monkeypatch.setattr(SnippetSandbox, "_start_most_isolated_zygote", start)
    with pytest.raises(ToolFailedError, match="no seccomp filter"):
        call(PythonCode(), "1")
