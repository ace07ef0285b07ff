"""Run vLLM's Triton kernels on a CPU through Triton's interpreter.

vLLM returns routed experts only through its V2 model runner, which needs a Triton with a CPU backend; the released
package has none. This module therefore registers a CPU backend that interprets the few kernels of that runner (inputs,
sampling): correct but slow. The kernel for top-k and top-p cannot be interpreted; patches.py uses PyTorch's instead.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def is_interpreted() -> bool:
    """Return whether the engine of this process interprets Triton kernels."""
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def interpret_triton() -> None:
    """Register Triton's CPU backend. Call before vLLM is imported. Raises ValueError if triton is not installed."""
    if not is_interpreted():
        return
    try:
        from triton.backends import backends  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(
            f"rollout.router_replay=true needs triton on a machine without GPUs: {error}. Install it or remove the key."
        ) from error
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))
