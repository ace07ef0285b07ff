"""`alphaapollo quickstart`: what `make quickstart` does after installing."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.config.errors import report_error

SCRIPT = Path("examples") / "quickstart" / "run.sh"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example's script. Returns its exit code; 2: there is no source tree."""
    parser = argparse.ArgumentParser(
        prog="alphaapollo quickstart",
        description="Makes a task and a tiny model, warms it up with SFT, trains it with RL until it visibly learns.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    parser.add_argument("--out", default="outputs/quickstart", help="folder to write (default outputs/quickstart)")
    options = parser.parse_args(argv)
    try:
        tree = source_tree(Path.cwd(), Path(__file__).resolve().parents[2])
    except ValueError as error:
        return report_error(error, 2)
    command = ["bash", str(tree / SCRIPT), str(options.seed), str(Path(options.out).resolve())]
    ours = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    process = subprocess.Popen(command, env=os.environ | {"PATH": ours})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # it has been told, too, and ends by itself
            continue


def source_tree(*folders: Path) -> Path:
    """The first folder that holds the example. ValueError: none; an installed package has no examples."""
    for folder in folders:
        if (folder / SCRIPT).is_file():
            return folder
    raise ValueError(
        f"quickstart needs the source tree, which holds {SCRIPT}; looked in {', '.join(map(str, folders))}. Clone the "
        "repository and run it there; or begin with data of your own: alphaapollo rl --help."
    )
