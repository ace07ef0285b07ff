"""Read trajectories from the files of a run, with what the trainer computed for each token."""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alphaapollo.plugins.viewer.index import DAMAGED, make_file_name
from alphaapollo.plugins.viewer.run_folders import find_tokenizer_file
from alphaapollo.plugins.viewer.texts import list_message_texts
from alphaapollo.runs.rollout_log import TrainedRow, read_trained_rows
from alphaapollo.utils.disk import open_regular, parse_json, read_small_file
from alphaapollo.utils.hub import MAX_MODEL_TEXT
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.thoughts import find_thoughts

PART = re.compile(  # a part that never ends is the rest of the text
    r"(?P<tool><(?P<call>tool_(?:call|response|result)|python_code|local_rag|search|information|execute|code)>"
    r".*?(?:</(?P=call)>|\Z))"
    r"|(?P<answer><answer>.*?(?:</answer>|\Z))",
    re.S,
)
MAX_TOKENS = 20_000  # tokens of a sequence that are shown
MIN_EQUAL_TOKENS = 8  # tokens of the context that are shown as one, e.g. those of an image
NUM_COLORS = 4  # colors on each side of 0
MIN_SCALES = {"difference": 0.1}  # nats; smaller differences are rounding, and stay pale


@dataclass(frozen=True)
class Token:
    """Token of a sequence. Log-probs and advantage are None if they were not computed."""

    text: str
    id: int
    is_trained: bool
    engine: float | None = None
    trainer: float | None = None
    difference: float | None = None  # trainer minus engine, in nats
    advantage: float | None = None
    version: int | None = None
    color: int = 0  # -NUM_COLORS .. NUM_COLORS


class LoggedTexts(msgspec.Struct):
    """Texts of a trajectory that tables show."""

    text: str = ""
    prompt: Any = ""


_TEXTS = msgspec.json.Decoder(LoggedTexts)


def read_texts(folder: Path, row: sqlite3.Row) -> tuple[str, str]:
    """Return the last message of the prompt, and the answer, of a trajectory at its position in the file; empty texts
    if the file has changed since it was indexed."""
    with suppress(OSError, *DAMAGED), open_regular(folder / make_file_name(row["kind"], row["step"])) as file:
        file.seek(row["offset"])
        texts = _TEXTS.decode(file.read(row["bytes"]))
        return " ".join(
            list_message_texts(texts.prompt[-1:] if isinstance(texts.prompt, list) else texts.prompt)
        ), texts.text
    return "", ""


