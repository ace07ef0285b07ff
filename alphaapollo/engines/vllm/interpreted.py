"""Triton's kernels on a machine without GPUs, by triton's own interpreter.

vLLM returns the experts that its routers chose through its second model runner alone, which needs a triton with a CPU
backend; the one on PyPI has none. So vLLM is shown one, and the few kernels of that runner (its inputs, its sampling)
are interpreted: right, and slow. The one for top-k and top-p cannot be: patches.py gives torch's instead.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def is_interpreted() -> bool:
    """Is the engine of this process one that is set up so?"""
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def interpret_triton() -> None:
    """Before vLLM is imported, in every process that does. Raises ValueError where there is no triton."""
    if not is_interpreted():
        return
    try:
        from triton.backends import backends  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(f"rollout.router_replay=true without a GPU needs triton: {error}. Leave it out.") from error
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))
