"""Decorate the `main` of a command, so that the shell and scripts can call it.

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

from alphaapollo.processes.temp_folder import run_in_temp_folder
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c
from alphaapollo.utils.redaction import redact, replace_control_characters


class MainFunction(Protocol):
    """Protocol of a `main` function: takes command-line arguments (None: sys.argv) and returns an exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def entry_point(main: MainFunction) -> MainFunction:
    """Decorate the `main` of a command. In a running event loop (a notebook), the command is refused with exit code 2.

    Processes spawned by multiprocessing import the file of `__main__` again. A script without an
    `if __name__ == "__main__"` would start its run in each of them, so `__file__` is hidden while `main` runs.
    Temporary files are removed at the end (temp_folder.py). SIGINT, SIGTERM and SIGHUP end the command with exit code
    130.
    """

    @wraps(main)
    def run_command_main(argv: Sequence[str] | None = None) -> int:
        if _is_in_event_loop():
            words = shlex.join([sys.executable, "-m", main.__module__, *(argv or [])])
            print(
                "error: a run needs its own event loop, but one is already running in this process (a notebook?). "
                f"Run the command as a separate process: !{words}",
                file=sys.stderr,
            )
            return 2
        script = sys.modules["__main__"].__dict__
        file = script.pop("__file__", None) if script.get("__spec__") is None else None  # `python -m` sets __spec__
        try:
            if sys.excepthook is sys.__excepthook__:
                sys.excepthook = print_redacted_traceback
            with treat_signals_as_ctrl_c():
                return run_in_temp_folder(lambda: main(argv))
        except KeyboardInterrupt:  # commands with a run folder report more (launch/command.py)
            print("\ninterrupted", file=sys.stderr)
            return 130
        finally:
            if file is not None:
                script["__file__"] = file

    return run_command_main


def print_redacted_traceback(error_type: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Print the traceback of an unexpected error with secrets redacted."""
    text = redact("".join(traceback.format_exception(error_type, error, tb)))
    print(replace_control_characters(text), end="", file=sys.stderr)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
