"""Rootless sandbox for Python snippets. docs/tools.md describes what snippets can and cannot do.

Sandbox (sandbox.py) -> zygote: an interpreter that has imported numpy, scipy and sympy, inside bubblewrap
                     -> one forked child per snippet, isolated by resource limits, Landlock and seccomp
"""

from __future__ import annotations

from alphaapollo.tools.sandbox.processes import SandboxError as SandboxError
from alphaapollo.tools.sandbox.processes import SandboxResult as SandboxResult
from alphaapollo.tools.sandbox.processes import SandboxStatus as SandboxStatus
from alphaapollo.tools.sandbox.processes import SandboxUnavailableError as SandboxUnavailableError
from alphaapollo.tools.sandbox.sandbox import Sandbox as Sandbox
from alphaapollo.tools.sandbox.sandbox import get_default_sandbox as get_default_sandbox


def run_python(code: str, **options: object) -> SandboxResult:
    """Run a Python snippet in the shared sandbox of this process, which starts at the first use.

    The snippet can use numpy, scipy and sympy, but not the network, other processes, or files outside its own empty
    folder. `random` and `numpy.random` start from the same seed each time. The snippet can read its own code and stdin,
    so compare its output with hidden answers outside the sandbox.

    Args:
        code: source code of the snippet.
        **options: stdin="", timeout=10.0 (seconds), memory_mb=1024, max_output=65536 (bytes), echo=False (print the
            value of the last expression), session="" (name under which snippets share variables); see `SandboxRequest`.

    Raises SandboxError if the sandbox itself fails, SandboxUnavailableError if this machine cannot isolate code.

    >>> run_python("print(int(input()) + 1)", stdin="41").stdout
    '42\\n'
    """
    return get_default_sandbox().run(code, **options)


async def run_python_async(code: str, **options: object) -> SandboxResult:
    """Run a Python snippet like `run_python`, without blocking the event loop."""
    return await get_default_sandbox().run_async(code, **options)
