"""`alphaapollo SUBCOMMAND ...`: call `main(argv)` of the subcommand's module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from alphaapollo._version import __version__
from alphaapollo.cli.subcommands import SUBCOMMANDS, Subcommand
from alphaapollo.processes.entry_point import MainFunction
from alphaapollo.utils.registry import suggest_similar

HELP = ("-h", "--help", "help")
REFUSED = 2
OVERVIEW = """alphaapollo: post-training of language models with reinforcement learning

  alphaapollo SUBCOMMAND [--config FILE] [KEY=VALUE ...]

{subcommands}

  alphaapollo SUBCOMMAND --help  its most important keys
  alphaapollo explain KEY        any key
  alphaapollo --version
"""
HELP_OF_KEYS = """alphaapollo {name}: {summary}

  alphaapollo {name} [--config FILE] [KEY=VALUE ...]
  alphaapollo {name} {example}

Most important keys:
{keys}

  --config FILE    your own YAML file, applied over the defaults; later keys override it
  --cfg            print the full configuration without starting

All {count} keys: docs/config.md, or alphaapollo explain KEY. All options and presets:
  python -m {module} --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit code: 0 done, 1 failed, 2 invalid arguments or settings, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        width = max(map(len, SUBCOMMANDS))
        lines = [f"  {subcommand.name:<{width}}  {subcommand.summary}" for subcommand in SUBCOMMANDS.values()]
        print(OVERVIEW.format(subcommands="\n".join(lines)), end="")
        return 0 if words else REFUSED
    if words[0] == "--version":
        print(__version__)
        return 0
    name, *rest = words
    if name not in SUBCOMMANDS:
        hint = f"{suggest_similar(name, SUBCOMMANDS)} Known: {', '.join(SUBCOMMANDS)}."
        print(f"error: alphaapollo {name}: unknown subcommand.{hint}", file=sys.stderr)
        return REFUSED
    subcommand = SUBCOMMANDS[name]
    if subcommand.command and any(word in HELP[:2] for word in rest):
        print(format_subcommand_help(subcommand), end="")
        return 0
    run: MainFunction = importlib.import_module(subcommand.main_module).main
    return run(subcommand.make_arguments(rest))


def format_subcommand_help(subcommand: Subcommand) -> str:
    """Format the --help text of a subcommand, with meaning and default of its most important keys."""
    from alphaapollo.config.keys import COMMANDS, format_value, list_keys

    known = list_keys(COMMANDS[subcommand.command])
    shown: list[str] = []
    for name in subcommand.help_keys:
        key = known[name]
        default = "" if key.default == "" else f" Default {format_value(key.default)}."
        shown += [f"  {name}", f"      {key.meaning}{default}"]
    return HELP_OF_KEYS.format(
        name=subcommand.name,
        summary=subcommand.summary,
        example=subcommand.example,
        keys="\n".join(shown),
        count=len(known),
        module=subcommand.main_module,
    )


if __name__ == "__main__":
    sys.exit(main())
