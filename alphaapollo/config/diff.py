"""What differs between the configuration that a run was made with and that it goes on with: launch/resume.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from alphaapollo.config.keys import COMMANDS, accepted_keys, plain

Verdict = Literal["applied", "kept", "refused"]
ChangeRule = Callable[[str], tuple[Verdict, str]]
"""What becomes of a changed key, and why: `("kept", "the first validation is over")`."""

OF_THE_START = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.dry_run")  # no part of what a run is
PATHS = ("path", "tokenizer_path", "train_files", "val_files", "custom_module")  # last names of keys with files in them

# Why, in words that several commands' rules have in common:
ANOTHER_MODEL = "another model"
OTHER_ADAPTERS = "other adapters"
OTHER_DATA = "other data"
SAME_NAME = "what it registers may be something else under the same name"
REORDERED = "the rest of the epoch comes in another order"
OTHER_SELECTION = "what is left out for its length may change, and then the rest of the epoch comes in another order"
LENGTH = "a cosine schedule gets the new length"
ROUNDING = "the same batches and draws, but sums round otherwise"
NEW_DRAWS = "what is drawn from here on is drawn anew"


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    old: Any
    new: Any
    verdict: Verdict
    why: str = ""

    def __str__(self) -> str:
        """`trainer.seed: 0 -> 1: applied`"""
        why = f" ({self.why})" if self.why else ""
        return f"{self.key}: {plain(self.old)} -> {plain(self.new)}: {self.verdict}{why}"


def find_changes(saved: Mapping[str, Any], config: BaseModel, change_rule: ChangeRule) -> list[Change]:
    """Every key of `config` whose value is not that of `saved` (the plain values of a config.yaml).

    A key that `saved` lacks had its default; one that the schema lacks is passed over: it is of another version.
    """
    defaults, now = type(config)().model_dump(mode="json"), config.model_dump(mode="json")
    found = []
    for key in accepted_keys(type(config)):
        if key in OF_THE_START:
            continue
        new = _lookup(now, key, None)
        old = _lookup(saved, key, _lookup(defaults, key, None))
        if _comparable(key, old) != _comparable(key, new):
            found.append(Change(key, old, new, *change_rule(key)))
    return found


def command_of(saved: Mapping[str, Any]) -> str | None:
    """The command whose configuration it is, by its sections: `main_sft`; None: of no command of this version."""
    return next((name for name, schema in COMMANDS.items() if schema.model_fields.keys() == saved.keys()), None)


def _lookup(values: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def _comparable(key: str, value: Any) -> Any:
    """Files are the same under another spelling: `./a.parquet`, `[a.parquet]`."""
    if key.rsplit(".", 1)[-1] not in PATHS or not value:
        return value
    return [os.path.abspath(os.path.expanduser(one)) for one in (value if isinstance(value, list) else [value])]
