"""The project works from its wheel, installed elsewhere, without the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop.conftest import DEADLINE, ROOT, Runner


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE)
    (wheel,) = (folder / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=DEADLINE)
    return folder / "site"


def run_elsewhere(installed: Path, folder: Path, command: list[str]) -> str:
    """What the command prints, in a folder outside the clone, where the wheel's package is found first."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_package_and_its_presets(installed: Path, tmp_path: Path) -> None:
    where = run_elsewhere(
        installed, tmp_path, [sys.executable, "-c", "import alphaapollo; print(alphaapollo.__file__)"]
    )
    assert where.startswith(str(installed))
    presets = installed / "alphaapollo" / "configs"
    names = {path.relative_to(presets) for path in presets.rglob("*.yaml")}
    assert names == {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}


def test_the_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    command = str(installed / "bin" / "alphaapollo")
    assert "alphaapollo SUBCOMMAND" in run_elsewhere(installed, tmp_path, [command, "--help"])
    refused = subprocess.run(
        [command, "quickstart"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert refused.returncode == 2
    assert "Run it in a clone" in refused.stderr  # a wheel has no examples


def test_the_wheel_explains_keys(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "alphaapollo.config", "explain", "data.train_files"]
    assert run_elsewhere(installed, tmp_path, command).startswith("data.train_files: accepted")


def test_the_wheel_checks_a_whole_run(installed: Path, ppo: Runner, tmp_path: Path) -> None:
    command = [sys.executable, "-m", ppo.module, *ppo.words(["trainer.dry_run=True", "+algorithm=dapo"])]
    assert "dry run" in run_elsewhere(installed, tmp_path, command)
