"""Write files atomically, with errors that explain failed writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def explain_write_errors(content: str, path: Path) -> Iterator[None]:
    """Context manager: replace an OSError by an error that says what failed and how to continue.

    content: what the block writes to `path`, e.g. "the metrics".
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write {content}: {error.strerror}. Free disk space or fix permissions; the same command "
            "resumes from the last checkpoint",
            str(path),
        ) from error


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file atomically, replacing an earlier one."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.writelines(lines)
    part.replace(path)


def close_all(*closes: Callable[[], None]) -> None:
    """Call all functions, for use in a `finally` block.

    Raises the first OSError, unless another exception is active: a full disk also makes closing fail.
    """
    active_error, failures = sys.exc_info()[1], list[OSError]()
    for close in closes:
        try:
            close()
        except OSError as error:
            failures.append(error)
    if failures and active_error is None:
        raise failures[0]
