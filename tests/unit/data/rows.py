"""Rows of data files, and what their examples train."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from alphaapollo.config.schema import PreferenceData, RewardData, SftData
from alphaapollo.data.examples import LoadedExamples, load_examples
from alphaapollo.data.preference_examples import PreferenceExample, load_preferences
from alphaapollo.data.rendering import Renderer
from alphaapollo.types import Row
from tests.builders import write_rows

IM_END = 1
SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "2+2=?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "it is 5"}
EARLIER = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
THOUGHT = {"role": "assistant", "content": "<think>hm</think>4"}
CHAT_AS_TEXT = '[{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]'


def text_of(renderer: Renderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode(ids, skip_special_tokens=False)


def trained(renderer: Renderer, row: Row) -> list[str]:
    """Stretches of text that are trained on."""
    stretches = groupby(zip(row.token_ids, row.action_mask, strict=True), key=lambda pair: pair[1])
    return [text_of(renderer, [token for token, _ in pairs]) for is_trained, pairs in stretches if is_trained]


class Loader:
    """Loads rows as a file of examples, pairs or labelled answers."""

    def __init__(self, folder: Path, renderer: Renderer, suffix: str = ".jsonl"):
        self.renderer, self._path = renderer, folder / f"data{suffix}"

    def sft(self, *rows: dict[str, Any], max_samples: int = -1, **data: Any) -> LoadedExamples:
        return load_examples(write_rows(self._path, rows), self.renderer, SftData(**data), max_samples)

    def pairs(self, *rows: dict[str, Any], **data: Any) -> LoadedExamples[PreferenceExample]:
        return load_preferences(write_rows(self._path, rows), self.renderer, RewardData(**data))

    def labelled(self, *rows: dict[str, Any]) -> LoadedExamples[PreferenceExample]:
        return load_preferences(write_rows(self._path, rows), self.renderer, PreferenceData(), single_answers=True)

    def trained(self, *rows: dict[str, Any], **data: Any) -> list[list[str]]:
        """Stretches of each example's text that SFT trains."""
        return [trained(self.renderer, row) for row in self.sft(*rows, **data).examples]
