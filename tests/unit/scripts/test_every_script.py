"""Scripts that CI does not run: each imports, and their helpers find a run's metrics where main_ppo writes them."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from pathlib import Path

import pytest

from scripts import scaling
from scripts.bench import _whole_run
from scripts.chaos.command import Command
from scripts.chaos.scenes import SceneFolders
from scripts.checks import ROOT
from scripts.cluster_check import kit as cluster_kit
from scripts.cluster_check.machines import Machine
from scripts.gpu_check import kit as gpu_kit
from scripts.gpu_check import runs as gpu_runs
from tests.page_commands import HAS_PLUGINS
from tests.unit.scripts.test_shell_scripts import write_programs

SCRIPTS = [
    path
    for path in (ROOT / "scripts").rglob("*.py")
    if HAS_PLUGINS or "alphaapollo.plugins." not in path.read_text(encoding="utf-8")
]
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SCRIPTS)
# In place of main_ppo: writes two lines of metrics into the run's folder.
MAIN_PPO = """
import sys
from pathlib import Path

given = dict(word.split("=", 1) for word in sys.argv if word.startswith("trainer."))
project = given.get("trainer.project_name", "alphaapollo")
folder = Path(given["trainer.output_dir"], project, given["trainer.experiment_name"])
folder.mkdir(parents=True)
(folder / "metrics.jsonl").write_text('{"step": 0}\\n{"step": 1, "critic/score/mean": 0.5}\\n')
"""
LINES = [{"step": 1, "critic/score/mean": 0.5}]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the Python that scripts start."""
    program = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(MAIN_PPO)} "$@"\n'
    folder = write_programs(tmp_path / "python", {"python": program})
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_it_imports(module: str) -> None:
    importlib.import_module(module)


def test_checks_and_benchmarks_read_the_metrics_of_their_runs(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gpu", "cluster", "bench", "chaos"):
        (tmp_path / name).mkdir()
    assert gpu_runs.train(gpu_kit.Kit("cpu", tmp_path / "gpu"), "one") == LINES
    head = object.__new__(Machine)
    head.name, head.address, head.logs = "node1", "10.77.0.1", tmp_path
    monkeypatch.setattr(Machine, "command", lambda self, *words: list(words))
    assert cluster_kit.Kit(tmp_path / "cluster").train(head, "one").metrics == LINES
    keys = {"output_dir": tmp_path / "bench", "project_name": "runs", "experiment_name": "one"}
    found = _whole_run.train({f"trainer.{name}": value for name, value in keys.items()}, os.environ)
    assert found == [{"step": 0}, *LINES]
    command = Command(SceneFolders(tmp_path / "chaos", "local"), "one")
    assert command._process.wait(60) == 0
    assert command.steps == 2


def test_the_page_about_scaling_agrees_with_the_memory_plan() -> None:
    text = scaling.PAGE.read_text()
    assert scaling.page(text) == text, "run scripts/scaling.py"
