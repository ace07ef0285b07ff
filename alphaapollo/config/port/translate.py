"""Convert scripts of verl, TRL, OpenRLHF and ms-swift to shell scripts with alphaapollo commands, with a comment at
each difference."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from alphaapollo.config.key_tables import PROJECTS
from alphaapollo.config.port.convert import translate_keys
from alphaapollo.config.port.shell import UNKNOWN
from alphaapollo.config.port.sources import WORD, ForeignCommand, list_foreign_commands

HEADER = "#!/usr/bin/env bash\n# {}, ported to alphaapollo. Check it with trainer.dry_run=True; see docs/{}.md.\n"
OFFLINE = "\n# To send to {0}, log in and remove the next line.\nexport {1}_MODE=${{{1}_MODE:-offline}}\n"


def port_script(source: str, path: str, arguments: Iterable[str] = ()) -> str:
    """Convert the text of a script to a shell script with alphaapollo commands. Raises ValueError if it has no command
    that can be converted.

    arguments: `KEY=VALUE` adds an option to the command, `NAME=VALUE` sets a variable that the script reads.
    """
    pairs = {match[1]: match[2] for word in arguments if (match := WORD.fullmatch(word))}
    commands, notes = list_foreign_commands(source, path, {name: pairs[name] for name in pairs if "." not in name})
    new_keys = {key: value for key, value in pairs.items() if "." in key}
    ported = "".join(line + "\n" for command in commands for line in _port_command(command, new_keys))
    converted = [command.project for command in commands if command.command]
    if not converted:
        others = "".join(f" {one.place} ({one.reason})." for one in commands)
        raise ValueError(
            f"{path}: no training command of {', '.join(PROJECTS.values())}, such as python3 -m verl.trainer.main_ppo, "
            f"trl grpo, openrlhf.cli.train_sft or swift rlhf.{others} If the command is inside an `if`, set the "
            "variables of its condition: port SCRIPT NAME=VALUE."
        )
    header = HEADER.format(Path(path).name, converted[0]) + "".join(f"# {note}\n" for note in notes)
    uploading = [name for name in ("wandb", "swanlab") if re.search(f"trainer.logger=.*{name}", ported)]
    return header + "".join(OFFLINE.format(name, name.upper()) for name in uploading) + ported


def _port_command(command: ForeignCommand, new_keys: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the alphaapollo command for a command of another project."""
    if not command.command:
        yield f"\n# {command.place}: not converted. {command.reason}"
        return
    program, *settings = command.command.split()
    yield f"\n# {command.place}"
    yield from (f"# {note}" for note in command.notes)
    lines = translate_keys({**command.values, **new_keys}, program, command.project, command.program)
    words = {word.split("=")[0]: (word, "the program") for word in settings}
    found = [*(words | {key: line for key, line in lines.items() if key not in words or line[0]}).values()]
    if unknown := {text for word, _ in found for text in UNKNOWN.findall(word)}:
        yield f"# from the environment, or known only at run time: {', '.join(sorted(unknown))}"
    yield "arguments=("
    for word, comment in found:
        comment = "# " + " ".join(UNKNOWN.sub(r"\1", comment).split()) if comment else ""
        yield "    " + "  ".join(part for part in (_quote_for_shell(word), comment) if part)
    yield f')\npython -m alphaapollo.trainer.{program} "${{arguments[@]}}" "$@"'


def _quote_for_shell(word: str) -> str:
    """Quote a word for the shell, except parts such as `${HOME}` that the shell must expand at run time."""
    parts = UNKNOWN.split(word)  # known, unknown, known, ...
    parts[::2] = [re.sub(r'([\\"`$])', r"\\\1", part) for part in parts[::2]]
    return f'"{"".join(parts)}"' if len(parts) > 1 else shlex.quote(word) if word else ""
