"""Reports of examples: their modules import, and examples with seeds have a script and a configuration."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from examples.seeds import EXAMPLES


@pytest.mark.parametrize("module", ["examples.gallery.__main__", "examples.curriculum.compare"])
def test_it_imports(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_with_seeds_has_a_run_script(name: str) -> None:
    folder = Path("examples", (EXAMPLES[name].command or (name,))[0])
    assert (folder / "run.sh").exists() and (folder / f"{EXAMPLES[name].experiment}.yaml").exists()
