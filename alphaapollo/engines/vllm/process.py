"""Processes of a vLLM engine: start method of the core, log redirection, and exit with the parent.

    this process --- fork server (imports vLLM in parallel) --- engine core --- tensor-parallel ranks

On a CPU the core is forked from the fork server, and the ranks from the core, so that vLLM is imported only once, which
takes seconds. On GPUs, vLLM's default start method is used.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import re
import sys
import threading
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from alphaapollo.processes.allocator import keep_freed_memory
from alphaapollo.processes.watchdog import exit_when_process_ends

PARENT = "ALPHAAPOLLO_ENGINE_PARENT"  # pid of the process that owns the engine
CLEANUP = "ALPHAAPOLLO_ENGINE_CLEANUP"  # folders to remove when the owner dies
LOG = "ALPHAAPOLLO_ENGINE_LOG"  # log file of the engine's processes
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)  # last line of a traceback
LOG_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"

PRELOAD_MODULE = "alphaapollo.engines.vllm.preload"
CORE_MODULES = (  # modules that an engine core imports
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "alphaapollo.engines.vllm.patches",
)


def build_process_environment(log_path: str, cleanup_folders: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that `set_up_engine_process` reads in the engine's processes."""
    return {PARENT: str(os.getpid()), CLEANUP: os.pathsep.join(cleanup_folders), LOG: log_path}


class EngineProcess(ForkServerProcess):
    """Process of vLLM's engine, forked from the fork server, with the environment variables of the caller."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        keep_freed_memory()
        set_up_engine_process()
        from tqdm import tqdm  # type: ignore[import-untyped]
        from vllm.v1.executor import multiproc_executor

        tqdm.set_lock(threading.RLock())  # tqdm's default is a named semaphore, which remains after a kill
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        super().run()


class EngineContext(ForkServerContext):
    """Multiprocessing context that starts vLLM's engine core as an EngineProcess."""

    Process = EngineProcess


def start_fork_server() -> EngineContext:
    """Start the fork server, which imports vLLM in the background with the current environment variables."""
    context = EngineContext()
    context.set_forkserver_preload([PRELOAD_MODULE])
    search_path = os.environ.get("PYTHONPATH")  # Python 3.11 does not pass sys.path to the fork server
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    multiprocessing.forkserver.ensure_running()
    if search_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = search_path
    return context


def set_up_engine_process() -> None:
    """Redirect this process's output to the engine's log, and make the process exit when the engine's owner exits.
    Does nothing in the owner's process."""
    if os.getpid() != int(os.environ[PARENT]):
        _set_up_engine_process_once(os.getpid())


@functools.cache  # once per process: the PID is only the key of the cache
def _set_up_engine_process_once(own_pid: int) -> None:
    cleanup = [path for path in os.environ[CLEANUP].split(os.pathsep) if path]
    exit_when_process_ends(int(os.environ[PARENT]), cleanup, remove_shared_memory=True)
    redirect_output_to_file(os.environ[LOG])
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
    """Return the last error of an engine in the last 64 KiB of its log, as ` (last error: ...)`; empty without one."""
    try:
        text = Path(log_path).read_bytes()[-65536:].decode(errors="replace")
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
