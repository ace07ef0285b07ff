"""Processes forked from one parent, the fork server, which has imported large libraries: they start in a tenth of a
second instead of ten.

    this process --- fork server (imports modules once) --- process, process, ...
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import setproctitle

_inherited_modules: frozenset[str] = frozenset()
"""Modules that the fork server had imported when it forked this process; empty: this process was not forked."""


class ForkedProcess(ForkServerProcess):
    """Process forked from the fork server, with the environment variables of the process that creates it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        global _inherited_modules
        _inherited_modules = frozenset(sys.modules)
        setproctitle.getproctitle()  # must run before the environment changes, so that the process can change its title
        os.environ.clear()
        os.environ.update(self._environment)
        self.set_up()
        super().run()

    def set_up(self) -> None:
        """Prepare the new process before its target is called."""


class ForkedContext(ForkServerContext):
    """Multiprocessing context of processes that are forked from the fork server."""

    Process = ForkedProcess


def start_fork_server(preload: str, provided: Sequence[str]) -> None:
    """Start the fork server, which imports the module `preload` in the background with the current environment
    variables.

    provided: modules that `preload` imports. A process whose own fork server has imported them forks its children from
    that server.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if _inherited_modules.issuperset(provided):
        multiprocessing.forkserver.ensure_running = server.ensure_running = lambda: None
        return
    multiprocessing.forkserver.set_forkserver_preload([preload])
    search_path = os.environ.get("PYTHONPATH")  # Python 3.11 does not pass sys.path to the fork server
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    multiprocessing.forkserver.ensure_running()
    if search_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = search_path
