"""`alphaapollo quickstart`: run the quickstart example, as `make quickstart` does after the installation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.config.errors import report_error

SCRIPT = Path("examples") / "quickstart" / "run.sh"


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the example's script. Returns 2 if there is no source tree."""
    parser = argparse.ArgumentParser(
        prog="alphaapollo quickstart",
        description="Build a task and a tiny model, warm it up with SFT and train it with RL until it visibly learns.",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--out", default="outputs/quickstart", help="folder to write (default outputs/quickstart)")
    options = parser.parse_args(argv)
    try:
        source_tree = find_source_tree(Path.cwd(), Path(__file__).resolve().parents[2])
    except ValueError as error:
        return report_error(error, 2)
    command = ["bash", str(source_tree / SCRIPT), str(options.seed), str(Path(options.out).resolve())]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.execvpe(command[0], command, os.environ | {"PATH": path})


def find_source_tree(*folders: Path) -> Path:
    """Return the first folder with the example. Raises ValueError if no folder has it, as in an installed package."""
    for folder in folders:
        if (folder / SCRIPT).is_file():
            return folder
    raise ValueError(
        f"quickstart needs {SCRIPT}, which is not in {', '.join(map(str, folders))}. Run it in a clone "
        "of the repository, or train on your own data: alphaapollo rl --help."
    )
