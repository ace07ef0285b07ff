"""Folders of tiny models, made once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model -> folder with its config, weights and tokenizer."""
    from tests.unit.tiny import save_model  # imports torch

    return cache(lambda name: save_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family of a tiny vision-language model -> folder with its config, weights, tokenizer and processor."""
    from tests.vision.models import make

    @cache
    def folder(family: str) -> Path:
        made = tmp_path_factory.mktemp(family)
        make(family, made)
        return made

    return folder
