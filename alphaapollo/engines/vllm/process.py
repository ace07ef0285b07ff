"""Processes of a vLLM engine: start method of the core.

    this process --- fork server (imports vLLM in parallel) --- engine core --- tensor-parallel ranks

On a CPU the core is forked from the fork server, and the ranks from the core, so that vLLM is imported only once, which
takes seconds. A command starts the server before its workers (launch/early_imports.py). On GPUs, vLLM's default start
method is used."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from alphaapollo.engines.process import LOG_VARIABLE, set_up_engine_process
from alphaapollo.processes.allocator import keep_freed_memory
from alphaapollo.processes.fork_server import ForkedContext, ForkedProcess, share_fork_server, start_fork_server

PRELOAD_MODULE = "alphaapollo.engines.vllm.preload"
CORE_MODULES = (  # modules that an engine core imports
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "alphaapollo.engines.vllm.patches",
)


class EngineProcess(ForkedProcess):
    """Process of vLLM's engine core."""

    def set_up(self) -> None:
        keep_freed_memory()
        set_up_engine_process()
        from tqdm import tqdm  # type: ignore[import-untyped]
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.executor import multiproc_executor

        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":  # no ranks to stop
            EngineCoreProc.shutdown = lambda self: None  # vLLM's shutdown takes a second to free memory before the end
        tqdm.set_lock(threading.RLock())  # tqdm's default is a named semaphore, which remains after a kill
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


class EngineContext(ForkedContext):
    """Multiprocessing context that starts vLLM's engine core as an EngineProcess."""

    Process = EngineProcess


def start_engine_fork_server(environment: Mapping[str, str]) -> EngineContext:
    """Start the fork server, which imports vLLM in the background, or find the run's shared one. Returns the context
    that forks from it. environment: build_cpu_environment of the engine."""
    start_fork_server(PRELOAD_MODULE, CORE_MODULES, environment)
    return EngineContext()


def share_engine_fork_server(environment: Mapping[str, str], preload: Sequence[str]) -> AbstractContextManager[None]:
    """Context manager that lets the fork server import vLLM, then the modules of `preload`, before the run starts
    (share_fork_server)."""
    return share_fork_server([PRELOAD_MODULE, *preload], CORE_MODULES, {**environment, LOG_VARIABLE: os.devnull})
