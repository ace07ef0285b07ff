"""Format error messages for unknown keys and for values that a key does not accept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import BaseModel

from alphaapollo.config.keys import find_map_key_of_entry, format_value, list_keys, list_sections
from alphaapollo.config.renamed_keys import describe_rename
from alphaapollo.config.verl import find_verl_key_status
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.registry import find_similar, format_suggestion, suggest_similar


def describe_unknown_key(name: str, schema: type[BaseModel], value: object) -> str:
    """Return the error message for a key that is not in the schema, with similar keys or what replaces verl's key."""
    shown = f"{name} (got {format_value(value)})"
    if rename := describe_rename(name):
        return f"{shown}: {rename}."
    if status := find_verl_key_status(name, schema):
        return f"{shown}: a key of verl, {status}."
    suggestion = format_suggestion(find_similar_keys(name, list_keys(schema)))
    return f"{shown}: unknown key.{suggestion or ' docs/config.md lists the pages of all keys.'}"


def find_similar_keys(name: str, known_keys: Iterable[str], count: int = 3) -> list[str]:
    """Return the `count` known keys most similar to a misspelled key, best first.

    If keys have the same last part, e.g. `actor_rollout_ref.actor.optim.lr` for `lr`, only these are returned.
    Otherwise, keys that are similar as a whole come before keys with a similar last part.
    """
    ends = {key: key.rpartition(".")[2] for key in known_keys}
    last = name.rpartition(".")[2]
    if same_end := [key for key, end in ends.items() if end == last]:
        return list(dict.fromkeys(find_similar(name, same_end, count) + same_end))[:count]
    close_ends = find_similar(last, set(ends.values()), count, cutoff=0.6)
    like_end = [key for close in close_ends for key, end in ends.items() if end == close]
    return list(dict.fromkeys(find_similar(name, ends, count) + like_end))[:count]


def describe_validation_error(
    schema: type[BaseModel], pydantic_error: Mapping[str, Any], values: JsonObject
) -> Iterator[str]:
    """Convert an entry of pydantic's `ValidationError.errors()` to error messages with key, expected type and value."""
    parts = [str(part) for part in pydantic_error["loc"]]
    if pydantic_error["type"] == "extra_forbidden":
        yield describe_unknown_key(".".join(parts), schema, reduce(getitem, pydantic_error["loc"], values))
        return
    keys, groups = list_keys(schema), list_sections(schema)
    rule = str(pydantic_error["ctx"]["error"]) if pydantic_error["type"] == "value_error" else ""
    while (
        parts and not (rule and find_map_key_of_entry(".".join(parts), schema)) and ".".join(parts) not in keys | groups
    ):
        parts.pop()  # parts that pydantic adds: the branch of a union, the index in a list
    name, got = ".".join(parts), reduce(getitem, parts, values)
    if rule and name in keys:  # rule of one field's type
        yield f"{name}={format_value(got)}: {rule}"
    elif rule:  # rule of several fields (Section.find_problems)
        yield from (f"{name}.{line}".removeprefix(".") for line in rule.splitlines())
    elif name in groups:
        yield f"{name}: expected a section with the keys {', '.join(groups[name])}, got {format_value(got)}."
    else:
        expected, written = keys[name].type, json.dumps(got, ensure_ascii=False)  # JSON shows text in quotes
        hint = suggest_similar(str(got).lower(), expected.split(" | "), count=3) if " | " in expected else ""
        yield f"{name}: expected {expected}, got {written}.{hint}"
