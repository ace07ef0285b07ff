"""`alphaapollo port SCRIPT`, which is also `python -m alphaapollo.config port SCRIPT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.__main__ import main as show_usage
from alphaapollo.config.errors import EXIT_CODE, report_error
from alphaapollo.plugins.port.shell import MAX_SOURCE
from alphaapollo.plugins.port.translate import describe_next_steps, describe_other_project, port_script


def main(argv: Sequence[str]) -> int:
    """Print the converted script, and the next steps on the standard error. Returns exit code 2 if it cannot be
    converted."""
    if not argv or {"-h", "--help"} & set(argv):
        return show_usage(["port", *argv])
    script, *words = argv
    source = ""
    try:
        with open(script, encoding="utf-8") as file:
            source = file.read(MAX_SOURCE + 1)
        ported = port_script(source, script, words)
        print(ported, end="")
        print(describe_next_steps(ported), end="", file=sys.stderr)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        is_deep = isinstance(error, RecursionError | MemoryError)
        reason = f"{script}: nested too deeply. Shorten it." if is_deep else str(error)
        other = source and describe_other_project(f"{source}\n{script}")
        return report_error(ValueError(f"{script}: {other}." if other else reason), EXIT_CODE)
    return 0
