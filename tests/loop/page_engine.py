"""main_ppo with the engine of docs/engines.md instead of hf: FOLDER OVERRIDES...

The folder has the page's code as small_engine.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.engines.factory import ENGINES
from alphaapollo.trainer.main_ppo import main as main_ppo


def main(words: Sequence[str]) -> int:
    folder, *overrides = words
    sys.path.insert(0, folder)
    ENGINES["hf"] = "small_engine:SmallEngine"
    return main_ppo(overrides)
