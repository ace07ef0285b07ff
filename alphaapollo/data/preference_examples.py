"""Preference data to token rows: pairs of answers to one prompt, or single answers with a label.

A row has one of

    prompt (chat or text), chosen, rejected      written by prepare_preference; answers are texts or messages
    chosen, rejected                             complete chats; their common prefix is the prompt
    prompt, response, label                      single answers; label true: desirable

Masks are exact, as for supervised examples (data/sft_examples.py). Both answers of a pair follow the same prompt
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.config.schema import PairData, PreferenceData, RewardData
from alphaapollo.data.files import DataRow, column_names, convert_rows, read_rows, to_file_list
from alphaapollo.data.prompts import read_chat
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.sft_examples import TextPiece, make_text_pieces, read_text, split_answer, tokenize_examples
from alphaapollo.data.sources import LoadedExamples, apply_max_length, read_examples
from alphaapollo.types import Message, Row
from alphaapollo.utils.seeds import derive_seed


@dataclass
class PreferenceExample:
    """A pair, or a single answer."""

    rows: list[Row]  # a pair: the chosen, then the rejected answer
    good: list[bool]  # per row: chosen, or labelled desirable
    data_source: str = ""
    margin: float = 0.0  # margin of the chosen answer, from the data
    unrelated: Row | None = None  # the prompt with an answer to another prompt, for KTO's KL estimate
    ref_logps: list[float] | None = None  # the reference's summed log-probs of `rows` and `unrelated`, once computed

    @property
    def scored(self) -> list[Row]:
        """Rows that the reference must score."""
        return self.rows if self.unrelated is None else [*self.rows, self.unrelated]

    @property
    def longest(self) -> int:
        return max(len(row.token_ids) for row in self.scored)


@dataclass(frozen=True)
class PreferenceRow:
    """A data row split into text pieces: two sides for a pair, one for a single answer."""

    sides: list[list[TextPiece]]
    data_source: str
    margin: float = 0.0
    good: bool = True


def load_pairs(
    files: str | Sequence[str], renderer: Renderer, data: PairData, max_samples: int = -1
) -> LoadedExamples[PreferenceExample]:
    """The pairs of parquet or jsonl files, in order; at most `max_samples` if it is above 0 (stream.choose_rows).

    Raises:
        ValueError: a file is missing, unreadable or empty, lacks the columns (lists those it has), or has bad rows
            (names them: empty or equal answers, different prompts); a side is too long and truncation is error.
    """
    read = read_examples(files, lambda path: _read_pairs(path, renderer, data), max_samples, data)
    rows = iter(tokenize_examples([side for _, row in read for side in row.sides], renderer))
    pairs = [
        (number, PreferenceExample([next(rows), next(rows)], [True, False], row.data_source, row.margin))
        for number, row in read
    ]
    return apply_max_length(files, pairs, lambda pair: pair.longest, "pairs", data)


def load_labelled(
    files: str | Sequence[str], renderer: Renderer, data: PreferenceData, max_samples: int = -1
) -> LoadedExamples[PreferenceExample]:
    """Load single answers, each with an unrelated answer for KTO. A row with a pair gives two single answers.

    Raises:
        ValueError: as load_pairs; also for invalid labels, and if all labels are equal.
    """
    read = read_examples(files, lambda path: _read_singles(path, renderer, data), max_samples, data)
    rows = iter(tokenize_examples([side for _, row in read for side in row.sides], renderer))
    answers = [
        (number, PreferenceExample([next(rows)], [good], row.data_source))
        for number, row in read
        for good in ((row.good,) if len(row.sides) == 1 else (True, False))
    ]
    fitted = apply_max_length(files, answers, lambda answer: answer.longest, "answers", data)
    kept = fitted.examples
    if len({answer.good[0] for answer in kept}) == 1:
        kind = "desirable" if kept[0].good[0] else "undesirable"
        raise ValueError(
            f"{', '.join(to_file_list(files))}: all {len(kept)} answers are {kind}, so there is nothing to compare. "
            f"Provide rows of both labels ({data.label_key!r}: true and false), or pairs of {data.chosen_key!r} and "
            f"{data.rejected_key!r}."
        )
    others = make_unrelated_rows([answer.rows[0] for answer in kept], data.seed, data.max_length)
    for answer, other in zip(kept, others, strict=True):
        answer.unrelated = other
    return fitted


def make_unrelated_rows(answers: Sequence[Row], seed: int, max_length: int) -> list[Row]:
    """Combine each prompt with the answer to another prompt, drawn by `seed` and truncated to max_length.

    Raises:
        ValueError: all prompts are the same.
    """
    prompts = [tuple(row.token_ids[: row.response_start]) for row in answers]
    if len({*prompts}) < 2:
        raise ValueError(
            "KTO estimates the KL to the reference on answers to other prompts (arXiv 2402.01306), but all prompts of "
            "the data are the same. Give data with several prompts, or another preference.loss."
        )
    order = np.random.default_rng(derive_seed(seed, "unrelated")).permutation(len(answers)).tolist()
    other = dict(zip(order, [*order[1:], order[0]], strict=True))
    rows = []
    for index, prompt in enumerate(prompts):
        partner = other[index]
        while prompts[partner] == prompt:
            partner = other[partner]
        rows.append(_join_answer(prompt, answers[partner], max_length))
    return rows


def _join_answer(prompt: Sequence[int], answer: Row, max_length: int) -> Row:
    start, end = answer.response_start, answer.response_start + max(1, max_length - len(prompt))
    ids = [*prompt, *answer.token_ids[start:end]]
    mask = [*[0] * len(prompt), *answer.action_mask[start:end]]
    return Row(ids, mask, [0.0] * len(ids), [len(ids) - 1])


def _read_pairs(path: str, renderer: Renderer, data: PairData) -> list[PreferenceRow]:
    rows = read_rows(path)
    columns = column_names(rows)
    if not {data.chosen_key, data.rejected_key} <= {*columns}:
        more = ""
        if isinstance(data, PreferenceData) and {data.response_key, data.label_key} <= {*columns}:
            more = " Single answers with labels need preference.loss=kto."
        raise ValueError(
            f"{path}: needs columns {data.chosen_key!r} and {data.rejected_key!r}; it has {', '.join(sorted(columns))}."
            f"{more} Set data.chosen_key and data.rejected_key, or convert the file to pairs with python -m "
            f"examples.data_preprocess.prepare_preference --data_source {path} (docs/data.md)."
        )
    return convert_rows(path, rows, lambda row: _read_pair(row, renderer, data))


def _read_singles(path: str, renderer: Renderer, data: PreferenceData) -> list[PreferenceRow]:
    rows = read_rows(path)
    columns = column_names(rows)
    if {data.response_key, data.label_key} <= {*columns}:
        return convert_rows(path, rows, lambda row: _read_labelled(row, renderer, data))
    if {data.chosen_key, data.rejected_key} <= {*columns}:
        return convert_rows(path, rows, lambda row: _read_pair(row, renderer, data))
    raise ValueError(
        f"{path}: needs columns {data.prompt_key!r}, {data.response_key!r} and {data.label_key!r}, or "
        f"{data.chosen_key!r} and {data.rejected_key!r}; it has {', '.join(sorted(columns))}. Set "
        "data.response_key and data.label_key."
    )


def _read_pair(row: DataRow, renderer: Renderer, data: PairData) -> PreferenceRow:
    chosen, rejected = (_read_answer(row, key) for key in (data.chosen_key, data.rejected_key))
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError(f"one of {data.chosen_key!r} and {data.rejected_key!r} is a text, and the other messages.")
    if chosen == rejected:
        raise ValueError(f"{data.chosen_key!r} and {data.rejected_key!r} are the same.")
    prompt = row.get(data.prompt_key)
    if isinstance(chosen, list) and isinstance(rejected, list) and chosen[0]["role"] != "assistant":
        prompt, chosen, rejected = _split_chats(chosen, rejected, data)
    sides = [_make_pieces(row, prompt, answer, renderer, data) for answer in (chosen, rejected)]
    return PreferenceRow(sides, _read_source(row), margin=_read_margin(row, data))


def _read_labelled(row: DataRow, renderer: Renderer, data: PreferenceData) -> PreferenceRow:
    label = row.get(data.label_key)
    if label not in (True, False):  # 1 and 0, too
        raise ValueError(f"{data.label_key!r} is {label!r}; it must be true (desirable) or false.")
    answer = _read_answer(row, data.response_key)
    return PreferenceRow(
        [_make_pieces(row, row.get(data.prompt_key), answer, renderer, data)], _read_source(row), good=bool(label)
    )


def _read_answer(row: DataRow, key: str) -> str | list[Message]:
    value = row.get(key)
    return read_chat(value, repr(key)) if isinstance(value, list) and value else read_text(row, key)


def _split_chats(
    chosen: list[Message], rejected: list[Message], data: PairData
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split complete chats into prompt, chosen and rejected."""
    both = zip(chosen, rejected, strict=False)
    same = next((place for place, pair in enumerate(both) if pair[0] != pair[1]), min(len(chosen), len(rejected)))
    ends = [chat[same]["role"] if same < len(chat) else "no message" for chat in (chosen, rejected)]
    if ends != ["assistant", "assistant"]:
        raise ValueError(
            f"{data.chosen_key!r} and {data.rejected_key!r} answer different prompts: message {same}, the first that "
            f"differs, has the roles {ends[0]} and {ends[1]}. Both must be assistant."
        )
    return chosen[:same], chosen[same:], rejected[same:]


