"""Tool `python_code`: runs Python code in the sandbox."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from alphaapollo.tools.base import Session, Tool, ToolResult, ToolStatus, tools
from alphaapollo.tools.sandbox import SandboxResult, get_default_sandbox
from alphaapollo.utils.json_types import JsonObject

_STATUS = {"ok": ToolStatus.OK, "timeout": ToolStatus.TIMEOUT, "refused": ToolStatus.REFUSED}


@tools.register("python_code")
class PythonCode(Tool):
    """Tool that runs a Python snippet and returns its output and the value of its last expression.

    Args:
        timeout: time limit per snippet in seconds.
        memory_mb: memory limit per snippet in MiB, not counting the memory of the interpreter itself.
        keep_state: whether the snippets of an episode share variables. If not, each snippet starts without variables.
    """

    name = "python_code"
    parameters: JsonObject = {  # noqa: RUF012  required by the protocol
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python code. Print what you want to see."}},
        "required": ["code"],
        "additionalProperties": False,
    }
    text_argument = "code"

    def __init__(self, timeout: PositiveFloat = 10.0, memory_mb: PositiveInt = 1024, keep_state: bool = False):
        state_note = "Variables are kept between calls." if keep_state else "Each call starts afresh."
        self.description = (
            "Run Python code and return what it prints and the value of a last expression. numpy, scipy and sympy are "
            f"installed; there is no network. {state_note} Time limit: {timeout:g} s."
        )
        self._timeout, self._memory_mb, self._keep_state = timeout, memory_mb, keep_state
        self._sandbox = get_default_sandbox()  # it may have other users, so `close` leaves it open

    async def call(self, arguments: JsonObject, session: Session) -> ToolResult:
        session_id = session.id if self._keep_state else ""
        if session_id and self.name not in session.state:
            session.state[self.name] = session_id
            session.on_close(lambda: self._sandbox.end_session(session_id))
        result = await self._sandbox.run_async(
            arguments["code"], timeout=self._timeout, memory_mb=self._memory_mb, echo=True, session=session_id
        )
        return ToolResult(format_result(result), _STATUS.get(result.status, ToolStatus.ERROR), seconds=result.seconds)


def format_result(result: SandboxResult) -> str:
    """Return the text that the model sees: stdout and stderr of its snippet, and the reason if it was stopped."""
    parts = [result.stdout, result.stderr]
    if result.restarted:
        parts.insert(0, "[the interpreter was restarted: earlier variables are lost]\n")
    if result.status not in ("ok", "error") or (result.status == "error" and not result.stderr):
        parts.append(f"[{result.reason}]")
    return "\n".join(part.rstrip("\n") for part in parts if part)
