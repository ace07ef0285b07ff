"""Find and import what extends the core: the plug-ins of this repository (plugins.toml), and installed packages (entry
points of the groups alphaapollo.GROUP), through the same functions. See docs/plugins.md."""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from alphaapollo.utils.user_module import UserObject, format_error

PACKAGE = Path(__file__).resolve().parents[1]
LIST = PACKAGE / "plugins.toml"


@dataclass(frozen=True)
class Plugin:
    """Object that a plug-in or an installed package adds to a group under a name."""

    name: str
    value: str  # where it is, as module:object
    owner: str  # e.g. `the plug-in viewer`, `the package maze-lab 1.0`
    summary: str = ""  # what a command does, if it is known without importing the command
    folder: Path | None = None  # of a plug-in of this repository

    @property
    def is_missing(self) -> bool:
        """Whether the folder of the plug-in has been removed."""
        return self.folder is not None and not (self.folder / "__init__.py").is_file()

    @property
    def missing_error(self) -> str:
        """Error message for the name of a plug-in that is missing."""
        fix = "Install alphaapollo with its plug-ins."
        return f"{self.name} belongs to {self.owner}, and {self.folder} is missing. {fix}"

    def load(self) -> UserObject:
        """Import the object. Raises ValueError with the owner if it is missing or the import fails."""
        if self.is_missing:
            raise ValueError(self.missing_error)
        try:
            return pkgutil.resolve_name(self.value)
        except (Exception, SystemExit) as error:  # the code of a package may raise anything
            fix = "Install what it imports." if self.folder else "Fix, update or uninstall this package."
            raise ValueError(
                f"{self.name} of {self.owner} cannot be imported ({self.value}): {format_error(error)}. {fix}"
            ) from error


@cache
def _read_list() -> dict[str, dict[str, Plugin]]:
    """Read plugins.toml: {group: {name: plug-in}}."""
    groups: dict[str, dict[str, Plugin]] = {}
    for plugin, added_groups in tomllib.loads(LIST.read_text(encoding="utf-8")).items():
        for group, entries in added_groups.items():
            for name, entry in entries.items():
                value, summary = (entry, "") if isinstance(entry, str) else (entry["object"], entry["summary"])
                folder = PACKAGE / "plugins" / plugin
                groups.setdefault(group, {})[name] = Plugin(name, value, f"the plug-in {plugin}", summary, folder)
    return groups


def find_own_plugins(group: str) -> dict[str, Plugin]:
    """Return what plug-ins of this repository add to a group, by name, without reading entry points."""
    return _read_list().get(group, {})


@cache
def _read_entry_points() -> Any:  # its type depends on Python's version
    """Read the entry points of all installed packages, which takes a few hundredths of a second."""
    return entry_points()


@cache
def _list_plugins(group: str) -> list[Plugin]:
    """List the plug-ins of a group, with those of this repository first."""
    packages = [
        Plugin(
            entry.name,
            entry.value.partition("[")[0].strip(),
            f"the package {entry.dist.name} {entry.dist.version}" if entry.dist else "an installed package",
        )
        for entry in _read_entry_points().select(group=f"alphaapollo.{group}")
    ]
    return [*find_own_plugins(group).values(), *packages]


def find_plugins(group: str, built_in: Container[str] = ()) -> dict[str, Plugin]:
    """Return what plug-ins and installed packages add to a group, by name, without importing it. Plug-ins whose folder
    is missing are included: they raise an error with their name when they are loaded.

    Raises ValueError if a name is `built_in`, or used twice."""
    plugins: dict[str, Plugin] = {}
    for plugin in _list_plugins(group):
        other_owner = "alphaapollo" if plugin.name in built_in else ""
        other_owner = plugins[plugin.name].owner if plugin.name in plugins else other_owner
        if other_owner:
            raise ValueError(
                f"{plugin.owner} adds {plugin.name} to alphaapollo.{group}, a name that {other_owner} uses. "
                "Uninstall this package, or rename its entry point."
            )
        plugins[plugin.name] = plugin
    return plugins


def load_plugin(group: str, name: str) -> UserObject:
    """Import the object that is added to a group under a name; None if no plug-in or package adds it. Raises ValueError
    with the owner if the plug-in is missing or the import fails."""
    plugin = find_plugins(group).get(name)
    return None if plugin is None else plugin.load()


def is_available(group: str, name: str) -> bool:
    """Return whether a plug-in or a package adds this name to a group, e.g. the command `view`."""
    plugin = find_plugins(group).get(name)
    return plugin is not None and not plugin.is_missing
