"""What one run in the sandbox came to."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a snippet ended, seen from outside its process."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # an exception, another exit code, a fatal signal
    TIMEOUT = "timeout"  # stopped at its time limit
    MEMORY = "memory"  # MemoryError, or killed for memory
    OUTPUT = "output"  # stopped for printing without end
    REFUSED = "refused"  # not run


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Example: `SandboxResult("ok", "4\\n", "", 0.004, "prefork+rlimits+landlock+seccomp")`.

    `stdout` is what the snippet printed and nothing more: it proves nothing about what the snippet computed how.
    """

    status: Status
    stdout: str  # cut in the middle, with a note, beyond the output limit
    stderr: str
    seconds: float  # from the start of its process, or of the snippet in a session
    mode: str  # the layers that held it, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"
    reason: str = ""  # why it is not ok, in one line
    restarted: bool = False  # in a session: the variables of earlier snippets were lost before this one


class SandboxError(RuntimeError):
    """The sandbox itself failed: nothing is known about the snippet. Never a verdict on it."""


class SandboxUnavailableError(ValueError):
    """This machine cannot hold untrusted code, and the user has not said that it may run anyway."""


def signal_name(number: int) -> str:
    """`SIGSEGV`; `signal 40` where it has no name, as most real-time signals.

    >>> signal_name(11), signal_name(40)
    ('SIGSEGV', 'signal 40')
    """
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
