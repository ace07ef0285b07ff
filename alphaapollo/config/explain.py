"""`python -m alphaapollo.config explain KEY`: one line about a key."""

from __future__ import annotations

from alphaapollo.config.key_errors import nearest_keys
from alphaapollo.config.keys import COMMANDS, accepted_keys, containing_map, format_value, sections
from alphaapollo.config.verl import differences, verl_verdict


def explain(name: str) -> str:
    """One line: accepted, renamed, dropped, not supported, or unknown with the nearest keys."""
    name = name.lstrip("+~").split("=")[0]
    found = {
        command: accepted_keys(schema)[name] for command, schema in COMMANDS.items() if name in accepted_keys(schema)
    }
    if found:
        first, *others = found
        key = found[first]
        defaults = format_value(key.default) if first == "main_ppo" else f"{format_value(key.default)} in {first}"
        defaults += "".join(
            f", {format_value(found[o].default)} in {o}" for o in others if found[o].default != key.default
        )
        other = differences(COMMANDS[first]).get(name)
        in_verl = f"; against verl: {other}" if other else ""
        return f"{name}: accepted (default {defaults}, {key.meaning.removesuffix('.')}{in_verl})"
    for schema in COMMANDS.values():
        if name in sections(schema):
            return f"{name}: accepted (a section with {', '.join(sections(schema)[name])})"
    for schema in COMMANDS.values():
        if (whole := containing_map(name, schema)) is not None:
            meaning = accepted_keys(schema)[whole].meaning.removesuffix(".")
            return f"{name}: accepted (a name in the map {whole}: {meaning})"
    if (verdict := verl_verdict(name, *COMMANDS.values())) is not None:
        return f"{name}: {verdict}"
    near = nearest_keys(name, {key: None for schema in COMMANDS.values() for key in accepted_keys(schema)})
    return f"{name}: unknown (nearest {', '.join(near)})" if near else f"{name}: unknown (no similar key)"
