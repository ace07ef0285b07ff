"""Hub id or local folder: what the text of a model's path means."""

from __future__ import annotations

from pathlib import Path


def looks_local(path: str) -> bool:
    """It is no OWNER/NAME, or begins like a folder that is here: `outputs/modle` where there is a folder `outputs`."""
    return path.startswith(("/", ".", "~")) or path.count("/") != 1 or Path(path.split("/")[0]).is_dir()
