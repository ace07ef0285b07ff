"""The processes of a vLLM engine: how its core is started, where its log goes, and that it never outlives us.

    this process --- fork server (imports vLLM while we import it too) --- engine core --- tensor-parallel ranks

The core is forked from the fork server and the ranks from the core, so vLLM is not imported again. Only on a CPU: there
vLLM would spawn, and each import takes seconds. On GPUs vLLM's own way stays.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from alphaapollo.utils.watchdog import die_with

PARENT = "ALPHAAPOLLO_ENGINE_PARENT"  # pid of the process that the engine works for
CLEANUP = "ALPHAAPOLLO_ENGINE_CLEANUP"  # what to remove when that one dies
LOG = "ALPHAAPOLLO_ENGINE_LOG"  # where the engine's processes write
LOG_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"

PRELOADED = "alphaapollo.engines.vllm.preload"
CORE_MODULES = (  # what an engine core imports
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "alphaapollo.engines.vllm.patches",
)


def process_environment(log_path: str, cleanup: Sequence[str]) -> dict[str, str]:
    """What `enter_engine_process` reads on the other side."""
    return {PARENT: str(os.getpid()), CLEANUP: os.pathsep.join(cleanup), LOG: log_path}


class EngineProcess(ForkServerProcess):
    """A process with our environment of the moment (a fork server's children have the one it was started with)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environment)
        enter_engine_process()
        from tqdm import tqdm  # type: ignore[import-untyped]
        from vllm.v1.executor import multiproc_executor

        tqdm.set_lock(threading.RLock())  # its own would be a named semaphore, which a kill leaves behind
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        super().run()


class EngineContext(ForkServerContext):
    """Stands for what `vllm.utils.system_utils.get_mp_context` returns."""

    Process = EngineProcess


def start_fork_server() -> EngineContext:
    """Start the fork server, which goes on importing vLLM by itself. Environment variables must stand."""
    context = EngineContext()
    context.set_forkserver_preload([PRELOADED])
    search_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # Python 3.11 does not hand it on
    multiprocessing.forkserver.ensure_running()
    if search_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = search_path
    return context


def enter_engine_process() -> None:
    """First thing in every process of an engine: die with the parent, and write to the engine's log."""
    if os.getpid() != int(os.environ[PARENT]):
        _enter(os.getpid())


@functools.cache  # once a process; a forked one has a pid of its own
def _enter(pid: int) -> None:
    cleanup = [path for path in os.environ[CLEANUP].split(os.pathsep) if path]
    die_with(int(os.environ[PARENT]), cleanup, own_shared_memory=True)
    redirect_output(os.environ[LOG])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)


def redirect_output(path: str) -> None:
    """Everything that this process and its libraries print goes to the end of `path`."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def log_to_file(name: str, path: str) -> None:
    """A library's log goes to the end of `path` and nowhere else."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    library = logging.getLogger(name)
    library.handlers = [handler]
    library.setLevel(logging.INFO)
    library.propagate = False
