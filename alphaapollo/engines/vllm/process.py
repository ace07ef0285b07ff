"""Processes of a vLLM engine: start method of the core.

    this process --- fork server (imports vLLM in parallel) --- engine core --- tensor-parallel ranks

On a CPU the core is forked from the fork server, and the ranks from the core, so that vLLM is imported only once, which
takes seconds. On GPUs, vLLM's default start method is used.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import threading
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from alphaapollo.engines.process import set_up_engine_process
from alphaapollo.processes.allocator import keep_freed_memory

PRELOAD_MODULE = "alphaapollo.engines.vllm.preload"
CORE_MODULES = (  # modules that an engine core imports
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "alphaapollo.engines.vllm.patches",
)


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
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.executor import multiproc_executor

        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":  # no ranks to stop
            EngineCoreProc.shutdown = lambda self: None  # frees memory for a second, although this process ends
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
