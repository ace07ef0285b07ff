"""`alphaapollo eval --suite`: where its results are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.cli.serve import find_results_folder
from alphaapollo.runs.run_model import RunModel


@pytest.mark.parametrize(
    ("run", "model", "folder"),
    [
        ("outputs/me/run", "outputs/me/run/model", "outputs/me/run/suites/model"),
        ("/models/Qwen3", "/models/Qwen3", "outputs/suites/Qwen3"),  # a model of no run, which may be read-only
    ],
)
def test_results_are_never_written_into_a_models_folder(run: str, model: str, folder: str) -> None:
    assert find_results_folder(RunModel(Path(run), Path(model))) == Path(folder)
