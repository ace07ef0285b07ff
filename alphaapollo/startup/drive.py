"""A command's work in its run's folder, once everything is checked: signals, the lock, the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from alphaapollo.config.errors import failed
from alphaapollo.folder_lock import FolderInUseError, lone_driver
from alphaapollo.startup.failures import FAILURES
from alphaapollo.watchdog import end_when_told


def drive(folder: Path, work: Callable[[], None], interrupted: Callable[[], str]) -> int:
    """Work as the folder's only driver. Returns 0 done, 1 failed, 2 another one is at work there, 130 interrupted.

    interrupted: what to tell then, from what the folder holds by then.
    """
    end_when_told()
    try:
        with lone_driver(folder):
            work()
    except FolderInUseError as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        print(f"\n{interrupted()}", file=sys.stderr)
        return 130
    except FAILURES as error:
        return failed(error, 1)
    return 0
