"""Tokenize preference data: pairs of answers to one prompt, or single answers with a label.

A data row has one of these groups of columns:

    prompt (chat or text), chosen, rejected      written by prepare_preference; answers are texts or messages
    chosen, rejected                             complete chats or texts; their common prefix is the prompt
    prompt, response, label                      single answers; label true: desirable

The action mask marks the tokens of the answer, as for supervised examples (data/sft_examples.py). The answers of a pair
have equal prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from alphaapollo.config.schema import PairData, PreferenceData, RewardData
from alphaapollo.data.chat_turns import TextPiece
from alphaapollo.data.chats import CONTEXT_COLUMNS
from alphaapollo.data.files import DataRow, DataRows, list_column_names, to_file_list
from alphaapollo.data.formats import LABELLED_FORMATS, DataFormat, read_rows_in_known_format
from alphaapollo.data.image_messages import ImageReader
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.resolved_files import resolve_entry
from alphaapollo.data.sft_examples import (
    RowContext,
    join_prompt_and_answer,
    list_text_notices,
    read_answer,
    tokenize_examples,
)
from alphaapollo.data.sources import LoadedExamples, apply_max_length, read_examples
from alphaapollo.types import Message, Row
from alphaapollo.utils.seeds import derive_seed


@dataclass
class PreferenceExample:
    """Tokenized pair of answers, or tokenized single answer with a label. Each token sequence includes the prompt."""

    rows: list[Row]  # [chosen, rejected] of a pair, or one answer
    is_good: list[bool]  # for each row: the answer is chosen, or labelled desirable
    data_source: str = ""
    margin: float = 0.0  # margin of the chosen over the rejected answer, from the data
    unrelated_answer: Row | None = None  # the prompt with an answer to another prompt, for KTO's KL estimate
    ref_logps: list[float] | None = None  # summed reference log-probs of `rows` and `unrelated_answer`

    @property
    def rows_for_reference(self) -> list[Row]:
        """Token sequences whose log-probs under the reference model a loss may need."""
        return self.rows if self.unrelated_answer is None else [*self.rows, self.unrelated_answer]

    @property
    def longest_row_length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(row.token_ids) for row in self.rows_for_reference)


@dataclass(frozen=True)
class PreferenceTexts:
    """Texts of a data row before tokenization: two answers if the row is a pair, else one, each with the prompt."""

    texts: list[list[TextPiece]]  # for each answer: pieces of the prompt and of the answer
    data_source: str
    margin: float = 0.0
    is_desirable: bool = True  # label of a single answer


def load_pairs(
    files: str | Sequence[str], renderer: Renderer, data: PairData, max_samples: int = -1
) -> LoadedExamples[PreferenceExample]:
    """Load and tokenize pairs of answers; at most max_samples if positive.

    Raises ValueError if a file is unreadable, lacks columns or has invalid rows (e.g. empty or equal answers), or if an
    answer is too long and data.truncation=error.
    """
    notices: list[str] = []
    read = read_examples(files, lambda path: _read_file(path, renderer, data, notices), max_samples, data)
    texts = [text for _, row in read for text in row.texts]
    rows = iter(tokenize_examples(texts, renderer))
    pairs = [
        (place, PreferenceExample([next(rows), next(rows)], [True, False], row.data_source, row.margin))
        for place, row in read
    ]
    fitted = apply_max_length(files, pairs, lambda pair: pair.longest_row_length, "pairs", data)
    return replace(fitted, notices=[*notices, *fitted.notices, *list_text_notices(texts, renderer)])


def load_labelled_answers(
    files: str | Sequence[str], renderer: Renderer, data: PreferenceData, max_samples: int = -1
) -> LoadedExamples[PreferenceExample]:
    """Load and tokenize single answers with labels for KTO; at most max_samples data rows if positive.

    A pair becomes two single answers. Each example also gets an answer to another prompt (make_unrelated_answers).
    Raises ValueError like load_pairs, and if a label is invalid or all labels are equal.
    """
    notices: list[str] = []
    read = read_examples(files, lambda path: _read_file(path, renderer, data, notices, True), max_samples, data)
    texts = [text for _, row in read for text in row.texts]
    rows = iter(tokenize_examples(texts, renderer))
    placed = [
        (place, PreferenceExample([next(rows)], [good], row.data_source))
        for place, row in read
        for good in ((row.is_desirable,) if len(row.texts) == 1 else (True, False))
    ]
    fitted = apply_max_length(files, placed, lambda answer: answer.longest_row_length, "answers", data)
    fitting = fitted.examples
    if len({answer.is_good[0] for answer in fitting}) == 1:
        kind = "desirable" if fitting[0].is_good[0] else "undesirable"
        raise ValueError(
            f"{', '.join(to_file_list(files))}: all {len(fitting)} answers are {kind}, so there is nothing to compare. "
            f"Provide rows of both labels ({data.label_key!r}: true and false), or pairs of {data.chosen_key!r} and "
            f"{data.rejected_key!r}."
        )
    unrelated = make_unrelated_answers([answer.rows[0] for answer in fitting], data.seed, data.max_length)
    for answer, row in zip(fitting, unrelated, strict=True):
        answer.unrelated_answer = row
    return replace(fitted, notices=[*notices, *fitted.notices, *list_text_notices(texts, renderer)])


def make_unrelated_answers(answers: Sequence[Row], seed: int, max_length: int) -> list[Row]:
    """Combine each prompt with a random answer to a different prompt, truncated to max_length tokens in total.

    KTO estimates the KL to the reference on these answers. Raises ValueError if all prompts are equal.
    """
    prompts = [(tuple(row.token_ids[: row.response_start]), row.images) for row in answers]
    if len({*prompts}) < 2:
        raise ValueError(
            "all prompts of the data are equal, but KTO combines prompts with answers to other prompts to estimate "
            "the KL (arXiv 2402.01306). Use data with several prompts, or another preference.loss."
        )
    order = np.random.default_rng(derive_seed(seed, "unrelated")).permutation(len(answers)).tolist()
    next_index = dict(zip(order, [*order[1:], order[0]], strict=True))
    rows = []
    for index, (prompt, images) in enumerate(prompts):
        partner = next_index[index]
        while prompts[partner] == prompts[index]:
            partner = next_index[partner]
        answer, start = answers[partner], answers[partner].response_start
        end = start + max(1, max_length - len(prompt))
        ids = [*prompt, *answer.token_ids[start:end]]
        mask = [*[0] * len(prompt), *answer.action_mask[start:end]]
        rows.append(Row(ids, mask, [0.0] * len(ids), [len(ids) - 1], images=images))
    return rows


def _read_file(
    path: str, renderer: Renderer, data: PairData, notices: list[str], has_labels: bool = False
) -> tuple[DataRows, Callable[[DataRow], PreferenceTexts]]:
    """Return the rows of a file, and the function that converts a row: a pair, or with has_labels also a single answer.

    Adds messages to `notices`. Raises ValueError if the file is unreadable or lacks columns.
    """
    pair = (data.chosen_key, data.rejected_key)
    needed, names, formats = [pair], dict(zip(("chosen", "rejected"), pair, strict=True)), tuple[DataFormat, ...]()
    if has_labels and isinstance(data, PreferenceData):
        needed = [(data.response_key, data.label_key), pair]
        names = {"response": data.response_key, "label": data.label_key, "prompt": data.prompt_key}
        formats = LABELLED_FORMATS
    optional = (*_list_prompt_columns(data), getattr(data, "margin_key", ""), *CONTEXT_COLUMNS)
    rows, converted = read_rows_in_known_format(path, needed, formats, names, optional)
    notices += converted
    columns, reader = {*list_column_names(rows)}, ImageReader(resolve_entry(path).folder, data.allow_image_urls)
    if isinstance(data, PreferenceData) and needed[0] != pair and {*needed[0]} <= columns:
        return rows, partial(_parse_labelled_answer, renderer=renderer, data=data, reader=reader)
    has_prompts = bool({*_list_prompt_columns(data)} & columns)
    return rows, partial(_parse_pair, has_prompts=has_prompts, renderer=renderer, data=data, reader=reader)


def _list_prompt_columns(data: PairData) -> tuple[str, ...]:
    """Return the columns that may have the prompt of a pair: the configured one, LLaMA-Factory's and Orca's."""
    return (data.prompt_key, "conversations", "question")


def _parse_pair(
    row: DataRow, has_prompts: bool, renderer: Renderer, data: PairData, reader: ImageReader
) -> PreferenceTexts:
    chosen, rejected = (read_answer(row, key, reader) for key in (data.chosen_key, data.rejected_key))
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError(
            f"{data.chosen_key!r} and {data.rejected_key!r} must both be text or both be lists of messages."
        )
    if chosen == rejected:
        raise ValueError(f"{data.chosen_key!r} and {data.rejected_key!r} are equal. Remove the row or fix one of them.")
    prompts = (row[column] for column in _list_prompt_columns(data) if row.get(column) is not None)
    prompt, context = next(prompts, None), RowContext.from_row(row, renderer, reader)
    if isinstance(chosen, list) and isinstance(rejected, list) and chosen[0]["role"] != "assistant":
        prompt, chosen, rejected = _split_common_prompt(chosen, rejected, data)
    elif isinstance(chosen, str) and isinstance(rejected, str) and not has_prompts:
        prompt, chosen, rejected = _split_common_text(chosen, rejected, data)
    texts = [
        pieces
        for answer in (chosen, rejected)
        for pieces in join_prompt_and_answer(prompt, data.prompt_key, answer, context, in_one_example=True)
    ]
    return PreferenceTexts(texts, _read_data_source(row), margin=_read_margin(row, data))


def _parse_labelled_answer(
    row: DataRow, renderer: Renderer, data: PreferenceData, reader: ImageReader
) -> PreferenceTexts:
    label = row.get(data.label_key)
    if label not in (True, False):  # 1 and 0 are equal to True and False
        raise ValueError(f"{data.label_key!r} is {label!r}; it must be true (desirable) or false.")
    answer, context = read_answer(row, data.response_key, reader), RowContext.from_row(row, renderer, reader)
    return PreferenceTexts(
        join_prompt_and_answer(row.get(data.prompt_key), data.prompt_key, answer, context, in_one_example=True),
        _read_data_source(row),
        is_desirable=bool(label),
    )


def _split_common_prompt(
    chosen: list[Message], rejected: list[Message], data: PairData
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split two complete chats into their common prompt, the chosen answer and the rejected answer."""
    split = _count_equal_items(chosen, rejected)
    roles = [chat[split]["role"] if split < len(chat) else "no message" for chat in (chosen, rejected)]
    if roles != ["assistant", "assistant"]:
        raise ValueError(
            f"{data.chosen_key!r} and {data.rejected_key!r} answer different prompts: they first differ in message "
            f"{split} (roles {roles[0]} and {roles[1]}). Make all messages before the answers equal."
        )
    return chosen[:split], chosen[split:], rejected[split:]


def _split_common_text(chosen: str, rejected: str, data: PairData) -> tuple[str, str, str]:
    """Split two texts into their common words, which are the prompt, the chosen answer and the rejected answer."""
    common = chosen[: _count_equal_items(chosen, rejected)]
    end = max(common.rfind(" "), common.rfind("\n"))  # the answers begin with the space
    if not common[: max(end, 0)].strip():
        raise ValueError(
            f"there is no {data.prompt_key!r}, and {data.chosen_key!r} and {data.rejected_key!r} have no common "
            "beginning. Add a column with the prompts, or set data.prompt_key."
        )
    return common[:end], chosen[end:], rejected[end:]


def _count_equal_items(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))


def _read_data_source(row: DataRow) -> str:
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
