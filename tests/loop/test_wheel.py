"""The project works from its wheel, installed elsewhere, without the clone."""

from __future__ import annotations

import os
import re
import shutil
import signal
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


INSTALL = """
source scripts/pip_settings.sh
python3 -m venv "$1/.venv"
install() { .venv/bin/python -m uv pip install --quiet --python "$1/.venv/bin/python" --no-deps "${@:2}"; }
install "$1" -r requirements/cpu.txt
make -o setup-dev wheel && install "$1" dist/*.whl
site=$("$1/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp scripts/torchvision_cpu.py "$site" && echo "import torchvision_cpu" >"$site/torchvision_cpu.pth"
"""


@pytest.mark.nightly
def test_the_quickstart_runs_in_an_empty_environment(tmp_path: Path) -> None:
    """The output of `make wheel` beside the pinned packages, which are downloaded. The quickstart starts to learn."""
    clone, place = tmp_path / "clone", tmp_path / "place"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    shutil.copytree(clone / "examples", place / "examples")
    subprocess.run(["bash", "-euo", "pipefail", "-c", INSTALL, "install", str(place)], cwd=clone, check=True)
    environment = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    command = ["bash", "examples/quickstart/run.sh", "0", "out"]
    with subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as quickstart:
        losses: list[float] = []
        assert quickstart.stdout is not None
        for line in quickstart.stdout:
            losses += [float(loss) for loss in re.findall(r"^step .* loss (\S+)", line)]
            if len(losses) == 3:
                break
        os.killpg(quickstart.pid, signal.SIGKILL)
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
