"""A rootless sandbox for Python snippets: see docs/sandbox.md for what it stops and what it does not.

Sandbox (pool.py) -> Supervisor, a thread -> zygote: an interpreter with numpy, scipy, sympy, inside bubblewrap
                                              -> a child a snippet: rlimits, Landlock, seccomp
"""

from __future__ import annotations

from typing import Unpack

from alphaapollo.tools.sandbox.order import Options
from alphaapollo.tools.sandbox.pool import Sandbox, default_sandbox
from alphaapollo.tools.sandbox.result import SandboxError, SandboxResult, SandboxUnavailableError, Status

__all__ = [
    "Options",
    "Sandbox",
    "SandboxError",
    "SandboxResult",
    "SandboxUnavailableError",
    "Status",
    "default_sandbox",
    "run_python",
    "run_python_async",
]


def run_python(code: str, **options: Unpack[Options]) -> SandboxResult:
    """Run a Python snippet in this process's sandbox (started at the first use).

    numpy, scipy and sympy are there; the network, other processes and files outside its own empty folder are not.
    `random` and `numpy.random` start from the same seed each time, so that a rollout can be repeated.

    Args:
        code: the program. Put nothing into it that it must not learn: hidden answers are compared outside.
        **options: stdin="", timeout=10.0 (seconds), memory_mb=1024, max_output=65536 (bytes), echo=False (print the
            value of a last expression), session="" (share variables under this name); see `Options`.

    Raises SandboxError when the sandbox itself fails (nothing is known about the snippet), SandboxUnavailableError
    when this machine cannot hold one.

    >>> run_python("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    """
    return default_sandbox().run(code, **options)


async def run_python_async(code: str, **options: Unpack[Options]) -> SandboxResult:
    """`run_python` without blocking the event loop."""
    return await default_sandbox().run_async(code, **options)
