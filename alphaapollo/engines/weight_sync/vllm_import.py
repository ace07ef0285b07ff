"""Import vLLM without a side effect on torch.compile in this process."""

from __future__ import annotations

import os

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def import_vllm() -> None:
    """Import vLLM, which sets TORCHINDUCTOR_COMPILE_THREADS=1, and restore the variable: with one thread, torch.compile
    takes several times as long."""
    import torch._inductor.config  # reads the variable once  # noqa: F401

    before = os.environ.get(COMPILE_THREADS)
    import vllm  # noqa: F401

    os.environ.pop(COMPILE_THREADS, None)  # not set if vLLM was imported before
    if before is not None:
        os.environ[COMPILE_THREADS] = before
