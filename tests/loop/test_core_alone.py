"""The core works without the plug-ins: in a copy without alphaapollo/plugins and tests/plugins, built and installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop.conftest import DEADLINE, ROOT, Runner

REMOVED = ("alphaapollo/plugins/", "tests/plugins/")
IMPORT_ALL = """
import importlib, pkgutil, alphaapollo
PROGRAMS = ("__main__", "zygote", "sandbox_program", "preload", "vllm.extension", "vllm.patches", "digest_kernel")
for module in pkgutil.walk_packages(alphaapollo.__path__, "alphaapollo."):
    if not module.name.endswith(PROGRAMS):
        importlib.import_module(module.name)
print(alphaapollo.__file__)
"""


COLLECTED = re.compile(r"(\d+) tests collected")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without the plug-ins, whose folder `site` has the installed wheel."""
    folder = tmp_path_factory.mktemp("core")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(REMOVED) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True, timeout=DEADLINE)
    (wheel,) = (folder / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=DEADLINE)
    return folder


def run(core: Path, *command: str, code: int = 0) -> str:
    """Run a command with the installed core. Returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(core / "site")}
    done = subprocess.run(command, cwd=core / "dist", env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def test_every_module_is_imported_and_missing_plugins_are_named(core: Path, ppo: Runner) -> None:
    assert str(core / "site/alphaapollo/__init__.py") in run(core, sys.executable, "-c", IMPORT_ALL)
    alphaapollo = str(core / "site/bin/alphaapollo")
    assert "(the plug-in viewer is missing)" in run(core, alphaapollo, "--help")
    assert "view belongs to the plug-in viewer" in run(core, alphaapollo, "view", code=2)
    words = ppo.words(["trainer.dry_run=True", "+algorithm=dapo"])
    assert "dry run" in run(core, sys.executable, "-m", ppo.module, *words)


def run_tests(core: Path, *words: str) -> str:
    options = ("-q", "--assert=plain", "-p", "no:cacheprovider", "--rootdir", "..", "-c", "../pyproject.toml")
    return run(core, sys.executable, "-m", "pytest", *options, *words)


@pytest.mark.nightly
def test_tests_of_the_core_pass(core: Path) -> None:
    """Those of its commands. That no other needs a plug-in, tests/unit/test_layers.py shows faster."""
    assert " passed" in run_tests(core, "../tests/unit/cli")


@pytest.mark.nightly
def test_all_tests_of_the_core_are_collected(core: Path) -> None:
    collected = COLLECTED.search(run_tests(core, "--collect-only", "../tests"))
    assert collected and int(collected[1]) > 5000
