"""Scripts that CI does not run: each imports, and their helpers find a run's metrics where main_ppo writes them."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from scripts.bench import _whole_run, async_gain
from scripts.chaos.command import Command
from scripts.chaos.scenes import SceneFolders
from scripts.checks import ROOT
from scripts.cluster_check import check_slurm
from scripts.cluster_check import kit as cluster_kit
from scripts.cluster_check.machines import Machine
from scripts.gpu_check import kit as gpu_kit
from scripts.gpu_check import runs as gpu_runs

MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "scripts").rglob("*.py"))
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
# In place of Slurm's srun: runs what follows the Ray command, on this machine.
SRUN = """#!/usr/bin/env bash
case "$*" in
*hostname*) echo 10.0.0.7 ;;
*) while [ "$1" != -- ]; do shift; done; shift; PATH="{folder}:$PATH" "$@" ;;
esac
"""
LINES = [{"step": 1, "critic/score/mean": 0.5}]


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python that scripts start."""
    path = tmp_path / "python" / "python"
    path.parent.mkdir()
    path.write_text(f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -c {shlex.quote(MAIN_PPO)} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


@pytest.mark.parametrize("module", MODULES)
def test_it_imports(module: str) -> None:
    importlib.import_module(module)


def test_gpu_check_reads_the_metrics_of_its_runs(tmp_path: Path, python: Path) -> None:
    assert gpu_runs.train(gpu_kit.Kit("cpu", tmp_path), "one") == LINES


def test_cluster_check_reads_the_metrics_of_its_runs(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = object.__new__(Machine)
    head.name, head.address, head.logs = "node1", "10.77.0.1", tmp_path
    monkeypatch.setattr(Machine, "command", lambda self, *words: list(words))
    assert cluster_kit.Kit(tmp_path).train(head, "one").metrics == LINES


def test_the_slurm_check_reads_the_metrics_of_its_runs(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "logs").mkdir()
    for name, text in (("srun", SRUN.format(folder=python.parent)), ("scontrol", check_slurm.SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    done = check_slurm.sbatch(cluster_kit.Kit(tmp_path), [], tmp_path / "bin", "one")
    assert (done.code, done.metrics) == (0, LINES), done.said


def test_chaos_counts_the_metrics_of_its_runs(tmp_path: Path, python: Path) -> None:
    command = Command(SceneFolders(tmp_path, "local"), "one")
    assert command._process.wait(60) == 0
    assert command.steps == 2


def test_benchmarks_read_the_metrics_of_their_runs(tmp_path: Path, python: Path) -> None:
    keys = {"output_dir": tmp_path, "project_name": "runs", "experiment_name": "one"}
    keys = {f"trainer.{name}": value for name, value in keys.items()}
    assert _whole_run.train(keys, os.environ) == [{"step": 0}, *LINES]


@pytest.mark.parametrize("mode", [None, "carry", "separate"])
def test_async_gain_runs_the_loops(mode: str | None) -> None:
    sizes = Namespace(prompts=2, group=2, slots=4, token_ms=0.001, iterations=2, update_share=0.5)
    samples_per_second, staleness = async_gain.measure(sizes, 0.0, mode, staleness=1)
    assert samples_per_second > 0 and staleness <= 1
