"""Sections that installed packages add to `env`, `reward` and `rollout` (docs/plugins.md): env.plugins.maze has the
settings of the environment `maze` of a package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, GetCoreSchemaHandler, PlainValidator, SerializeAsAny, ValidationInfo, create_model

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema.base import Section
from alphaapollo.utils.plugins import find_own_plugins, find_plugins
from alphaapollo.utils.registry import suggest_similar

Sections = dict[str, SerializeAsAny[Section]]
GROUPS = {"env": ("environments", "tool_sources"), "reward": ("rewards",), "rollout": ("engines",)}
"""{start of a section's name: groups with the object that the section is for}, e.g. env.maze: the environment maze."""


@dataclass(frozen=True)
class PluginSections:
    """Marker in `Annotated`: the field is a map of sections of packages, declared as entry points `PARENT.NAME` of the
    group alphaapollo.sections. It always has the sections of the objects that the configuration selects."""

    parent: str  # env, reward or rollout
    selected_by: str  # field before this one, with the name, or a map of names, that the configuration selects
    default: str = ""  # name of the built-in object that is selected by default

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> Any:
        return PlainValidator(self.build_sections).__get_pydantic_core_schema__(source, handler)

    def build_sections(self, given: object, info: ValidationInfo) -> dict[str, Section]:
        """Convert the given sections to objects of their classes, and add the sections of selected objects."""
        if not isinstance(given, dict):
            raise ValueError("expected a map of the sections of installed packages by name.")
        selected = info.data.get(self.selected_by, ())
        names = [selected] if isinstance(selected, str) else [*selected]
        values = given | {
            name: {} for name in names if name not in (*given, self.default) and find_section_class(self.parent, name)
        }
        sections, errors = {}, list[str]()
        for name, section in values.items():
            try:
                is_built = isinstance(section, Section)
                sections[name] = section if is_built else self._build_section(name, section, info.context)
            except ConfigError as error:
                errors += [line if line.startswith(f"{name}:") else f"{name}.{line}" for line in error.errors]
        if errors:
            raise ConfigError(errors)
        return sections

    def _build_section(self, name: str, values: object, context: Mapping[str, Any] | None) -> Section:
        """Convert a section to an object of its class, with the function `build` of the context (build_config)."""
        if (schema := find_section_class(self.parent, name)) is None:
            raise ConfigError(
                f"{name}: no installed package has the section {self.parent}.{name}. Install the package."
            )
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: expected a section with the keys {', '.join(schema.model_fields)}.")
        section: Section = context["build"](schema, dict(values)) if context else schema.model_validate(values)
        return section


def make_name_check(kind: str, group: str, built_in: Sequence[str]) -> AfterValidator:
    """Return a validator that accepts the built-in names, and the names that plug-ins and packages add to a group.
    kind: e.g. engine, for the message."""

    def check(name: str) -> str:
        known = built_in if name in built_in else (*built_in, *find_plugins(group, built_in))
        if name not in known:
            raise ValueError(f"unknown {kind} {name}.{suggest_similar(name, known)} Use one of {', '.join(known)}.")
        return name

    return AfterValidator(check)


def add_plugin_sections(parent: str, make_marker: Callable[[str], object]) -> Callable[[type[Section]], type[Section]]:
    """Return a class decorator that adds the sections of this repository's plug-ins as fields, e.g. env.harbor. The
    marker of a field is made from its name."""

    def decorate(section: type[Section]) -> type[Section]:
        fields = dict[str, Any]()
        for key, plugin in find_own_plugins("sections").items():
            section_parent, _, name = key.partition(".")
            if section_parent == parent and not plugin.is_missing:
                schema = plugin.load()
                fields[name] = (Annotated[schema, make_marker(name)], schema())
        return create_model(section.__name__, __base__=section, __module__=section.__module__, **fields)

    return decorate


def describe_missing_section(key: str) -> str:
    """Return an error message if a key belongs to a section or a command of a plug-in that is missing, else ""."""
    for plugin in (*find_own_plugins("sections").values(), *find_own_plugins("configs").values()):
        if plugin.is_missing and f".{plugin.name}." in f".{key}.":
            return plugin.missing_error
    return ""


def find_section_class(parent: str, name: str) -> type[Section] | None:
    """Import the class of a package's section; None if no package has it. Raises ConfigError if it cannot be used."""
    try:
        plugin = find_plugins("sections").get(f"{parent}.{name}")
        schema = plugin.load() if plugin and not plugin.folder else None
        has_owner = schema is None or any(name in find_plugins(group) for group in GROUPS[parent])
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not has_owner:
        groups = " or ".join(f"alphaapollo.{group}" for group in GROUPS[parent])
        raise ConfigError(f"{name}: no package has an entry point {name} in {groups}.")
    if schema is not None and not (isinstance(schema, type) and issubclass(schema, Section)):
        raise ConfigError(f"{name}: {schema!r} is not a subclass of alphaapollo.config.schema.base.Section.")
    return schema
