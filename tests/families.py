"""Special tokens, flags, generation_config.json and chat formats of sixteen model families (families.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEPSEEK_BOS = "<｜begin▁of▁sentence｜>"  # noqa: RUF001


@dataclass(frozen=True)
class Family:
    """A family's format, and what is expected of it: texts of tokens, as decoded with special tokens."""

    name: str
    special: tuple[str, ...]  # flagged as special; others are added tokens without the flag
    eos: str
    template: str
    stops: tuple[str, ...]
    after: str  # what follows an answer that sampled its end, if the user writes "?"
    added: tuple[str, ...] = ()
    generation_ends: tuple[str, ...] = ()  # eos_token_id of generation_config.json; empty: no file
    end: str | None = None  # token that SFT trains after an answer; None: EOS
    calls: str | None = None  # the call f(a=1) without its end; None: the template shows no tools
    result: str = ""  # what follows a sampled call, if the result is "3"
    rewrites_history: bool = False

    @property
    def trained_end(self) -> str:
        return self.end or self.eos


def _join_lines(text: str, fragments: dict[str, str]) -> str:
    return "".join(fragments.get(line, line) for line in map(str.strip, text.splitlines()))


def _load_families() -> tuple[Family, ...]:
    loaded: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    fragments = {name: _join_lines(text, {}) for name, text in loaded["fragments"].items()}
    families = []
    for fields in loaded["families"]:
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        families.append(Family(**given | {"template": _join_lines(fields["template"], fragments)}))
    return tuple(families)


FAMILIES = _load_families()
