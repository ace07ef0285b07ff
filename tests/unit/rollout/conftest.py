from pathlib import Path

import pytest

from tests.unit.rollout.worker_kit import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and config of a model for the fake engine."""
    return write_model(tmp_path_factory.mktemp("model"))
