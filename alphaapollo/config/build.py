"""Convert nested values to a configuration object, or to error messages with the keys. Workers use this module, so it
does not import Hydra."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from alphaapollo.config.check import find_unmet_requirements
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.key_tables import PROJECTS, find_answer, find_key_status, find_option_status
from alphaapollo.config.keys import COMMANDS, format_value, list_keys, list_sections, rename_verl_group_size_key
from alphaapollo.config.renamed_keys import describe_rename
from alphaapollo.config.requirements import CheckContext, find_conflicts
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Section
from alphaapollo.config.schema.plugins import describe_missing_section
from alphaapollo.utils.json_types import Json, JsonObject
from alphaapollo.utils.registry import find_similar, format_suggestion, suggest_similar

SchemaT = TypeVar("SchemaT", bound=BaseModel)


def build_config(schema: type[SchemaT], values: dict[str, object]) -> SchemaT:
    """Create a configuration object from nested values. Raises ConfigError with all errors. May change `values`."""
    if schema is Config:
        rename_verl_group_size_key(values)
    try:
        config = schema.model_validate_json(json.dumps(values), strict=True, context={"build": build_config})
    except ValidationError as error:
        given = json.loads(json.dumps(values))  # keys become texts, as in the errors
        lines = [line for detail in error.errors() for line in describe_validation_errors(schema, detail, given)]
        raise ConfigError(list(dict.fromkeys(lines))) from None
    if isinstance(config, Section):
        is_command = schema in COMMANDS.values()  # not a section alone
        conflicts = find_conflicts(CheckContext(config)) if is_command else ()
        if errors := [*find_unmet_requirements(config), *conflicts]:
            raise ConfigError(errors)
    return config


def describe_unknown_key(name: str, schema: type[BaseModel], value: object) -> str:
    """Return the error message for a key that is not in the schema, with similar keys or what replaces verl's key."""
    shown = f"{name} (got {format_value(value)})"
    if rename := describe_rename(name):
        return f"{shown}: {rename}."
    if missing := describe_missing_section(name):
        return f"{shown}: {missing}"
    if status := find_key_status("verl", name, schema):
        return f"{shown}: a key of verl, {status}."
    others = [command for command, other_schema in COMMANDS.items() if name in list_keys(other_schema)]
    if others and not any(find_answer(project, name, schema) for project in PROJECTS):
        return f"{shown}: a key of {', '.join(others)}, which this command does not have."
    if status := find_option_status(name, schema):
        return f"{shown}: {status}."
    near = find_similar_keys(name, list_keys(schema))
    if schema in COMMANDS.values() and not any(key.rpartition(".")[2] == name.rpartition(".")[2] for key in near):
        for command, other_schema in COMMANDS.items():
            if status := find_option_status(name, other_schema):
                return f"{shown}: {status} in {command}. This command has no such key."
    return f"{shown}: unknown key.{format_suggestion(near) or ' `--help` lists all keys.'}"


def find_similar_keys(name: str, known_keys: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` known keys that a misspelled key may mean, most similar first.

    Their last part is that of the name, e.g. `actor_rollout_ref.actor.optim.lr` for `lr`. If no key has this last part,
    theirs is similar to it, or contains all its words, e.g. `trainer.n_gpus_per_node` for `gpus`.
    """
    last_parts = {key: key.rpartition(".")[2] for key in known_keys}
    last = name.rpartition(".")[2]
    similar = [last] if last in last_parts.values() else find_similar(last, {*last_parts.values()}, count, cutoff=0.6)
    words = set() if similar == [last] else {*last.split("_")}
    near = [key for key, part in last_parts.items() if part in similar or (words and words <= {*part.split("_")})]
    return find_similar(name, near, count, cutoff=0)


def describe_validation_errors(
    schema: type[BaseModel], pydantic_error: Mapping[str, Any], values: JsonObject
) -> list[str]:
    """Return the error messages of an entry of `ValidationError.errors()`: several for the sections of packages."""
    cause = pydantic_error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return [".".join([*map(str, pydantic_error["loc"]), line]) for line in cause.errors]
    return [describe_validation_error(schema, pydantic_error, values)]


def describe_validation_error(schema: type[BaseModel], pydantic_error: Mapping[str, Any], values: Json) -> str:
    """Convert an entry of `ValidationError.errors()` to an error message with key, expected type and value."""
    parts = [str(part) for part in pydantic_error["loc"]]
    if pydantic_error["type"] == "extra_forbidden":
        value = reduce(getitem, pydantic_error["loc"], values)
        while isinstance(value, dict) and len(value) == 1:  # one key of an unknown section
            ((part, value),) = value.items()
            parts.append(part)
        return describe_unknown_key(".".join(parts), schema, value)
    keys, groups = list_keys(schema), list_sections(schema)
    while ".".join(parts) not in keys | groups:
        parts.pop()  # parts that pydantic adds: the branch of a union, the index in a list
    name, got = ".".join(parts), reduce(getitem, parts, values)
    if pydantic_error["type"] == "value_error":
        return f"{name}={format_value(got)}: {pydantic_error['ctx']['error']}"
    if name in groups:
        return f"{name}: expected a section with the keys {', '.join(groups[name])}, got {format_value(got)}."
    expected, written = keys[name].type, json.dumps(got, ensure_ascii=False)  # JSON shows text in quotes
    hint = suggest_similar(str(got).lower(), expected.split(" | "), count=3) if " | " in expected else ""
    return f"{name}: expected {expected}, got {written}.{hint}"
