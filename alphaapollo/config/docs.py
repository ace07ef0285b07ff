"""docs/config.md, made from the schema and from verl_keys.yaml."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from alphaapollo.config.keys import COMMANDS, Key, accepted_keys, plain
from alphaapollo.config.verl import differences, verl_keys

INTRO = """# Configuration

<!-- Made by `python -m alphaapollo.config docs` from alphaapollo/config/schema; do not edit. -->

    python -m alphaapollo.trainer.main_ppo algorithm=grpo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
        data.train_files=train.parquet trainer.experiment_name=first

* `KEY=VALUE` sets a key; lists are `[a,b]`, nothing is `null`. A value with special characters is quoted twice:
  `'KEY="a=b"'`.
* `GROUP=PRESET` takes a preset of `configs/`: `algorithm=` (the recipes of docs/algorithms), `model=`,
  `env=`, `cluster=`. `algorithm=grpo` sets several keys as its paper has them; `algorithm.adv_estimator=grpo` sets one.
* `--config-dir DIR --config-name NAME` starts from your own `DIR/NAME.yaml`. Put only what you change there; begin it
  with `defaults: [ppo, _self_]` to build on the shipped one. Your folder may hold presets too
  (`DIR/algorithm/mine.yaml`, with `# @package _global_` as its first line).
* What counts in the end: the defaults below, then the YAML, then presets, then `KEY=VALUE`.
* `--cfg` prints the outcome. `trainer.dry_run=True` also checks it and prints the plan of the run.
* `python -m alphaapollo.config explain KEY...` says what a key does, or what became of it, when it is one of verl's.
* `python -m alphaapollo.config port SCRIPT` writes a command of verl's as ours ([verl.md](verl.md)).

An unknown key, a value of the wrong type or an impossible combination stops the command before anything starts.
"""

VERL_INTRO = """
## Coming from verl

[verl.md](verl.md) says how to bring a command along. Here are all keys: those that are accepted but mean something else
or have another default, and those that are not in the tables above. `*` stands for anything; of several that fit the
longest counts.
"""


def config_page() -> str:
    """The whole page."""
    parts = [INTRO]
    for command, schema in COMMANDS.items():
        parts.append(f"\n## {command}\n")
        parts += _tables(schema)
    parts.append(VERL_INTRO)
    for command, verdicts in verl_keys().items():
        if other := differences(COMMANDS[command]):
            parts.append(_table(f"{command}: accepted, but different", "what is different", other))
        parts.append(_table(command, "what became of it", verdicts))
    return "".join(parts)


def _table(title: str, column: str, said: dict[str, str]) -> str:
    rows = "\n".join(f"| `{key}` | {_cell(text)} |" for key, text in sorted(said.items()))
    return f"\n### {title}\n\n| key | {column} |\n|---|---|\n{rows}\n"


def _tables(schema: type[BaseModel]) -> Iterable[str]:
    by_section: dict[str, list[Key]] = {}
    for key in accepted_keys(schema).values():
        by_section.setdefault(key.name.rpartition(".")[0], []).append(key)
    for section, keys in by_section.items():
        rows = "\n".join(_row(key) for key in keys)
        yield f"\n### {section or 'top level'}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _row(key: Key) -> str:
    return f"| `{key.name}` | {_cell(key.type)} | `{_code(plain(key.default))}` | {_cell(key.meaning)} |"


def _code(text: str) -> str:
    """In backticks, in a cell: of several lines one."""
    return text.replace("|", "\\|").replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
