"""What the fork server imports, while the process that started it imports the same; nobody else imports this file."""

import atexit
import gc
import importlib
import os

import setproctitle

from alphaapollo.engines.vllm.interpreted import interpret_triton
from alphaapollo.engines.vllm.process import CORE_MODULES, LOG, redirect_output

redirect_output(os.environ[LOG])
interpret_triton()
setproctitle.getproctitle()  # finds where titles go while it still can, so that the children show as VLLM::EngineCore
gc.disable()  # imports make no garbage, and looking for it is a quarter of their time
for module in CORE_MODULES:
    importlib.import_module(module)
gc.freeze()  # the children share these modules, and need not look through them either
gc.enable()
atexit.register(os._exit, 0)  # taking all those modules down in order takes seconds