def _make_pieces(
    row: DataRow, prompt: object, answer: str | list[Message], renderer: Renderer, data: PairData
) -> list[TextPiece]:
    if not isinstance(prompt, list):
        text = read_text(row, data.prompt_key)
        if isinstance(answer, str):
            return make_text_pieces(text, answer)
        raise ValueError(f"{data.prompt_key!r} is a text, and its answers are messages: make the prompt a chat.")
    chat = read_chat(prompt, repr(data.prompt_key))
    if chat[-1]["role"] == "assistant":
        raise ValueError(
            f"{data.prompt_key!r} ends with an assistant message. Remove it; the answers follow the prompt."
        )
    answer_messages = [Message(role="assistant", content=answer)] if isinstance(answer, str) else answer
    if answer_messages[0]["role"] != "assistant" or answer_messages[-1]["role"] != "assistant":
        raise ValueError("an answer has to begin and to end with a message of the assistant.")
    return split_answer(chat, answer_messages, renderer)


def _read_source(row: DataRow) -> str:
    source = row.get("data_source")
    return source if isinstance(source, str) else ""


def _read_margin(row: DataRow, data: PairData) -> float:
    if not isinstance(data, RewardData):
        return 0.0
    value = row.get(data.margin_key)
    value = 0.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{data.margin_key!r} is {value!r}; it must be a number of at least 0.")
    return float(value)
