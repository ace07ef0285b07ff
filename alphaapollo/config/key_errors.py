"""Error lines for unknown keys and for values that a key does not accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from alphaapollo.config.keys import accepted_keys, format_value, is_map_entry, sections
from alphaapollo.config.verl import verl_verdict
from alphaapollo.utils.registry import nearest


def unknown_key_problem(name: str, schema: type[BaseModel], got: Any) -> str:
    """Error line for a key that is not in the schema."""
    shown = f"{name} (got {format_value(got)})"
    verdict = verl_verdict(name, schema)
    if verdict is not None:
        return f"{shown}: a key of verl, {verdict}."
    near = nearest_keys(name, accepted_keys(schema))
    hint = f"Did you mean {' or '.join(near)}?" if near else "docs/config.md lists every key."
    return f"{shown}: unknown key. {hint}"


def nearest_keys(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The most similar known keys, those with the same last part first (`lr`: `actor_rollout_ref.actor.optim.lr`)."""
    ends = {key: key.rsplit(".", 1)[-1] for key in known}
    last = name.rsplit(".", 1)[-1]
    same_end = [key for key, end in ends.items() if end == last]
    if same_end:
        return list(dict.fromkeys(nearest(name, same_end, count) + same_end))[:count]
    like_end = [key for close in nearest(last, set(ends.values()), count) for key, end in ends.items() if end == close]
    return list(dict.fromkeys(nearest(name, ends, count) + like_end))[:count]


def validation_problems(schema: type[BaseModel], detail: Mapping[str, Any], values: dict[str, Any]) -> Iterator[str]:
    """One line per problem of one of pydantic's errors: key, expected, got, fix."""
    parts = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        yield unknown_key_problem(".".join(parts), schema, _value_at(values, parts))
        return
    keys, groups = accepted_keys(schema), sections(schema)
    rule = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else ""
    while parts and not (rule and is_map_entry(".".join(parts), schema)) and ".".join(parts) not in keys | groups:
        parts.pop()  # pydantic's own additions: the branch of a union, the index in a list
    name = ".".join(parts)
    if rule and name in keys:  # of a field's type
        yield f"{name}={format_value(_value_at(values, parts))}: {rule}"
    elif rule:  # of a section's fields (Section.problems)
        yield from (f"{name}.{line}".removeprefix(".") for line in rule.splitlines())
    elif name in groups:
        got = format_value(_value_at(values, parts))
        yield f"{name}: expected a section with the keys {', '.join(groups[name])}, got {got}."
    else:
        expected, got = keys[name].type, _value_at(values, parts)
        yield f"{name}: expected {expected}, got {format_value(got)} ({_kind(got)}).{_hint(name, expected, got)}"


def _value_at(values: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        values = values[part]
    return values


def _kind(value: Any) -> str:
    kinds = {bool: "true | false", int: "integer", float: "number", str: "text", list: "list", dict: "section"}
    return kinds.get(type(value), "null")


def _hint(name: str, expected: str, got: Any) -> str:
    if expected.startswith("list of") and isinstance(got, str):
        return f" Write {name}=[{got}]."
    if isinstance(got, str) and _is_number(got) and expected.startswith(("integer", "number")):
        return f" Write {got} without quotes."
    if expected.startswith("integer") and isinstance(got, float) and got.is_integer():
        return f" Write {int(got)}."
    if expected.startswith("text") and got is None:
        return f" Write {name}= for nothing."
    if expected.startswith("text") and isinstance(got, bool):
        return f" Write '{name}=\"{str(got).lower()}\"' if the text is meant."
    near = nearest(str(got).lower(), expected.split(" | ")) if " | " in expected else []
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()
