"""Run vLLM's Triton kernels on a CPU through Triton's interpreter.

vLLM returns routed experts only through its V2 model runner, which needs Triton. The released Triton has no CPU
backend, so this module registers one that interprets the few kernels of that runner, slowly. The kernel for top-k and
top-p cannot be interpreted; patches.py replaces it by PyTorch code.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def is_triton_interpreted() -> bool:
    """Return whether vLLM in this process runs Triton kernels through Triton's interpreter."""
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def register_triton_interpreter() -> None:
    """If Triton kernels are interpreted here, register a CPU backend in Triton. Call before vLLM is imported. Raises
    ValueError if triton is not installed."""
    if not is_triton_interpreted():
        return
    try:
        from triton.backends import backends  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(
            f"rollout.router_replay=true needs the package triton, also without a GPU ({error}). Install triton, or "
            "set rollout.router_replay=false."
        ) from error
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))
