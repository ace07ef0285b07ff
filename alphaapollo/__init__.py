"""Reinforcement-learning post-training for language models: see README.md, then docs/architecture.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alphaapollo.cli.api import dpo as dpo
    from alphaapollo.cli.api import evaluate as evaluate
    from alphaapollo.cli.api import evolve as evolve
    from alphaapollo.cli.api import rl as rl
    from alphaapollo.cli.api import sft as sft

__version__ = "0.1.0"

API = ("dpo", "evaluate", "evolve", "rl", "sft")  # functions of cli/api.py, imported on first use


def __getattr__(name: str) -> object:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("alphaapollo.cli.api"), name)
