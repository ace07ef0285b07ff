"""Module that the fork server of worker processes imports at its start, so that forked workers start at once."""

from __future__ import annotations

import atexit
import gc
import importlib
import os

from alphaapollo.controller.process_launcher import WORKER_MODULES
from alphaapollo.utils.imports import pause_gc

with pause_gc():
    for module in WORKER_MODULES:
        importlib.import_module(module)
gc.freeze()  # a collection in a forked worker would copy the memory that it shares with this process
atexit.register(os._exit, 0)  # skip the interpreter shutdown, which takes seconds
