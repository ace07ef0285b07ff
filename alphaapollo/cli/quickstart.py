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
    """Replace this process with the example's script. Returns exit code 2 if the script is not found."""
    parser = argparse.ArgumentParser(
        prog="alphaapollo quickstart",
        description="Build a task and a tiny model, warm it up with SFT and train it with RL until it visibly learns.",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--out", default="outputs/quickstart", help="folder to write (default outputs/quickstart)")
    options = parser.parse_args(argv)
    folders = (Path.cwd(), Path(__file__).resolve().parents[2])
    source_tree = next((folder for folder in folders if (folder / SCRIPT).is_file()), None)
    if source_tree is None:  # an installed package does not contain examples
        found = f"quickstart needs {SCRIPT}, which is neither in {folders[0]} nor in {folders[1]}."
        fix = "Run it in a clone of the repository, or train on your own data: alphaapollo rl --help."
        return report_error(ValueError(f"{found} {fix}"), 2)
    command = ["bash", str(source_tree / SCRIPT), str(options.seed), str(Path(options.out).resolve())]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.execvpe(command[0], command, os.environ | {"PATH": path})
