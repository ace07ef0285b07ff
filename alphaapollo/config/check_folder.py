"""Whether a run can have the folder that it asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from alphaapollo.config.schema import RunFolder

LONGEST = 200  # bytes of a name; file systems take 255, and what lies beside a run has its name and some more


def check_folder(trainer: RunFolder) -> Iterator[str]:
    """A line for what is wrong with output_dir/project_name/experiment_name."""
    named = {"trainer.project_name": trainer.project_name, "trainer.experiment_name": trainer.experiment_name}
    problems = [_name_problem(key, name) for key, name in named.items()]
    problems = [one for one in (*problems, _spelling_problem("trainer.output_dir", trainer.output_dir)) if one]
    yield from problems or _check_place(trainer)


def _name_problem(key: str, name: str) -> str:
    """Empty: none."""
    parts = Path(name).parts
    if not parts:
        return f"{key}={name!r}: without it the run would be the folder above, with all that lies there. Give a name."
    if ".." in parts or Path(name).is_absolute():
        return f"{key}={name!r} leaves trainer.output_dir. Give a name, and set trainer.output_dir to go elsewhere."
    if len(parts) > 1:
        return f"{key}={name!r}: a run inside another's folder goes where that one goes. Give a name without /."
    return _spelling_problem(key, name)


def _spelling_problem(key: str, path: str) -> str:
    if "\0" in path:
        return f"{key}={path!r}: a path cannot have a zero byte."
    for part in Path(path).parts:
        if (size := len(os.fsencode(part))) > LONGEST:
            return f"{key}: {part[:20]}... has {size} bytes. Give a name of {LONGEST} or less."
    return ""


def _check_place(trainer: RunFolder) -> Iterator[str]:
    folder = trainer.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield f"the run's folder, {trainer.folder}: {existing} is a file. Set another trainer.output_dir or name."
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"the run's folder, {trainer.folder}: you cannot write in {existing}. Set another trainer.output_dir."
