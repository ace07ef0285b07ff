"""Failed writes, said so that one knows what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block (a full disk, a missing right) into one that names what could not be written."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"could not write {what}: {error.strerror}. Make room or mend the folder; the same command goes on from "
            "the last checkpoint",
            str(path),
        ) from error


def close_all(*closes: Callable[[], None]) -> None:
    """Call each, in a `finally`. Raises the first OSError of theirs, but not over the error that is under way: on a
    full disk a file that could not be written cannot be closed either."""
    under_way, failures = sys.exc_info()[1], list[OSError]()
    for close in closes:
        try:
            close()
        except OSError as error:
            failures.append(error)
    if failures and under_way is None:
        raise failures[0]
