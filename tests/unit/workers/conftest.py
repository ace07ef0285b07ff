from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.tiny import save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model -> folder with its config, weights and tokenizer."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder
