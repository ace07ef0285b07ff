"""List the configuration keys that a command accepts, with type, default and meaning, as declared in the schema."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Config, DpoConfig, EvalConfig, ExportConfig, GenerationConfig, RmConfig, SftConfig
from alphaapollo.config.schema.base import ActiveWhen, ResumeRule, Section
from alphaapollo.config.schema.plugins import PluginSections, describe_missing_section, find_section_class
from alphaapollo.utils.json_types import Json, JsonObject, to_json_value
from alphaapollo.utils.plugins import find_own_plugins, find_plugins, is_available, load_plugin

ConfigT = TypeVar("ConfigT", bound=BaseModel)
MarkerT = TypeVar("MarkerT")
SchemaClass = type[BaseModel]
Settings = Mapping[str, object] | str | Path | None
"""Settings that a user passes in Python: keys and values, or the path of a YAML file."""

VERL_GROUP_SIZE = "actor_rollout_ref.rollout.n"
"""verl's name of env.rollout.n. Both names are accepted. If one of them is 1, the default, the other one counts."""

CORE_COMMANDS: dict[str, type[BaseModel]] = {
    "main_ppo": Config,
    "main_sft": SftConfig,
    "main_dpo": DpoConfig,
    "main_rm": RmConfig,
    "main_generation": GenerationConfig,
    "main_eval": EvalConfig,
    "main_export": ExportConfig,
}


class CommandConfigs(Mapping[str, type[BaseModel]]):
    """Configuration classes by command: classes of the core, then classes that plug-ins and packages add to the group
    alphaapollo.configs. An added class is imported when it is looked up."""

    def __getitem__(self, command: str) -> type[BaseModel]:
        if command in CORE_COMMANDS:
            return CORE_COMMANDS[command]
        if not is_available("configs", command):
            raise KeyError(command)
        schema: type[BaseModel] = load_plugin("configs", command)
        return schema

    def __iter__(self) -> Iterator[str]:
        yield from CORE_COMMANDS
        yield from (name for name, plugin in find_plugins("configs", CORE_COMMANDS).items() if not plugin.is_missing)

    def __len__(self) -> int:
        return sum(1 for _ in self)


COMMANDS = CommandConfigs()


@dataclass(frozen=True)
class Key:
    """Configuration key, e.g. `Key("trainer.seed", "integer", 0, "Seed of everything random: ...")`."""

    name: str
    type: str
    default: object
    meaning: str
    declared_by: SchemaClass = BaseModel
    """Schema class that declares the field: the class of the section, or one of its base classes."""
    markers: tuple[tuple[str, object], ...] = ()
    """Markers such as ActiveWhen of the field and of its enclosing sections, outermost first. Each comes with the
    prefix of the section that declares it, e.g. `algorithm.`"""


def get_field_markers(key: Key, marker_class: type[MarkerT]) -> list[tuple[str, MarkerT]]:
    """Return the key's markers of one class, e.g. ActiveWhen, each with the prefix of the section that declares it."""
    return [(section, marker) for section, marker in key.markers if isinstance(marker, marker_class)]


@cache
def list_keys(schema: type[BaseModel]) -> dict[str, Key]:
    """Return every key of the schema by its dotted name, in the order of the schema."""
    return {key.name: key for key in _list_section_keys(schema(), "")}


def find_key_rule(rules: Mapping[str, MarkerT], key: Key) -> MarkerT | None:
    """Look up the rule of a key by its name, else by its innermost section that has a rule, else by ""."""
    parts = key.name.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((rules[name] for name in names if name in rules), None)


