"""ConfigError, and how commands report errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from alphaapollo.utils.redaction import redact

EXIT_CODE = 2


class ConfigError(ValueError):
    """Problems of a configuration, one line each: what is wrong, the value, and a fix."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def report_error(error: Exception, exit_code: int) -> int:
    """Print the error that ended a command, and return the exit code."""
    with suppress(OSError):  # a full disk or a closed pipe
        print(end="", flush=True)  # so that the error comes last where both streams go to one file
    print(redact(f"error: {error}"), file=sys.stderr)
    return exit_code


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Print a ConfigError of the block on stderr, without a traceback, and exit with 2."""
    try:
        yield
    except ConfigError as error:
        count = len(error.problems)
        head = "error in the configuration:" if count == 1 else f"{count} errors in the configuration:"
        print(
            redact("\n".join([head, *(f"  {problem}" for problem in error.problems)])),
            file=sys.stderr,
        )
        raise SystemExit(EXIT_CODE) from None
