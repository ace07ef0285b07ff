"""Who calls a command's `main`: the shell, a script, or a notebook.

from alphaapollo.trainer.main_ppo import main
main(["algorithm.adv_estimator=grpo", ...])  # in a script: no `if __name__ == "__main__":` is needed
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import traceback
from collections.abc import Sequence
from functools import wraps
from types import TracebackType
from typing import Protocol

from alphaapollo.utils.redaction import redacted
from alphaapollo.utils.temp_folder import in_own_folder
from alphaapollo.utils.watchdog import ends_when_told


class Main(Protocol):
    """Takes the command line's words (None: those of this process), and returns an exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def command(main: Main) -> Main:
    """A `main` that can be called from anywhere but a running event loop, which it refuses (exit code 2).

    Processes that Python's multiprocessing spawns import the file of `__main__` anew. A script without a guard would
    start its run again in each of them, so the file is out of sight while `main` runs: nothing of ours needs it. What
    it and its libraries put into the temporary folder goes with it (temp_folder.py). SIGINT, SIGTERM
    and SIGHUP end it with 130.
    """

    @wraps(main)
    def called(argv: Sequence[str] | None = None) -> int:
        if _in_event_loop():
            words = shlex.join([sys.executable, "-m", main.__module__, *(argv or [])])
            print(
                "error: an event loop is running here (a notebook?), and a run needs one of its own. Run it as a "
                f"process: !{words}",
                file=sys.stderr,
            )
            return 2
        script = sys.modules["__main__"].__dict__
        file = script.pop("__file__", None) if script.get("__spec__") is None else None  # with a spec it was -m
        try:
            if sys.excepthook is sys.__excepthook__:
                sys.excepthook = print_without_secrets
            with ends_when_told():
                return in_own_folder(lambda: main(argv))
        except KeyboardInterrupt:  # what works in a run's folder says more (launch/run_command.py)
            print("\ninterrupted", file=sys.stderr)
            return 130
        finally:
            if file is not None:
                script["__file__"] = file

    return called


def print_without_secrets(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """A bug's traceback, with the names of environment variables in place of their values."""
    print(redacted("".join(traceback.format_exception(kind, error, at))), end="", file=sys.stderr)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
