"""Format of run folders, checkpoints and recordings: one number for all their files, in format.json.

A folder without format.json has format 0, whose files are those of format 1. Format 2 has other files of rollout groups
(recordings, and checkpoints with data.reuse).
"""

from __future__ import annotations

import json
from pathlib import Path

from alphaapollo._version import __version__
from alphaapollo.utils.disk import explain_write_errors, replace_file

FORMAT = 2
"""Increase it when earlier versions cannot read new folders, or new versions earlier ones (CONTRIBUTING.md)."""
FILE = "format.json"


def write_format(folder: Path) -> None:
    """Write format.json with FORMAT and the version of alphaapollo. Raises OSError if it cannot be written."""
    with explain_write_errors("the format", folder / FILE):
        replace_file(folder / FILE, [json.dumps({"format": FORMAT, "version": __version__}).encode() + b"\n"])


def check_format(folder: Path) -> None:
    """Raise ValueError if this version of alphaapollo cannot read a run folder, a checkpoint or a recording. Every
    command calls it before it reads a folder."""
    try:
        written = json.loads((folder / FILE).read_bytes())
        number, version = int(written["format"]), str(written["version"])
    except (OSError, ValueError, TypeError, LookupError):
        return  # format 0, or damaged: find_damage reports it in checkpoints and recordings
    if number > FORMAT:
        raise ValueError(
            f"{folder} has format {number}, but alphaapollo {__version__} reads formats up to {FORMAT}. Use alphaapollo"
            f" {version}, which wrote it, or a later version."
        )