def read_record(folder: Path, row: sqlite3.Row) -> JsonObject:
    """Read a trajectory at its position in the file. Raises ValueError if the file has changed since it was indexed."""
    path = folder / make_file_name(row["kind"], row["step"])
    try:
        with open_regular(path) as file:
            file.seek(row["offset"])
            record = parse_json(file.read(row["bytes"]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read at byte {row['offset']} ({error}). Reload the page.") from None
    assert isinstance(record, dict)
    return record


def split_into_parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): thoughts, actions and results of tools, and answers in tags are parts of their own.

    >>> list(split_into_parts("<think>7 + 7</think>14"))
    [('thought', '<think>7 + 7</think>'), ('text', '14')]
    """
    end = 0
    for thought in find_thoughts(text):
        yield from _split_answer(text[end : thought.start])
        yield "thought", text[thought.start : thought.end]
        end = thought.end
    yield from _split_answer(text[end:])


def _split_answer(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a text without thoughts."""
    end = 0
    for match in PART.finditer(text):
        parts = ("text", text[end : match.start()]), (match.lastgroup or "", match[0])
        yield from (part for part in parts if part[1].strip())
        end = match.end()
    if text[end:].strip():
        yield "text", text[end:]


@lru_cache(maxsize=4)
def load_tokenizer(file: Path, _mtime: int) -> Any:
    """Load a tokenizer.json; None if it is damaged or too large."""
    from tokenizers import Tokenizer

    with suppress(Exception):  # tokenizers raises no other type
        return Tokenizer.from_buffer(read_small_file(file.resolve(), MAX_MODEL_TEXT))
    return None


def decode_tokens(folder: Path, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; its number in brackets if the run's tokenizer is not on this machine."""
    file = find_tokenizer_file(folder)
    tokenizer = load_tokenizer(file, file.stat().st_mtime_ns) if file else None
    texts = (tokenizer.decode([number], skip_special_tokens=False) if tokenizer else "" for number in ids)
    return [text or f"[{number}]" for text, number in zip(texts, ids, strict=True)]


def list_tokens(
    folder: Path, record: JsonObject, number: int, trained: TrainedRow | None, colored_by: str
) -> list[Token]:
    """List the tokens of one of the trajectory's sequences, with the values of engine and trainer.

    number: index in the record's rows. trained: what the trainer computed for this sequence, if it was trained on.
    colored_by: attribute of Token that gives the color.
    """
    row = record["rows"][number]
    ids = row["ids"][:MAX_TOKENS]
    start = row["mask"].index(1) if 1 in row["mask"] else len(row["mask"])
    versions = iter([version for version, count in row["weight_versions"] for _ in range(count)])
    tokens = []
    for at, (text, token_id) in enumerate(zip(decode_tokens(folder, ids), ids, strict=True)):
        if not row["mask"][at]:
            tokens.append(Token(text, token_id, False))
            continue
        trainer, advantage = trained.get_values(at - start) if trained else (None, None)
        engine = row["logprobs"][at]
        difference = None if trainer is None else trainer - engine
        tokens.append(Token(text, token_id, True, engine, trainer, difference, advantage, next(versions, None)))
    values = [getattr(token, colored_by) for token in tokens]
    colors = choose_colors(values, MIN_SCALES.get(colored_by, 0.0))
    return list(join_equal_tokens([replace(token, color=color) for token, color in zip(tokens, colors, strict=True)]))


def join_equal_tokens(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens, with one for each run of equal tokens that are not trained on: `<|image_pad|> x 64`."""
    for (_, is_trained), group in groupby(tokens, key=lambda token: (token.id, token.is_trained)):
        run = list(group)
        if is_trained or len(run) < MIN_EQUAL_TOKENS:
            yield from run
        else:
            yield replace(run[0], text=f"{run[0].text} x {len(run)} ")


def choose_colors(values: Sequence[float | None], min_scale: float = 0.0) -> list[int]:
    """Return a color for each value: 0 for 0, and NUM_COLORS for the 99th percentile of the absolute values, or for
    `min_scale` if it is larger."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    magnitudes = np.abs(numbers[np.isfinite(numbers)])
    scale = max(float(np.quantile(magnitudes, 0.99)), min_scale) if magnitudes.size else 0.0
    if not scale:
        return [0] * len(values)
    return [int(color) for color in np.rint(np.clip(np.nan_to_num(numbers / scale), -1, 1) * NUM_COLORS)]


def read_trained_rows_of_step(folder: Path, step: int) -> tuple[list[TrainedRow] | None, str]:
    """Return what the trainer computed for the sequences of an iteration, or None and, if the file is damaged, why."""
    path = folder / f"rollouts/trained_{step:06d}.npz"
    try:
        return (read_trained_rows(path) if path.is_file() else None), ""
    except ValueError as error:
        return None, str(error)


def find_trained_row(rows: Sequence[TrainedRow], record: JsonObject, number: int) -> TrainedRow | None:
    """Return what the trainer computed for a sequence; None if it was not trained on."""
    wanted = (record["prompt_id"], record["sample"], number)
    return next((row for row in rows if (row.prompt_id, row.sample, row.row) == wanted), None)


def compare_texts(old: str, new: str) -> list[tuple[str, str]]:
    """Compare two texts word by word. Returns parts (kind, text) with the kinds same, removed and added."""
    before, after = (re.findall(r"\w+\s*|[^\w\s]\s*|\s+", text) for text in (old, new))
    parts: list[tuple[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=len(before) > 2000).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(before[a:b])))
            continue
        parts += [("removed", "".join(before[a:b]))] if b > a else []
        parts += [("added", "".join(after[c:d]))] if d > c else []
    return parts
