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


def test_the_wheel_works_outside_the_clone(installed: Path, ppo: Runner, tmp_path: Path) -> None:
    """Its package is found first, has the presets, explains keys and checks a complete run."""
    alphaapollo = str(installed / "bin" / "alphaapollo")

    def run(*command: str, code: int = 0) -> str:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    where = run(sys.executable, "-c", "import alphaapollo; print(alphaapollo.__file__)")
    assert where.startswith(str(installed))
    presets = installed / "alphaapollo" / "configs"
    names = {path.relative_to(presets) for path in presets.rglob("*.yaml")}
    assert names == {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert "Run it in a clone" in run(alphaapollo, "quickstart", code=2)  # a wheel has no examples
    assert run(alphaapollo, "explain", "data.train_files").startswith("data.train_files: accepted")
    words = ppo.words(["trainer.dry_run=True", "+algorithm=dapo"])
    assert "dry run" in run(sys.executable, "-m", ppo.module, *words)
