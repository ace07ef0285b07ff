"""Module that vLLM's fork server imports at its start: it imports vLLM, so that forked engine cores start at once."""

from __future__ import annotations

import atexit
import importlib
import os

import setproctitle

from alphaapollo.engines.vllm.process import CORE_MODULES, LOG, redirect_output_to_file
from alphaapollo.engines.vllm.settings import register_triton_interpreter

redirect_output_to_file(os.environ[LOG])
register_triton_interpreter()
setproctitle.getproctitle()  # must run before the environment changes, so that children show as VLLM::EngineCore
for module in CORE_MODULES:
    importlib.import_module(module)
atexit.register(os._exit, 0)  # skip the interpreter shutdown, which takes seconds
