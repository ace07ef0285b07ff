"""Reinforcement-learning post-training for language models. See README.md, then docs/architecture.md."""

from __future__ import annotations

import importlib
import logging

from alphaapollo._version import __version__ as __version__

API = ("dpo", "evaluate", "evolve", "rl", "sft")  # imported from api.py on first use; __init__.pyi has their types

# transformers imports torchao if it is installed, which warns of kernels for other devices and of its own enums.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("alphaapollo.api"), name)
