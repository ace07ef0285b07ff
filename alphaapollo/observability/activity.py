"""Find out what this process is doing, for the console."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from alphaapollo.utils.heartbeat import HEARTBEAT

PACKAGE = __name__.partition(".")[0]


def find_activity() -> str:
    """Return the oldest operation in progress (SPANS) and a detail, e.g. `update: policy 0, policy 1`; empty if none is
    known. The detail is the package that is being imported, else the called workers, else the next operation."""
    calls = HEARTBEAT.list_active_calls()
    names = [call.name.replace("_", " ") for call in sorted(calls, key=lambda call: call.worker != "")]
    details = list(dict.fromkeys(call.worker for call in calls if call.worker)) or names[1:2]
    if package := find_imported_package(sys._current_frames().get(threading.main_thread().ident or 0)):
        details = [f"importing {package}"]
    shown = [*details[:3], *["..."] * (len(details) > 3)]
    return ": ".join(filter(None, [*names[:1], ", ".join(shown)]))


def find_imported_package(frame: FrameType | None) -> str:
    """Return the other package that a thread is importing; empty if there is none. frame: newest frame of the thread.

    Of nested imports, the outermost one is returned: torch, not sympy, which torch imports.
    """
    found = ""
    while frame:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package != PACKAGE and not package.startswith("__"):
            found = package
        frame = frame.f_back
    return found
