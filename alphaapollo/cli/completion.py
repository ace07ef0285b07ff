"""`alphaapollo completion SHELL`: print a script that completes subcommands, files and keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from alphaapollo.cli.subcommands import SUBCOMMANDS

USAGE = {
    "bash": 'eval "$(alphaapollo completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(alphaapollo completion zsh)"      after compinit, in ~/.zshrc',
    "fish": "alphaapollo completion fish | source     in ~/.config/fish/config.fish",
}

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

ZSH = """autoload -Uz bashcompinit && bashcompinit
"""

FISH = """complete -c alphaapollo -n __fish_use_subcommand -f
{subcommands}
{keys}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="alphaapollo completion",
        description="Print a completion script for `alphaapollo`. To use it:\n\n  " + "\n  ".join(USAGE.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(USAGE))
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    """Build the script for bash, zsh (through bashcompinit) or fish."""
    if shell == "fish":
        return FISH.format(subcommands="\n".join(_fish_subcommands()), keys="\n".join(_fish_keys()))
    cases = "\n".join(f'        {name}) words="{" ".join(words)}" ;;' for name, words in _words().items())
    bash = BASH.format(subcommands=" ".join(SUBCOMMANDS), cases=cases)
    return ZSH + bash if shell == "zsh" else bash


def _words() -> dict[str, list[str]]:
    """Words per subcommand: options and KEY= for each key; `explain` takes the names of all keys."""
    from alphaapollo.config.keys import COMMANDS, accepted_keys

    found = {
        subcommand.name: [
            "--config",
            "--cfg",
            "--help",
            *(f"{key}=" for key in accepted_keys(COMMANDS[subcommand.command])),
        ]
        for subcommand in SUBCOMMANDS.values()
        if subcommand.command
    }
    found["explain"] = sorted({key for schema in COMMANDS.values() for key in accepted_keys(schema)})
    found["completion"] = sorted(USAGE)
    return found


def _fish_subcommands() -> Iterable[str]:
    for subcommand in SUBCOMMANDS.values():
        yield f"complete -c alphaapollo -n __fish_use_subcommand -a {subcommand.name} -d {_quoted(subcommand.what)}"


def _fish_keys() -> Iterable[str]:
    for name, words in _words().items():
        yield f"complete -c alphaapollo -n '__fish_seen_subcommand_from {name}' -a {_quoted(' '.join(words))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
