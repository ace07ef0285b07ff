"""Write files atomically, with errors that explain failed writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def explain_write_errors(content_name: str, path: Path) -> Iterator[None]:
    """Context manager that replaces an OSError of its block by one that says what failed and how to continue.

    content_name: name of what the block writes to `path`, e.g. "the metrics".
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write {content_name}: {error.strerror}. Free disk space or fix permissions; the same command "
            "resumes from the last checkpoint",
            str(path),
        ) from error


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file under a temporary name and rename it, so that `path` never has incomplete content."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.writelines(lines)
    part.replace(path)


def close_all(*close_functions: Callable[[], None]) -> None:
    """Call all functions, then raise the first OSError that they raised. For use in a `finally` block: if another
    exception is active, no OSError is raised, because closing usually fails, too, after a write to a full disk."""
    active_error, failures = sys.exc_info()[1], list[OSError]()
    for close in close_functions:
        try:
            close()
        except OSError as error:
            failures.append(error)
    if failures and active_error is None:
        raise failures[0]