@cache
def list_sections(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Return the names of the keys and sections directly in each section: {"critic": ["ppo_epochs", ...], ...}."""
    children: dict[str, list[str]] = {}
    for name in list_keys(schema):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            children.setdefault(".".join(parts[:depth]), []).append(parts[depth])
    return {section: list(dict.fromkeys(names)) for section, names in children.items()}


@cache
def list_keys_of_map_type(schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys whose value is a map from names chosen by the user: `models`, `reward.components`, ..."""
    return tuple(key.name for key in list_keys(schema).values() if key.type.startswith("map of"))


def find_map_key_of_entry(entry_key: str, schema: type[BaseModel]) -> str | None:
    """Return the map that an entry belongs to: `reward.components` for `reward.components.format`; None = no map."""
    return next((key for key in list_keys_of_map_type(schema) if entry_key.startswith(f"{key}.")), None)


@cache
def list_plugin_maps(schema: type[BaseModel]) -> dict[str, str]:
    """Return {map of the sections of packages: first part of their registered names}: {"env.plugins": "env", ...}."""
    keys = list_keys(schema).values()
    return {key.name: marker.parent for key in keys for _, marker in get_field_markers(key, PluginSections)}


def find_plugin_key(name: str, schema: type[BaseModel]) -> str:
    """Return the key that a name stands for: env.plugins.maze.size for env.maze.size of a package, and
    env.harbor.backend for env.plugins.harbor.backend of a plug-in. Other names are returned as they are."""
    for map_key, parent in list_plugin_maps(schema).items():
        outer = map_key.rpartition(".")[0]
        if name.startswith(f"{outer}."):
            key = name.removeprefix(f"{map_key}.").removeprefix(f"{outer}.")
            section = key.partition(".")[0]
            if f"{parent}.{section}" in find_own_plugins("sections"):
                return f"{outer}.{key}"
            is_core_section = section in list_sections(schema)[outer]
            is_package = not is_core_section and f"{parent}.{section}" in find_plugins("sections")
            return f"{map_key}.{key}" if is_package else name
    return name


def move_plugin_sections(values: JsonObject, schema: type[BaseModel]) -> None:
    """Move the sections of plug-ins and packages in nested values to the keys that they stand for, in place. Sections
    of missing plug-ins are dropped, because nothing reads them."""
    for map_key in list_plugin_maps(schema):
        for outer in (map_key.rpartition(".")[0], map_key):
            section = find_nested_map(values, outer)
            for name in [*section]:
                if describe_missing_section(f"{outer}.{name}"):
                    del section[name]
                elif (new := find_plugin_key(f"{outer}.{name}", schema)) != f"{outer}.{name}":
                    merge_maps(values, nest_value(new, section.pop(name)))


def list_plugin_keys(name: str, schema: type[BaseModel]) -> dict[str, Key]:
    """Return the keys of the package's section that the key `name` belongs to, e.g. all keys of env.plugins.maze for
    env.plugins.maze.size; empty if it belongs to none."""
    for map_key, parent in list_plugin_maps(schema).items():
        section = name.removeprefix(f"{map_key}.").partition(".")[0]
        if name.startswith(f"{map_key}.") and (found := find_section_class(parent, section)) is not None:
            return {key.name: key for key in _list_section_keys(found.model_construct(), f"{map_key}.{section}.")}
    return {}


def _list_section_keys(
    section: BaseModel, prefix: str, outer_markers: tuple[tuple[str, object], ...] = ()
) -> Iterable[Key]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name, None)
        markers = (*outer_markers, *((prefix, marker) for marker in field.metadata))
        if isinstance(value, BaseModel):
            yield from _list_section_keys(value, f"{prefix}{name}.", markers)
        else:
            meaning = " ".join((field.description or "").split())
            owner = next(cls for cls in type(section).__mro__ if name in get_annotations(cls))
            yield Key(prefix + name, describe_type(field.annotation, field.metadata), value, meaning, owner, markers)


def describe_type(annotation: object, metadata: Iterable[object] = ()) -> str:
    """Describe the type of a field and its bounds (metadata): `integer >= 1`, `a | b`, `text or list of text`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(args[0], args[1:])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arg) for arg in args)
    if origin is list:
        return f"list of {describe_type(args[0])}"
    if origin is dict:
        return f"map of {describe_type(args[0])} to {describe_type(args[1])}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(dict.fromkeys(map(describe_type, args)))}"
    if annotation is Section:
        return "a section of a package"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with {', '.join(annotation.model_fields)}"
    words: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null"}
    return words[annotation] + _describe_bounds(metadata)


def _describe_bounds(metadata: Iterable[object]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    bounds = []
    for part in parts:
        bounds += [f"{sign} {getattr(part, name)}" for name, sign in signs.items() if hasattr(part, name)]
    return f" {' and '.join(bounds)}" if bounds else ""


def get_value(config: BaseModel | Mapping[str, object], key: str) -> object:
    """Return the value of a dotted key. Names in maps may contain dots. Raises AttributeError if the key is unknown."""
    value: Any = config
    while key:
        names = value if isinstance(value, Mapping) else [key.partition(".")[0]]
        name = next((name for name in names if f"{key}.".startswith(f"{name}.")), key)
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        key = key[len(name) + 1 :]
    return value


def nest_value(key: str, value: object) -> JsonObject:
    """Return nested maps with the value of one dotted key: {"trainer": {"seed": 1}} for trainer.seed."""
    return reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)  # type: ignore[arg-type]


def find_nested_map(values: Json, key: str) -> JsonObject:
    """Return the map of a dotted key in nested maps, not a copy; a new empty map if there is none."""
    for part in filter(None, key.split(".")):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def merge_maps(values: JsonObject, others: Mapping[str, Json]) -> None:
    """Merge nested maps into `values`, in place."""
    for name, value in others.items():
        if isinstance(value, dict) and isinstance(inner := values.get(name), dict):
            merge_maps(inner, value)
        else:
            values[name] = copy.deepcopy(value)


def flatten_maps(values: JsonObject, prefix: str = "") -> JsonObject:
    """Flatten nested maps to one map with dotted keys: `{"trainer": {"seed": 1}}` to `{"trainer.seed": 1}`."""
    found: JsonObject = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flatten_maps(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def walk_sections(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Yield (prefix of its keys, section) for a configuration and all its sections, also those in maps."""
    yield prefix, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        is_map = isinstance(value, dict)
        entries = {f"{name}.{key}": entry for key, entry in value.items()} if is_map else {name: value}
        for entry_name, entry in entries.items():
            if isinstance(entry, BaseModel):
                yield from walk_sections(entry, f"{prefix}{entry_name}.")


