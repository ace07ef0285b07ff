"""Schema of all keys: name, type, default, meaning and rules. Defaults are defined only here.

`commands.py` has the configurations of the commands that train, `generation.py` those of the others; the other files
have their sections. The docstring under a field is its documentation: `alphaapollo explain KEY` and the pages of the
site show it. Rules are declared beside the fields (base.py), or in config/requirements.py. Key names follow verl if the
meaning is the same. This package does not import torch, Ray or Hydra. A class is imported when it is first used,
because grader processes need only the file reward.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alphaapollo.config.schema.algorithm import *  # noqa: F403
    from alphaapollo.config.schema.commands import *  # noqa: F403
    from alphaapollo.config.schema.data import *  # noqa: F403
    from alphaapollo.config.schema.env import *  # noqa: F403
    from alphaapollo.config.schema.generation import *  # noqa: F403
    from alphaapollo.config.schema.model import *  # noqa: F403
    from alphaapollo.config.schema.reward import *  # noqa: F403
    from alphaapollo.config.schema.trainer import *  # noqa: F403

FILES = ("reward", "model", "data", "env", "trainer", "algorithm", "generation", "commands")  # in the order of imports


def __getattr__(name: str) -> Any:
    files = FILES if name[0].isupper() else ()  # only classes are found
    for file in files:
        module = importlib.import_module(f"{__name__}.{file}")
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
