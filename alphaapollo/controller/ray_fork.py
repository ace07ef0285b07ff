"""Fork the worker processes of a local Ray from the run's fork server, which has imported their libraries: a worker
starts in a tenth of a second instead of five.

    raylet --- this script (waits) - - -> fork server --- worker process of Ray

Ray's command of a worker is `python setup_worker.py default_worker.py OPTIONS`. This script runs before setup_worker.py
and replaces it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

OWN_OPTIONS = ("--language=", "--serialized-runtime-env-context=")  # of setup_worker.py


def prepend_script(raylet_command: Sequence[str]) -> list[str]:
    """Let a raylet start its workers with this script."""
    start = f"--python_worker_command={sys.executable} "
    return [part.replace(start, f"{start}{__file__} ", 1) for part in raylet_command]


def run_setup_worker(words: Sequence[str]) -> None:
    """Replace this process by Ray's own start of a worker."""
    os.execv(sys.executable, [sys.executable, *words])


def run_default_worker(words: Sequence[str], niceness: int) -> None:
    """Run default_worker.py in this forked process."""
    if "ray" in sys.modules:  # Ray reads the variables of a worker when it is imported
        run_setup_worker(words)
    import ray
    import setproctitle

    ray._raylet.setproctitle = setproctitle.setproctitle  # Ray's own does not find the title of a forked process
    os.setpgrp()  # the raylet kills the process group of a worker that has ended
    os.nice(niceness - os.nice(0))
    sys.argv = [word for word in words[1:] if not word.startswith(OWN_OPTIONS)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(words: Sequence[str]) -> int:
    """Run setup_worker.py with these words, or a forked process in its place. Returns the exit code."""
    from alphaapollo.processes.fork_server import ForkedProcess, use_shared_server

    if not use_shared_server({}):
        run_setup_worker(words)
    process = ForkedProcess(target=run_default_worker, args=(words, os.nice(0)))
    process.start()
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder, whose modules are no top-level modules
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(sys.argv[1:]))
