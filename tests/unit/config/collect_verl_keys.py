"""Collect the keys that verl's own scripts and configurations set, for test_verl_keys.py.

    python tests/unit/config/collect_verl_keys.py GIT_DIR[@COMMIT] ... > tests/unit/config/verl_keys_seen.txt

GIT_DIR: clones of github.com/verl-project/verl and verl-recipe. Only names are kept: `PROGRAM KEY`, a line each, by the
program of ours that is meant. The list was made from verl at 1dda039b (2026-08-22) and at 3467d90a~1 (the last with its
multi-turn examples), and from verl-recipe at 48ea0a79 (2026-08-05).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import yaml

KEY = re.compile(r"""(?:^|[\s"'(])(?:\+\+?|~)?([a-z_]\w*(?:\.[A-Za-z_][\w-]*)+)=(?!=)""", re.MULTILINE)
PROGRAM = re.compile(
    r"(?:-m\s+|/|\s)([\w.]*\b(?:main_\w+|(?:fsdp_)?sft_trainer|fully_async_main|\w+_main_ppo|grpo_main))\b"
)
WHOLE = {
    "data",
    "trainer",
    "actor_rollout_ref",
}  # a configuration of a program has one of these; a part of one has none
OTHER_PROGRAMS = ("verl_tinker/", "dance_grpo/", "nemo_gym/configs/", "atropos/")  # servers, video models, launchers


def program_of(module: str) -> str:
    """Which of ours does what a program of verl's does."""
    if "sft" in module:
        return "main_sft"
    return next((ours for ours in ("main_generation", "main_eval") if ours in module), "main_ppo")


def keys_of_script(text: str) -> Iterator[tuple[str, str]]:
    """(program, key) of a shell script; keys before the first program belong to it."""
    launches = [(found.start(), program_of(found[1])) for found in PROGRAM.finditer(text)]
    if not launches:
        return
    for found in KEY.finditer(text):
        before = [program for start, program in launches if start < found.start()]
        yield (before[-1] if before else launches[0][1]), found[1]


def keys_of_yaml(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(program, key) of a program's Hydra configuration; other YAML gives none."""
    found = yaml.safe_load(text)
    if not isinstance(found, dict) or not WHOLE & found.keys():
        return
    name = path.rsplit("/", 1)[-1].replace("evaluation", "main_eval").replace("generation", "main_generation")
    for key in _flat({section: value for section, value in found.items() if section != "defaults"}):
        yield program_of(name), key


def _flat(value: object, prefix: str = "") -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield prefix
        return
    for name, inner in value.items():
        if name != "_target_":
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))


def keys_of_repository(where: str) -> Iterator[tuple[str, str]]:
    folder, _, commit = where.partition("@")
    git = ["git", "-C", folder]
    commit = commit or "HEAD"
    for path in subprocess.check_output([*git, "ls-tree", "-r", "--name-only", commit], text=True).splitlines():
        if path.startswith(OTHER_PROGRAMS) or not path.endswith((".sh", ".yaml")):
            continue
        text = subprocess.check_output([*git, "show", f"{commit}:{path}"], text=True)
        if path.endswith(".sh"):
            yield from keys_of_script(text)
        elif "/config" in path:
            yield from keys_of_yaml(path, text)


def main(places: list[str]) -> None:
    found = {pair for place in places for pair in keys_of_repository(place)}
    print("\n".join(sorted(f"{program} {key}" for program, key in found)))


if __name__ == "__main__":
    main(sys.argv[1:])
