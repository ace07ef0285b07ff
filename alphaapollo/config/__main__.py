"""python -m alphaapollo.config explain KEY...   print what each key does, in one line
python -m alphaapollo.config port SCRIPT [KEY=VALUE ...] [NAME=VALUE ...]
                                              print a command of verl's (a shell script) as ours; docs/verl.md
python -m alphaapollo.config docs             write docs/config/ and docs/verl_keys.md (in a clone)
"""

from __future__ import annotations

import sys
from pathlib import Path

from alphaapollo.config.docs import pages
from alphaapollo.config.errors import EXIT_CODE, report_error
from alphaapollo.config.key_errors import nearest_keys
from alphaapollo.config.keys import COMMANDS, accepted_keys, containing_map, format_value, sections
from alphaapollo.config.port.translate import port
from alphaapollo.config.verl import differences, verl_verdict


def main(argv: list[str]) -> int:
    match argv:
        case ["explain", *names] if {"-h", "--help"} & set(names):
            print(__doc__)
        case ["explain", *names] if names:
            print("\n".join(explain(name) for name in names))
        case ["port", script, *given]:
            try:
                print(port(Path(script).read_text(encoding="utf-8"), script, given), end="")
            except (OSError, ValueError) as error:
                return report_error(error, EXIT_CODE)
        case ["docs"]:
            folder = Path(__file__).resolve().parents[2] / "docs"
            (folder / "config").mkdir(exist_ok=True)
            for path, text in pages().items():
                (folder / path).write_text(text, encoding="utf-8")
            print(f"wrote {len(pages())} pages to {folder}")
        case _:
            print(__doc__, file=sys.stderr)
            return EXIT_CODE
    return 0


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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
