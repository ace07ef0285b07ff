"""What is asked of the sandbox: one snippet and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

MAX_CODE_BYTES = 1 << 20


@dataclass(frozen=True)
class Order:
    """One snippet, with the defaults of all `Options`."""

    code: str
    stdin: str = ""
    timeout: float = 10.0
    memory_mb: int = 1024
    max_output: int = 1 << 16
    echo: bool = False
    session: str = ""

    @property
    def too_long(self) -> str:
        """Why it is not run; empty if it is."""
        size = len(self.code.encode("utf-8", "surrogatepass"))
        return f"{size} bytes of code, the limit is {MAX_CODE_BYTES}" if size > MAX_CODE_BYTES else ""


class Options(TypedDict, total=False):
    """What may be said beside the code."""

    stdin: str
    """What it reads from standard input (of a session: what the first snippet reads)."""
    timeout: float
    """Seconds of wall clock."""
    memory_mb: int
    """MiB that it may map beyond the interpreter's own."""
    max_output: int
    """Bytes kept of stdout and of stderr, half from the beginning and half from the end."""
    echo: bool
    """Print the value of a last expression as the interactive interpreter does."""
    session: str
    """A name of your choice: snippets with the same one share variables, until `end_session`. Empty: none."""
