"""Commands of child processes that run a module of this project or of a library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def make_module_command(module: str, *arguments: object) -> list[str]:
    """Return the command `python -P -m module arguments`. With -P, the process imports no file of the working
    directory, e.g. a psutil.py in the folder of a downloaded model."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def make_subprocess_environ() -> dict[str, str]:
    """Return the environment variables of this process, with the folder of this package added to PYTHONPATH. It has no
    PYTHONSAFEPATH, so that programs that the child starts for the user can import the files beside them."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(paths)}
