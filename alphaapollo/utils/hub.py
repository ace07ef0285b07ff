"""Distinguish hub ids from local paths."""

from __future__ import annotations

from pathlib import Path


def is_local_path(path: str) -> bool:
    """Whether a model path is local: not OWNER/NAME, or starting with an existing folder (a misspelled
    `outputs/modle`)."""
    return path.startswith(("/", ".", "~")) or path.count("/") != 1 or Path(path.split("/")[0]).is_dir()
