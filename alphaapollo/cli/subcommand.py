"""What a subcommand of `alphaapollo` is: a function of the arguments, or a `Subcommand` with more texts for --help."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

from alphaapollo.processes.entry_point import MainFunction

REFUSED = 2
HELP_OF_KEYS = """alphaapollo {name}: {summary}

  alphaapollo {name} [--config FILE] [KEY=VALUE ...]
  alphaapollo {name} {example}

Most important keys:
{keys}

  --config FILE    your own YAML file, applied over the defaults; later keys override it
  --cfg            print the full configuration without starting

What a key does: alphaapollo explain KEY. All {count} keys, options and presets:
  python -m {module} --help
"""


@dataclass(frozen=True)
class Subcommand:
    """Subcommand of `alphaapollo`, which accepts either the configuration keys of a `command` or other arguments."""

    summary: str
    main: str  # function that is called with the arguments, e.g. alphaapollo.trainer.main_ppo:main
    command: str = ""  # command whose keys it accepts, e.g. main_ppo (config/keys.py)
    help_keys: str = ""  # most important keys, for --help
    example: str = ""  # arguments, for --help
    first_argument: str = ""  # e.g. a preset GROUP=NAME, which is omitted if the user sets a preset of the group

    def make_arguments(self, user_arguments: Sequence[str]) -> list[str]:
        """Return the arguments of the function: first_argument (unless the user sets it), user_arguments."""
        group = self.first_argument.partition("=")[0]
        is_set = any(word.partition("=")[0] == group for word in user_arguments)
        return [*([self.first_argument] if self.first_argument and not is_set else []), *user_arguments]

    def load(self) -> MainFunction:
        """Import the function."""
        main: MainFunction = pkgutil.resolve_name(self.main)
        return main


def report_refusals(main: Callable[[Sequence[str]], int]) -> MainFunction:
    """Decorate the function of a subcommand: ValueError and OSError are reported, with exit code 2."""

    @wraps(main)
    def run_and_report(argv: Sequence[str] | None = None) -> int:
        from alphaapollo.config.errors import report_error

        try:
            return main(argv or [])
        except (ValueError, OSError) as error:
            return report_error(error, REFUSED)

    return run_and_report


def format_subcommand_help(name: str, subcommand: Subcommand) -> str:
    """Format the --help text of a subcommand, with meaning and default of its most important keys."""
    from alphaapollo.config.keys import COMMANDS, format_value, list_keys

    keys = list_keys(COMMANDS[subcommand.command])
    shown: list[str] = []
    for key in subcommand.help_keys.split():
        default = "" if keys[key].default == "" else f" Default {format_value(keys[key].default)}."
        shown += [f"  {key}", f"      {keys[key].meaning}{default}"]
    text, module = "\n".join(shown), subcommand.main.partition(":")[0]
    fields = {"name": name, "summary": subcommand.summary, "example": subcommand.example, "keys": text}
    return HELP_OF_KEYS.format(**fields, count=len(keys), module=module)
