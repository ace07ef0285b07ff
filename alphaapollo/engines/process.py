"""Processes of an engine: log redirection, exit with the engine's owner, and the error that reports their death."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Sequence

from alphaapollo.engines.types import EngineDied, EngineError, EngineSpec
from alphaapollo.processes.watchdog import exit_when_process_ends

PARENT_VARIABLE = "ALPHAAPOLLO_ENGINE_PARENT"  # pid of the process that owns the engine
CLEANUP_VARIABLE = "ALPHAAPOLLO_ENGINE_CLEANUP"  # folders to remove when the owner dies
LOG_VARIABLE = "ALPHAAPOLLO_ENGINE_LOG"  # log file of the engine's processes
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)  # last line of a traceback
LOG_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


def build_process_environment(log_path: str, cleanup_folders: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that `set_up_engine_process` reads in the engine's processes."""
    cleanup = os.pathsep.join(cleanup_folders)
    return {PARENT_VARIABLE: str(os.getpid()), CLEANUP_VARIABLE: cleanup, LOG_VARIABLE: log_path}


def set_up_engine_process() -> None:
    """Redirect this process's output to the engine's log, and make the process exit when the engine's owner exits.
    Does nothing in the owner's process."""
    if os.getpid() != int(os.environ[PARENT_VARIABLE]):
        _set_up_engine_process_once(os.getpid())


@functools.cache  # once per process: the PID is only the key of the cache
def _set_up_engine_process_once(own_pid: int) -> None:
    cleanup = [path for path in os.environ[CLEANUP_VARIABLE].split(os.pathsep) if path]
    exit_when_process_ends(int(os.environ[PARENT_VARIABLE]), cleanup, remove_shared_memory=True)
    redirect_output_to_file(os.environ[LOG_VARIABLE])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)


def redirect_output_to_file(log_path: str) -> None:
    """Append stdout and stderr of this process, including those of C libraries, to a log file."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def find_last_error(log_path: str) -> str:
    """Return the last error in the last 64 KiB of an engine's log, as ` (last error in its log: ...)`, or ""."""
    try:
        with open(log_path, "rb") as log:
            log.seek(max(0, os.path.getsize(log_path) - 65536))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    errors = [line for line in ERROR_LINE.findall(text) if "EngineDeadError" not in line]
    return f" (last error in its log: {errors[-1][:300]})" if errors else ""


def log_library_to_file(library_name: str, log_path: str) -> None:
    """Write the log messages of a library to a file instead of the console."""
    handler = logging.FileHandler(log_path, delay=True)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    library = logging.getLogger(library_name)
    library.handlers = [handler]
    library.setLevel(logging.INFO)
    library.propagate = False


def make_death_error(spec: EngineSpec) -> EngineDied:
    """Return the error of an engine whose core process died, with the last error in its log."""
    last = find_last_error(spec.log_path)
    return EngineDied(f"{spec.name}: its core process died{last}. See its log: {spec.log_path}")


def make_start_error(spec: EngineSpec, details: str = "", is_killed: bool = False) -> EngineError:
    """Return the error of an engine that does not start, with the last error in its log. is_killed: whether a signal
    killed its core, so that a restart may help."""
    message = f"{spec.name} did not start{find_last_error(spec.log_path)}. See its log {spec.log_path}. {details}"
    return (EngineDied if is_killed else EngineError)(message.strip())
