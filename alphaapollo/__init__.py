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
"""Public name -> module that defines it, imported on first use. Plug-ins add names; __init__.pyi has the types."""

# Requests to servers on this machine (judges, reward servers, endpoints of agents) bypass web proxies.
_no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
if "127.0.0.1" not in _no_proxy and _no_proxy != "*":
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{_no_proxy},localhost,127.0.0.1,::1".lstrip(",")

# transformers imports torchao if it is installed. torchao then warns of kernels for other devices and of its enums.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    if name in API:
        return getattr(importlib.import_module(f"alphaapollo.{API[name]}"), name)
    from alphaapollo.utils.plugins import load_plugin

    try:
        plugin_object = None if name.startswith("_") else load_plugin("api", name)
    except ValueError as error:
        raise ImportError(str(error)) from None
    if plugin_object is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return plugin_object
