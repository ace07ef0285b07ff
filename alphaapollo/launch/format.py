"""Format of run folders, checkpoints and recordings: one number for all their files, in format.json.

A folder without format.json has format 0, whose files are those of format 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from alphaapollo._version import __version__
from alphaapollo.utils.disk import explain_write_errors, replace_file

FORMAT = 1
"""Increase it when earlier versions cannot read new folders, or new versions earlier ones (CONTRIBUTING.md)."""
FILE = "format.json"
UPGRADES: dict[int, Callable[[Path], None]] = {}
"""Earlier format -> function that changes a folder to the next format, and can be repeated after an interruption. A
format without a function has the files of the next one."""
LAST_VERSIONS: dict[int, str] = {}
"""Earlier format that cannot be upgraded -> last version of alphaapollo that reads it."""


def write_format(folder: Path) -> None:
    """Write format.json with FORMAT and the version of alphaapollo. Raises OSError if it cannot be written."""
    with explain_write_errors("the format", folder / FILE):
        replace_file(folder / FILE, [json.dumps({"format": FORMAT, "version": __version__}).encode() + b"\n"])


def upgrade_folder(folder: Path) -> None:
    """Upgrade a run folder, a checkpoint or a recording to FORMAT. Every command calls it before it reads a folder.

    Raises ValueError if this version of alphaapollo cannot read the folder.
    """
    try:
        written = json.loads((folder / FILE).read_bytes())
        number, version = int(written["format"]), str(written["version"])
    except (FileNotFoundError, NotADirectoryError):
        number, version = 0, ""
    except (OSError, ValueError, TypeError, LookupError):
        return  # damaged: find_damage reports it in checkpoints and recordings
    if number > FORMAT:
        raise ValueError(
            f"{folder} has format {number}, but alphaapollo {__version__} reads formats up to {FORMAT}. Use alphaapollo"
            f" {version}, which wrote it, or a later version."
        )
    older = range(number, FORMAT)
    if last := next((LAST_VERSIONS[one] for one in older if one in LAST_VERSIONS), ""):
        raise ValueError(
            f"{folder} has format {number}, which alphaapollo {__version__} cannot read. Use alphaapollo {last}."
        )
    if upgrades := [UPGRADES[one] for one in older if one in UPGRADES]:
        for upgrade in upgrades:
            upgrade(folder)
        write_format(folder)
