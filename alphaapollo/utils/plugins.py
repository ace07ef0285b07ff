"""Find and import what installed packages add to this project: entry points of the groups alphaapollo.GROUP
(docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, Literal

from alphaapollo.utils.user_module import format_error

Group = Literal["commands", "engines", "environments", "rewards", "sandboxes", "sections"]


@cache
def _read_entry_points() -> Any:  # its type depends on Python's version
    """Read the entry points of all installed packages, which takes a few hundredths of a second."""
    return entry_points()


@cache
def _select(group: Group) -> EntryPoints:
    selected: EntryPoints = _read_entry_points().select(group=f"alphaapollo.{group}")
    return selected


def find_plugins(group: Group, built_in: Container[str] = ()) -> dict[str, EntryPoint]:
    """Return what installed packages add to a group, by name, without importing it.

    Raises ValueError if a name is `built_in`, or if two packages use it."""
    plugins: dict[str, EntryPoint] = {}
    for entry in _select(group):
        owner = "alphaapollo" if entry.name in built_in else ""
        owner = describe_package(plugins[entry.name]) if entry.name in plugins else owner
        if owner:
            raise ValueError(
                f"{describe_package(entry)} adds {entry.name} to alphaapollo.{group}, a name that {owner} uses. "
                "Uninstall this package, or rename its entry point."
            )
        plugins[entry.name] = entry
    return plugins


def load_plugin(group: Group, name: str) -> Any:
    """Import the object that a package adds to a group under a name; None if no package adds it. Raises ValueError
    with the package's name if the import fails."""
    if (entry := find_plugins(group).get(name)) is None:
        return None
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # the package's code may raise anything
        raise ValueError(
            f"{name} of {describe_package(entry)} cannot be imported ({entry.value}): {format_error(error)}. "
            "Fix, update or uninstall this package."
        ) from error


def describe_package(entry: EntryPoint) -> str:
    """Return the package of an entry point, e.g. `the package maze-lab 1.0`."""
    return f"the package {entry.dist.name} {entry.dist.version}" if entry.dist else "an installed package"
