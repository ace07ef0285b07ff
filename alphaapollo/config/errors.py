"""The one error of the configuration, and how a command reports it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from alphaapollo.utils.redaction import redacted

EXIT_CODE = 2


class ConfigError(ValueError):
    """What is wrong with the configuration: one line a problem, each with what, got and fix."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def failed(error: Exception, exit_code: int) -> int:
    """Tell a command's user what ended it, in one message; returns the exit code."""
    with suppress(OSError):  # a full disk or a closed pipe
        print(end="", flush=True)  # so that the error comes last where both streams go to one file
    print(redacted(f"error: {error}"), file=sys.stderr)
    return exit_code


@contextmanager
def reported() -> Iterator[None]:
    """Turn a ConfigError inside the block into one message on stderr and exit code 2, without a traceback."""
    try:
        yield
    except ConfigError as error:
        count = len(error.problems)
        head = "error in the configuration:" if count == 1 else f"{count} errors in the configuration:"
        print(
            redacted("\n".join([head, *(f"  {problem}" for problem in error.problems)])),
            file=sys.stderr,
        )
        raise SystemExit(EXIT_CODE) from None
