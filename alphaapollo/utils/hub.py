"""Distinguish ids on the Hugging Face hub from local paths."""

from __future__ import annotations

from pathlib import Path


def is_local_path(path: str) -> bool:
    """Return whether a model path is local rather than a hub id OWNER/NAME.

    OWNER/NAME counts as local if OWNER is an existing folder, so that a misspelled `outputs/modle` is not downloaded.
    """
    return path.startswith(("/", ".", "~")) or path.count("/") != 1 or Path(path.split("/")[0]).is_dir()
