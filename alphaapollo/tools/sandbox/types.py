"""Requests to the sandbox and results from it."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

MAX_CODE_BYTES = 1 << 20
LAYERS = ("setuid", "rlimits", "landlock", "seccomp", "bubblewrap")
"""Layers of isolation around a child, as in docs/sandbox.md."""


@dataclass(frozen=True)
class SandboxRequest:
    """One snippet with its input and limits."""

    code: str
    stdin: str = ""  # a session has the stdin of its first snippet
    timeout: float = 10.0  # seconds of wall clock
    memory_mb: int = 1024  # MiB of address space beyond the interpreter's own
    max_output: int = 1 << 16  # bytes kept of stdout and of stderr, half from the beginning and half from the end
    echo: bool = False  # print the value of a last expression, as the interactive interpreter does
    session: str = ""  # snippets with the same non-empty name share variables until `end_session`


class Status(StrEnum):
    """How a snippet ended, observed from outside its process."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # an exception, another exit code, a fatal signal
    TIMEOUT = "timeout"
    MEMORY = "memory"  # MemoryError, or killed by the OOM killer
    OUTPUT = "output"  # stopped because of too much output
    REFUSED = "refused"  # not run


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Example: `SandboxResult(Status.OK, "4\\n", "", 0.004, "prefork+rlimits+landlock+seccomp")`.

    `stdout` contains only what the snippet printed. It is no proof of how the snippet computed it.
    """

    status: Status
    stdout: str  # truncated in the middle, with a note, above the output limit
    stderr: str
    seconds: float  # since the start of the process; in a session, of the snippet
    mode: str  # the layers in use, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"
    reason: str = ""  # why the status is not ok, in one line
    restarted: bool = False  # the session's earlier variables were lost before this snippet


class SandboxError(RuntimeError):
    """The sandbox itself failed, so nothing is known about the snippet. No reward may depend on it."""


class SandboxUnavailableError(ValueError):
    """This machine cannot isolate untrusted code, and the user has not allowed to run it without isolation."""


class OutputCapture:
    """Keeps at most `limit` bytes of a stream, half from the beginning and half from the end.

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
        if len(self._tail) > 2 * self._tail_limit + 4096:
            self._trim()

    def text(self) -> str:
        self._trim()
        cut = self.total - len(self._head) - len(self._tail)
        note = f"\n... [{cut} bytes cut] ...\n".encode() if cut else b""
        return (bytes(self._head) + note + bytes(self._tail)).decode("utf-8", errors="replace")

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]


def format_mode(layers: Collection[str]) -> str:
    """Name of a combination of layers, e.g. `prefork+rlimits+seccomp`."""
    return "+".join(["prefork", *(name for name in LAYERS if name in layers)])


def format_signal(number: int) -> str:
    """Name of a signal; most real-time signals have none.

    >>> format_signal(11), format_signal(40)
    ('SIGSEGV', 'signal 40')
    """
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
