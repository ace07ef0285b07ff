"""Folders of tiny models, made once per process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model -> folder with its config, weights and tokenizer."""
    from tests.unit.tiny import save_model  # imports torch

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family of a tiny vision-language model -> folder with its config, weights, tokenizer and processor."""
    from tests.vision.models import make

    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make(family, made[family])
        return made[family]

    return folder