def list_entry_keys(config: BaseModel) -> Iterator[Key]:
    """Yield the keys of sections that are entries of maps, such as models.policy.path."""
    for key in list_keys(type(config)).values():
        value = get_value(config, key.name)
        entries = value.items() if isinstance(value, dict) else ()
        for name, entry in entries:
            if isinstance(entry, BaseModel):
                defaults = type(entry).model_construct()  # without the values of required keys
                rules = [(prefix, rule) for prefix, rule in key.markers if isinstance(rule, ActiveWhen | ResumeRule)]
                yield from _list_section_keys(defaults, f"{key.name}.{name}.", tuple(rules))


def list_all_keys(config: BaseModel) -> dict[str, Key]:
    """Return every key of a configuration by its name, also those of sections that are entries of maps."""
    return list_keys(type(config)) | {key.name: key for key in list_entry_keys(config)}


def replace_value(config: ConfigT, key: str, value: object) -> ConfigT:
    """Return a copy of the configuration with the dotted `key` set to `value`, without validation."""
    name, _, rest = key.partition(".")
    inner: Any = getattr(config, name) if rest else value
    if isinstance(inner, dict) and rest:
        entry, _, rest = rest.partition(".")
        inner = {**inner, entry: replace_value(inner[entry], rest, value)}
    elif rest:
        inner = replace_value(inner, rest, value)
    return config.model_copy(update={name: inner})


def format_value(value: object, quote_text: Callable[[str], str] = str) -> str:
    """Format a value as on the command line: null, true, [console], ''; `quote_text` is applied to each text in it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(format_value(item, quote_text) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{format_value(item, quote_text)}' for key, item in value.items())}}}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (quote_text(value) if isinstance(value, str) else str(value)) or "''"


def format_override(key: str, value: object) -> str:
    """Format `KEY=VALUE` so that Hydra parses the same value.

    >>> format_override("data.train_files", ["a b.parquet", "c=1.parquet"])
    "data.train_files=['a b.parquet','c=1.parquet']"
    """
    return f"{key}={format_value(value, _quote_for_hydra)}"


def _quote_for_hydra(text: str) -> str:
    """Put a text into single quotes for Hydra, which treats backslashes literally except before a quote."""
    parts = text.split("'")
    doubled = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts]
    return "'" + "\\'".join(doubled) + "'"


def rename_verl_group_size_key(config_values: Mapping[str, object]) -> None:
    """Move the value of verl's actor_rollout_ref.rollout.n to env.rollout.n. Raises ConfigError if they contradict."""
    match config_values:
        case {"actor_rollout_ref": {"rollout": {"n": theirs} as engines}, "env": {"rollout": {"n": ours} as group}}:
            if ours != 1 and theirs not in (1, ours):
                both = f"env.rollout.n={ours} and {VERL_GROUP_SIZE}={theirs}"
                raise ConfigError(f"{both} both set the group size, to different values. Set only env.rollout.n.")
            del engines["n"]
            if ours == 1:
                group["n"] = theirs


def format_settings(settings: Mapping[str, object], schema: type[BaseModel]) -> list[str]:
    """Format settings such as `{"algorithm": "dapo", "env": {"seed": 1}}` as words of the command line. Names that the
    user chooses, e.g. in `models`, may contain dots. Raises ConfigError for a key that is set twice."""
    maps, words = list_keys_of_map_type(schema), dict[str, str]()

    def add(key: str, value: object) -> None:
        if isinstance(value, dict) and key not in maps:
            for name, inner in value.items():
                add(f"{key}.{name}".lstrip("."), inner)
        elif key in words:
            raise ConfigError(f"{key} is set twice. Set it once.")
        else:
            is_preset = isinstance(value, str) and "." not in key
            words[key] = f"{key}={value}" if is_preset else format_override(key, value)

    add("", json.loads(json.dumps(dict(settings), default=to_json_value)))  # Path and NumPy to plain values
    return [*words.values()]
