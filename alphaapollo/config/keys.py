"""List the accepted keys with type, default and meaning, read from the schema."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import (
    Config,
    DpoConfig,
    EvalConfig,
    EvolvingConfig,
    ExportConfig,
    GenerationConfig,
    RmConfig,
    SftConfig,
)

C = TypeVar("C", bound=BaseModel)
MarkerT = TypeVar("MarkerT")
SchemaClass = type[BaseModel]

VERL_GROUP_SIZE = "actor_rollout_ref.rollout.n"
"""verl's name of env.rollout.n. Both names are accepted; a value above the default 1 takes precedence."""

COMMANDS: dict[str, type[BaseModel]] = {
    "main_ppo": Config,
    "main_sft": SftConfig,
    "main_dpo": DpoConfig,
    "main_rm": RmConfig,
    "main_generation": GenerationConfig,
    "main_eval": EvalConfig,
    "main_export": ExportConfig,
    "evolving": EvolvingConfig,
}


@dataclass(frozen=True)
class Key:
    """Accepted key, e.g. `Key("trainer.seed", "integer", 0, "Seed of rollouts, ...")`."""

    name: str
    type: str
    default: Any
    meaning: str
    declared_by: SchemaClass = BaseModel
    """Schema class that declares the field: the class of the section, or one of its base classes."""
    markers: tuple[tuple[str, object], ...] = ()
    """(prefix of the declaring section, marker) of the field and of its enclosing sections, outermost first."""


def get_field_markers(key: Key, kind: type[MarkerT]) -> list[tuple[str, MarkerT]]:
    """Return the (prefix, marker) pairs of the key whose marker has this class."""
    return [(section, marker) for section, marker in key.markers if isinstance(marker, kind)]


@cache
def list_keys(schema: type[BaseModel]) -> dict[str, Key]:
    """Return every key of the schema by its dotted name, in the order of the schema."""
    return {key.name: key for key in _walk_keys(schema(), "")}


@cache
def list_sections(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Return every section by its dotted name, with the names of its direct keys and sections."""
    return {name: list(type(section).model_fields) for name, section in _walk_sections(schema(), "")}


@cache
def list_map_keys(schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys that are maps with names chosen by the user: `models`, `reward.components`, ..."""
    return tuple(key.name for key in list_keys(schema).values() if key.type.startswith("map of"))


def find_containing_map(name: str, schema: type[BaseModel]) -> str | None:
    """Return the map key that contains the name: `reward.components` for `reward.components.format`; None = no map."""
    return next((key for key in list_map_keys(schema) if name.startswith(f"{key}.")), None)


def _walk_keys(section: BaseModel, prefix: str, inherited: tuple[tuple[str, object], ...] = ()) -> Iterable[Key]:
    for name, field in type(section).model_fields.items():
        value, markers = getattr(section, name), (*inherited, *((prefix, marker) for marker in field.metadata))
        if isinstance(value, BaseModel):
            yield from _walk_keys(value, f"{prefix}{name}.", markers)
        else:
            meaning = " ".join((field.description or "").split())
            owner = next(cls for cls in type(section).__mro__ if name in get_annotations(cls))
            yield Key(prefix + name, describe_type(field.annotation, field.metadata), value, meaning, owner, markers)


def _walk_sections(section: BaseModel, prefix: str) -> Iterable[tuple[str, BaseModel]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield prefix + name, value
            yield from _walk_sections(value, f"{prefix}{name}.")


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a type in words: `integer >= 1`, `a | b`, `text or list of text`."""
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
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with {', '.join(annotation.model_fields)}"
    words = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true | false",
        type(None): "null",
    }
    return words[annotation] + _describe_bounds(metadata)


def _describe_bounds(metadata: Iterable[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = []
    for item in metadata:
        for part in item.metadata if isinstance(item, FieldInfo) else [item]:
            bounds += [f"{sign} {getattr(part, name)}" for name, sign in signs.items() if hasattr(part, name)]
    return f" {' and '.join(bounds)}" if bounds else ""


def get_value(config: BaseModel, key: str) -> object:
    """Return the value of a dotted key. Raises AttributeError if there is no such key."""
    return attrgetter(key)(config)


def replace_value(config: C, key: str, value: object) -> C:
    """Return a copy of the configuration with another value of a dotted key, without validation."""
    name, _, rest = key.partition(".")
    inner = replace_value(getattr(config, name), rest, value) if rest else value
    return config.model_copy(update={name: inner})


def format_value(value: Any, quote: Callable[[str], str] = str) -> str:
    """Format a value as on the command line: null, true, [console], ''. quote: function that quotes text."""
    if isinstance(value, list | tuple):
        return f"[{','.join(format_value(item, quote) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{format_value(item, quote)}' for key, item in value.items())}}}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (quote(value) if isinstance(value, str) else str(value)) or "''"


def format_override(key: str, value: Any) -> str:
    """Format `KEY=VALUE` so that Hydra parses the same value.

    >>> format_override("data.train_files", ["a b.parquet", "c=1.parquet"])
    "data.train_files=['a b.parquet','c=1.parquet']"
    """
    return f"{key}={format_value(value, _quote_text)}"


def _quote_text(text: str) -> str:
    """Quote a text for Hydra, which treats backslashes literally except before a quote."""
    parts = text.split("'")
    doubled = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts]
    return "'" + "\\'".join(doubled) + "'"


def merge_group_size(values: dict[str, Any]) -> None:
    """Move the value of VERL_GROUP_SIZE to env.rollout.n. Raises ConfigError for two different values above 1."""
    match values:
        case {"actor_rollout_ref": {"rollout": {"n": theirs} as engines}, "env": {"rollout": {"n": ours} as group}}:
            if ours != 1 and theirs not in (1, ours):
                both = f"env.rollout.n={ours} and {VERL_GROUP_SIZE}={theirs}"
                raise ConfigError(f"{both} are two values of one key. Set only env.rollout.n.")
            del engines["n"]
            if ours == 1:
                group["n"] = theirs
