"""Module that vLLM's fork server imports at its start: it imports vLLM, so that forked engine cores start at once."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys

from alphaapollo.engines.process import LOG_VARIABLE, redirect_output_to_file
from alphaapollo.engines.vllm.process import CORE_MODULES
from alphaapollo.engines.vllm.settings import register_triton_interpreter
from alphaapollo.utils.imports import pause_gc

UNUSED = ("cv2", "opentelemetry.exporter", "ray", "scipy")  # vLLM's imports for videos, traces, Ray and audio

os.setsid()  # signals to the process group of a command are for its driver, which ends the engines
redirect_output_to_file(os.environ[LOG_VARIABLE])
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # share_fork_server blocks it
register_triton_interpreter()
sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]  # None: importing them fails, as if not installed
with pause_gc():
    for module in CORE_MODULES:
        importlib.import_module(module)
for package in UNUSED:
    del sys.modules[package]
gc.freeze()  # a collection in a forked core would copy the memory that it shares with this process
atexit.register(os._exit, 0)  # skip the interpreter shutdown, which takes seconds
