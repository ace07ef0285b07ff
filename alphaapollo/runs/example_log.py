"""Write and read examples.jsonl of a fine-tuning run: the first examples that it trains on, one JSON line each.

    {"data_source": "maths", "margin": 0.0, "rows": [{"label": "chosen", "ref_logp": -3.2,
                                                      "parts": [[4, false, "7 + 7?"], [2, true, "14<|im_end|>"]]}, ...]}

A part is a run of tokens that are all trained on, or all not: number of tokens, whether they are trained on, text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import msgspec

from alphaapollo.types import Row
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.redaction import find_secret_variables, redact_values

FILE = "examples.jsonl"
NUM_LOGGED = 32  # examples


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
    """Write examples.jsonl, with secrets redacted. Raises OSError if it cannot be written."""
    known = find_secret_variables()
    lines = (msgspec.json.encode(redact_values(msgspec.to_builtins(example), known)) + b"\n" for example in examples)
    with explain_write_errors("the examples", folder / FILE):
        replace_file(folder / FILE, lines)


def read_examples(folder: Path) -> list[LoggedExample]:
    """Read examples.jsonl; empty if the file is missing. Damaged lines are skipped."""
    examples = []
    with suppress(OSError):
        for line in (folder / FILE).read_bytes().splitlines():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                examples.append(msgspec.json.decode(line, type=LoggedExample))
    return examples
