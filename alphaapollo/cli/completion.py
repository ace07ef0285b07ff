"""`alphaapollo completion SHELL`: print a script that completes subcommands, files and keys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from alphaapollo.cli.subcommands import SUBCOMMANDS

USAGE = {
    "bash": 'eval "$(alphaapollo completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(alphaapollo completion zsh)"      after compinit, in ~/.zshrc',
}

OPTIONS = ("--config", "--cfg", "--help")
BASH = """_alphaapollo() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=""
    if [[ $word == = ]]; then # value of a key: complete files
        COMPREPLY=($(compgen -f))
        return
    elif [ "$COMP_CWORD" -eq 1 ]; then
        words="{subcommands}"
    elif [[ $previous != --config && $previous != = && $word != *=* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${{#COMPREPLY[@]}} -ne 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace
}}
complete -o default -F _alphaapollo alphaapollo
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="alphaapollo completion",
        description="Print a completion script for `alphaapollo`. To use it:\n\n  " + "\n  ".join(USAGE.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(USAGE))
    print(build_completion_script(parser.parse_args(argv).shell), end="")
    return 0


def build_completion_script(shell: str) -> str:
    """Build the tab-completion script for bash or zsh (with bashcompinit)."""
    cases = "\n".join(
        f'        {name}) words="{" ".join(words)}" ;;' for name, words in _list_completion_words().items()
    )
    bash = BASH.format(subcommands=" ".join(SUBCOMMANDS), cases=cases)
    return f"autoload -Uz bashcompinit && bashcompinit\n{bash}" if shell == "zsh" else bash


def _list_completion_words() -> dict[str, list[str]]:
    """Return the words that may follow each subcommand: options and `KEY=`; for `explain`, all keys."""
    from alphaapollo.config.keys import COMMANDS, list_keys

    found = {
        subcommand.name: [*OPTIONS, *(f"{key}=" for key in list_keys(COMMANDS[subcommand.command]))]
        for subcommand in SUBCOMMANDS.values()
        if subcommand.command
    }
    found["explain"] = sorted({key for schema in COMMANDS.values() for key in list_keys(schema)})
    found["completion"] = sorted(USAGE)
    return found
