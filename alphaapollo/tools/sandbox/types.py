"""Types of the sandbox: requests, results and errors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

MAX_CODE_BYTES = 1 << 20
LAYERS = ("setuid", "rlimits", "landlock", "seccomp", "bubblewrap")
"""Isolation layers of a child, described in docs/tools.md."""


@dataclass(frozen=True)
class SandboxRequest:
    """Python snippet with its input and limits."""

    code: str
    stdin: str = ""  # in a session, all snippets share the stdin of the first one
    timeout: float = 10.0  # seconds of wall clock
    memory_mb: int = 1024  # MiB of address space in addition to that of the interpreter
    max_output: int = 1 << 16  # bytes kept per stream, half from the beginning and half from the end
    echo: bool = False  # print the value of the last expression, as the interactive interpreter does
    session: str = ""  # snippets with the same non-empty name share variables until `end_session`


class SandboxStatus(StrEnum):
    """Outcome of a snippet, observed from outside its process."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # an exception, another exit code, a fatal signal
    TIMEOUT = "timeout"
    MEMORY = "memory"  # MemoryError, or killed by the OOM killer
    OUTPUT = "output"  # stopped because of too much output
    REFUSED = "refused"  # not run


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of a snippet, e.g. `SandboxResult(SandboxStatus.OK, "4\\n", "", 0.004, "prefork+rlimits+landlock")`.
    `stdout` contains only the output of the snippet, and does not prove how the snippet computed it."""

    status: SandboxStatus
    stdout: str  # truncated in the middle, with a note, above the output limit
    stderr: str
    seconds: float  # wall-clock time of the snippet
    mode: str  # the layers in use, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"
    reason: str = ""  # one line that explains a status other than ok
    restarted: bool = False  # the session's earlier variables were lost before this snippet


class SandboxError(RuntimeError):
    """Error for a failure of the sandbox itself. The outcome of the snippet is unknown and must not affect a reward."""


class SandboxUnavailableError(ValueError):
    """Error: this machine cannot isolate untrusted code, and the user has not allowed code without isolation."""


class OutputCapture:
    """Buffer that keeps at most `limit` bytes of a stream, half from the beginning and half from the end.

    >>> capture = OutputCapture(4)
    >>> capture.feed(b"abcdefgh")
    >>> capture.text()
    'ab\\n... [4 bytes cut] ...\\ngh'
    """

    def __init__(self, limit: int):
        self._head_limit, self._tail_limit = (limit + 1) // 2, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0  # bytes fed so far

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        free = self._head_limit - len(self._head)
        self._head += data[:free]
        self._tail += data[free:]
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    def text(self) -> str:
        cut = self.total - len(self._head) - len(self._tail)
        note = f"\n... [{cut} bytes cut] ...\n".encode() if cut else b""
        return (bytes(self._head) + note + bytes(self._tail)).decode("utf-8", errors="replace")


def format_sandbox_mode(layers: Collection[str]) -> str:
    """Return the name of a combination of isolation layers, e.g. `prefork+rlimits+seccomp`."""
    return "+".join(["prefork", *(name for name in LAYERS if name in layers)])
