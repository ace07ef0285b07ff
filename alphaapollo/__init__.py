"""Reinforcement-learning post-training for language models. See README.md, then docs/architecture.md."""

from __future__ import annotations

import importlib
import logging
import os

from alphaapollo._version import __version__ as __version__

API = {
    **dict.fromkeys(("dpo", "evaluate", "rl", "sft"), "api"),
    "Trainer": "own_loop.trainer",
    "make_row": "own_loop.rows",
}
"""Name -> module from which it is imported on first use, beside the names of plug-ins; __init__.pyi has the types."""

# Servers of this machine (judges, reward servers, endpoints of agents) are not requested through a web proxy.
_direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
if "127.0.0.1" not in _direct and _direct != "*":
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{_direct},localhost,127.0.0.1,::1".lstrip(",")

# transformers imports torchao if it is installed, which warns of kernels for other devices and of its own enums.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    if name in API:
        return getattr(importlib.import_module(f"alphaapollo.{API[name]}"), name)
    from alphaapollo.utils.plugins import load_plugin

    try:
        added = None if name.startswith("_") else load_plugin("api", name)
    except ValueError as error:
        raise ImportError(str(error)) from None
    if added is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return added
