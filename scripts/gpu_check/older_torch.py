"""Use of a torch release that is older than the pinned one, e.g. 2.11 in the image of a lent GPU machine.

python -m scripts.gpu_check.older_torch alphaapollo.trainer.main_ppo key=value ...      # runs a module, adapted
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from typing import Any

PINNED = (2, 13)  # pyproject.toml


def is_older_torch() -> bool:
    import torch

    major, minor, *_ = torch.__version__.split(".")
    return (int(major), int(minor)) < PINNED


def adapt_varlen_attention() -> bool:
    """Drop the argument enable_gqa if this torch's varlen_attn lacks it: older releases take grouped heads without it.
    Returns whether the function was replaced. check_attention compares the result with float64."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return False
    original = module.varlen_attn
    if "enable_gqa" in inspect.signature(original).parameters:
        return False

    def varlen_attn(*tensors: Any, enable_gqa: bool = False, **settings: Any) -> Any:
        return original(*tensors, **settings)

    module.varlen_attn = varlen_attn  # type: ignore[attr-defined]
    return True


if __name__ == "__main__":
    adapt_varlen_attention()
    module_name, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module_name, run_name="__main__", alter_sys=True)
