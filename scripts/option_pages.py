"""Render the site's pages of the options of TRL, OpenRLHF and ms-swift from the tables of alphaapollo/config."""

from __future__ import annotations

import re
from collections.abc import Iterator

from alphaapollo.config.key_tables import Answer, KeyTable, load_project
from alphaapollo.config.keys import COMMANDS, format_value, list_keys

VERSIONS = {
    "trl": "TRL 1.16.0 with transformers 5.19.0",
    "openrlhf": "OpenRLHF 0.11.2",
    "swift": "ms-swift 4.6.0",
}
INTRO = """# {0}'s options

This page lists the options of {1}, and the keys that they are here. `*` matches any
text. If several entries match an option, the longest one applies. [{2}]({2}) explains how to move a script.

In main_ppo, `optim`, `grad_clip`, `fsdp_config` and `ulysses_sequence_parallel_size` are below
`actor_rollout_ref.actor`, and `model` is below `actor_rollout_ref`.
"""
FINE_TUNING = ("main_sft", "main_dpo", "main_rm")
OUR_SECTIONS = re.compile(
    r"\bactor_rollout_ref\.(?:actor\.)?(?=(?:optim|model|fsdp_config|grad_clip|ulysses)\b|ulysses_)"
)


def render_option_pages() -> dict[str, str]:
    """Return the pages: {path on the site: Markdown text}."""
    return {f"docs/{project}_keys.md": _render_page(project) for project in VERSIONS}


def _render_page(project: str) -> str:
    name, tables = load_project(project).name, load_project(project).tables
    shared = [
        option
        for option, answer in tables["main_sft"].answers.items()
        if all(tables[command].answers.get(option) == answer for command in FINE_TUNING)
    ]
    parts = [INTRO.format(name, VERSIONS[project], f"{project}.md")]
    parts.append(f"\n## Programs\n\n| {name} | alphaapollo |\n|---|---|\n{_render_programs(project)}")
    parts += _render_computed(tables)
    parts.append(
        _render_table(
            "All programs", ", ".join(FINE_TUNING), {one: tables["main_sft"].answers[one] for one in shared}, tables
        )
    )
    for command, table in tables.items():
        own = {
            option: answer
            for option, answer in table.answers.items()
            if option not in shared or _drop_sections(answer.status) != tables["main_sft"].answers[option].status
        }
        parts.append(_render_table(command, command, own, tables))
    return "".join(parts)


def _render_programs(project: str) -> str:
    known = load_project(project)
    rows = [f"| `{pattern}` | `{command}` |\n" for pattern, command in known.programs.items()]
    return "".join([*rows, *(f"| `{pattern}` | {reason} |\n" for pattern, reason in known.other_programs.items())])


def _render_computed(tables: dict[str, KeyTable]) -> Iterator[str]:
    """Yield the table of the keys that are products of options."""
    rows = {
        (key, " ".join(text.split())): command
        for command, table in tables.items()
        for key, text in table.computed.items()
    }
    if rows:
        yield "\n## Computed keys\n\nThe first product counts whose options are known, or have a default.\n\n"
        yield "| key | product |\n|---|---|\n"
        yield from (f"| `{key}` | {_escape(text)} |\n" for key, text in rows)


def _render_table(title: str, commands: str, answers: dict[str, Answer], tables: dict[str, KeyTable]) -> str:
    head = f"\n## {title}\n\n| option | default | {commands} | default here | difference |\n|---|---|---|---|---|\n"
    names = commands.split(", ")
    return (
        head + "".join(_render_row(option, answers[option], names, tables) for option in sorted(answers))
        if answers
        else ""
    )


def _render_row(option: str, answer: Answer, commands: list[str], tables: dict[str, KeyTable]) -> str:
    keys = [answer.key] if answer.key else list(dict.fromkeys(key for words in answer.cases.values() for key in words))
    schemas = [list_keys(COMMANDS[command]) for command in commands]
    keys = [key for key in keys if all(key in schema for schema in schemas)]
    ours = [f"`{_shorten(format_value(schema[key].default))}`" for schema in schemas for key in keys]
    default = ", ".join(ours if len({*ours}) > 1 else ours[:1])
    theirs = [
        format_value(tables[command].default[option]) for command in commands if option in tables[command].default
    ]
    shown = ", ".join(f"`{value}`" for value in dict.fromkeys(theirs))
    here = ", ".join(f"`{key}`" for key in keys)
    difference = answer.remark if keys else answer.status
    if difference.startswith("not supported ("):
        difference = f"not supported: {answer.remark}"
    if any(answer.cases.values()):
        difference = "; ".join(filter(None, [_describe_cases(answer), difference if keys else ""]))
    return f"| `{option}` | {_escape(shown)} | {here} | {_escape(default)} | {_escape(difference)} |\n"


def _describe_cases(answer: Answer) -> str:
    parts = []
    for case, words in answer.cases.items():
        values = ", ".join(f"`{key.rpartition('.')[2]}={format_value(text)}`" for key, text in words.items())
        if values and not (case == "*" and len(answer.cases) == 1 and all(text == "{0}" for text in words.values())):
            condition = "otherwise" if case == "*" else f"`{case}`"
            parts.append(f"{condition}: {values}")
    text = "; ".join(parts).replace("{0}", "VALUE")
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), text)


def _drop_sections(status: str) -> str:
    return OUR_SECTIONS.sub("", status)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
