"""Render the site's pages of keys from the schema and from the tables of other projects (alphaapollo/config).

docs/config/shared.md lists the keys that several commands share, docs/config/<command>.md lists the other keys of a
command. docs/verl_keys.md lists verl's keys, and docs/trl_keys.md, ... the options of other projects (option_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel

from alphaapollo.config.key_tables import load_project
from alphaapollo.config.keys import COMMANDS, Key, format_value, list_keys
from alphaapollo.config.verl import find_differences_from_verl
from scripts.option_pages import render_option_pages

VERL_INTRO = """# verl's keys

This page lists keys of verl that have another meaning or default here, and keys that are not accepted. `*` matches
any text. If several entries match a key, the longest one applies. [verl.md](verl.md) explains how to convert a command.
"""

SHARED_INTRO = """# Shared sections

This page describes sections that several commands have, or that one command has more than once, such as `optim` of
actor and critic. The page of a command links to its shared sections.
"""

LONGEST_DEFAULT = 80  # characters
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"


class SectionLocation(NamedTuple):
    """Location of a section in the configuration of a command, e.g. ("main_sft", "model")."""

    command: str
    section: str


KeysByLocation = dict[SectionLocation, list[Key]]
"""Keys that one schema class declares, by the location of the sections that have them."""


def render_pages() -> dict[str, str]:
    """Return the pages: {path on the site: Markdown text}."""
    groups: dict[type[BaseModel], KeysByLocation] = {}
    for command, schema in COMMANDS.items():
        for key in list_keys(schema).values():
            locations = groups.setdefault(key.declared_by, {})
            locations.setdefault(SectionLocation(command, key.name.rpartition(".")[0]), []).append(key)
    shared = {
        _format_section_title(one, locations): locations for one, locations in groups.items() if len(locations) > 1
    }
    own = [keys for locations in groups.values() if len(locations) == 1 for keys in locations.values()]
    return {
        "docs/config/shared.md": "".join([SHARED_INTRO, *map(_render_shared_section, shared, shared.values())]),
        **{f"docs/config/{command}.md": _render_command_page(command, shared, own) for command in COMMANDS},
        "docs/verl_keys.md": _render_verl_page(),
        **render_option_pages(),
    }


def _format_section_title(declared_by: type[BaseModel], locations: KeysByLocation) -> str:
    return f"{next(iter(locations)).section.rpartition('.')[2] or 'top level'} ({declared_by.__name__})"


def _render_shared_section(title: str, locations: KeysByLocation) -> str:
    by_command: dict[str, list[str]] = {}
    for location in locations:
        by_command.setdefault(location.command, []).append(f"`{location.section}`" if location.section else "top level")
    where = "; ".join(f"{command}: {', '.join(sections)}" for command, sections in by_command.items())
    return f"\n## {title}\n\nIn {where}.\n\n{HEAD}{''.join(_render_shared_key_rows(locations))}"


def _render_shared_key_rows(locations: KeysByLocation) -> Iterator[str]:
    """Yield a table row per key. If its default differs between commands or sections, the row lists each default."""
    by_name: dict[str, dict[SectionLocation, Key]] = {}
    for location, keys in locations.items():
        for key in keys:
            by_name.setdefault(key.name.rpartition(".")[2], {})[location] = key
    for name, same in by_name.items():
        first = next(iter(same.values()))
        default = f"`{_shorten_default(format_value(first.default))}`"
        for location, key in same.items():
            if key.default != first.default:
                default += (
                    f"; `{_shorten_default(format_value(key.default))}` in {location.command} `{location.section}`"
                )
        yield _render_key_row(name, first, default)


def _render_key_row(name: str, key: Key, default: str) -> str:
    return f"| `{name}` | {_escape_cell(key.type)} | {default} | {_escape_cell(key.meaning)} |\n"


def _render_command_page(
    command: str, shared_sections: dict[str, KeysByLocation], unshared_keys: list[list[Key]]
) -> str:
    parts = [f"# Keys of {command}\n\n[config.md](../config.md) explains how keys are set.\n"]
    accepted = list_keys(COMMANDS[command])
    for section in dict.fromkeys(name.rpartition(".")[0] for name in accepted):
        parts.append(f"\n## {section or 'top level'}\n\n")
        titles = [
            title for title, locations in shared_sections.items() if SectionLocation(command, section) in locations
        ]
        links = ", ".join(f"[{title}](shared.md#{_format_markdown_anchor(title)})" for title in titles)
        rows = [
            _render_key_row(key.name, key, f"`{_shorten_default(format_value(key.default))}`")
            for keys in unshared_keys
            for key in keys
            if key.name.rpartition(".")[0] == section and accepted.get(key.name) is key
        ]
        parts.append(f"Shared keys: {links}.\n" + "\n" * bool(rows) if links else "")
        parts += [HEAD, *rows] if rows else []
    return "".join(parts)


def _format_markdown_anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace("(", "").replace(")", "")


def _render_verl_page() -> str:
    parts = [VERL_INTRO]
    for command, table in load_project("verl").tables.items():
        verdicts = {key: answer.status for key, answer in table.answers.items()}
        if other := find_differences_from_verl(COMMANDS[command]):
            parts.append(_render_verl_table(f"{command}: accepted, but different", "difference", other))
        parts.append(_render_verl_table(command, "here", verdicts))
    return "".join(parts)


def _render_verl_table(title: str, column_title: str, text_by_key: dict[str, str]) -> str:
    rows = "\n".join(f"| `{key}` | {_escape_cell(text)} |" for key, text in sorted(text_by_key.items()))
    return f"\n## {title}\n\n| key | {column_title} |\n|---|---|\n{rows}\n"


def _shorten_default(text: str) -> str:
    """Return the text of a default for a table cell: on one line, and truncated to LONGEST_DEFAULT characters."""
    line = text.replace("|", "\\|").replace("\n", " ")
    return line if len(line) <= LONGEST_DEFAULT else f"{line[:LONGEST_DEFAULT]}..."


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
