"""ConfigError, and functions that report errors of commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from alphaapollo.utils.redaction import redact, replace_control_characters

EXIT_CODE = 2


class ConfigError(ValueError):
    """Errors in a configuration. Each is one line with the key and its value, what is wrong, and a fix."""

    def __init__(self, errors: str | Sequence[str]):
        self.errors = [errors] if isinstance(errors, str) else list(errors)
        super().__init__("\n".join(self.errors))


def report_error(error: Exception, exit_code: int) -> int:
    """Print a command's error to stderr, with secrets masked, and return `exit_code`."""
    with suppress(OSError):  # a full disk or a closed pipe
        print(end="", flush=True)  # flush stdout, so that the error is last if both streams go to one file
    print(replace_control_characters(redact(f"error: {error}")), file=sys.stderr)
    return exit_code


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Context manager: if the block raises ConfigError, print its errors without a traceback, and exit with code 2."""
    try:
        yield
    except ConfigError as error:
        count = len(error.errors)
        head = "error in the configuration:" if count == 1 else f"{count} errors in the configuration:"
        text = redact("\n".join([head, *(f"  {line}" for line in error.errors)]))
        print(replace_control_characters(text), file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
