"""Reinforcement-learning post-training for language models. See README.md, then docs/architecture.md."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

API = ("dpo", "evaluate", "evolve", "rl", "sft")  # imported from cli/api.py on first use; __init__.pyi has their types


def __getattr__(name: str) -> object:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("alphaapollo.cli.api"), name)
