"""Failed writes, said so that one knows what to do."""

from __future__ import annotations

from collections.abc import Iterator
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
