"""Modules of examples import, and examples with seeds have a script and a configuration."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from examples.seeds import EXAMPLES, command

ROOT = Path(__file__).parents[3] / "examples"

EXTRAS = ("reasoning_gym",)  # examples that need an extra of the project
FILES = [path for name in ("__main__", "compare", "make_task", "task", "teacher") for path in ROOT.glob(f"*/{name}.py")]


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent.name not in EXTRAS], ids=lambda path: path.parent.name
)
def test_it_imports(path: Path) -> None:
    importlib.import_module(f"examples.{path.parent.name}.{path.stem}")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_with_seeds_has_a_run_script(name: str) -> None:
    words = command(name, 0, "out").split()
    script = next(ROOT.parent / word for word in words if word.startswith("examples/"))
    folder = ROOT / words[1] if script.name == "small_run.sh" else script.parent
    assert os.access(script, os.X_OK) and (folder / f"{EXAMPLES[name].experiment}.yaml").exists()
