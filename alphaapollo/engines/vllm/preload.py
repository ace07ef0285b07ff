"""Preload module of the fork server. It imports vLLM while the process that started the server continues."""

import atexit
import gc
import importlib
import os

import setproctitle

from alphaapollo.engines.vllm.interpreted import interpret_triton
from alphaapollo.engines.vllm.process import CORE_MODULES, LOG, redirect_output

redirect_output(os.environ[LOG])
interpret_triton()
setproctitle.getproctitle()  # must run before the environment changes, so that children show as VLLM::EngineCore
gc.disable()  # garbage collection takes a quarter of the import time and finds nothing
for module in CORE_MODULES:
    importlib.import_module(module)
gc.freeze()  # children share these objects, and their garbage collection skips them
gc.enable()
atexit.register(os._exit, 0)  # skip the interpreter shutdown, which takes seconds
