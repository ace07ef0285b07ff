"""examples.jsonl of a run folder: the first examples that a fine-tuning run trains on, one JSON line each:

    {"data_source": "maths", "margin": 0.0, "rows": [{"label": "chosen", "ref_logp": -3.2,
                                                      "parts": [[4, false, "7 + 7?"], [2, true, "14<|im_end|>"]]}, ...]}

A part has consecutive tokens, of which all or none are trained on: number of tokens, whether they are trained on, text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from alphaapollo.runs.record_files import read_records, write_records
from alphaapollo.types import Row

EXAMPLES = "examples.jsonl"
NUM_LOGGED = 32  # maximum number of examples in the file


class ExampleRow(msgspec.Struct, frozen=True):
    """Token sequence of an example."""

    parts: list[tuple[int, bool, str]]  # number of tokens, whether they are trained on, text
    label: str = ""  # chosen, rejected, desirable or undesirable; empty for SFT
    ref_logp: float | None = None  # summed log-prob of the trained tokens under the reference model, in nats


class LoggedExample(msgspec.Struct, frozen=True):
    """Example of a fine-tuning run: one sequence (SFT, KTO), or a pair."""

    rows: list[ExampleRow]
    data_source: str = ""
    margin: float = 0.0  # margin of the chosen over the rejected response, from the data


def make_example_row(row: Row, decode: Callable[[Sequence[int]], str]) -> ExampleRow:
    """Describe a token sequence. decode: returns the text of tokens, with special tokens."""
    parts = []
    for is_trained, group in groupby(zip(row.action_mask, row.token_ids, strict=True), key=lambda pair: bool(pair[0])):
        ids = [token_id for _, token_id in group]
        parts.append((len(ids), is_trained, decode(ids)))
    return ExampleRow(parts)


def write_examples(folder: Path, examples: Iterable[LoggedExample]) -> None:
    write_records(folder / EXAMPLES, examples)


def read_examples(folder: Path) -> list[LoggedExample]:
    """Read examples.jsonl. Damaged lines are skipped."""
    return read_records(folder / EXAMPLES, LoggedExample)
