"""Tokenize preference data: pairs of answers to one prompt, or single answers with a label.

A data row has one of these groups of columns:

    prompt (chat or text), chosen, rejected      written by prepare_preference; answers are texts or messages
    chosen, rejected                             complete chats or texts; their common prefix is the prompt
    other columns of data/formats.py             e.g. instruction, input, chosen, rejected
    prompt, response, label                      single answers; label true: desirable

The action mask marks the tokens of the answer, as for supervised examples (data/examples.py). The answers of a pair
have equal prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from alphaapollo.config.schema import PairData, PreferenceData, RewardData
from alphaapollo.data.chats import CONTEXT_COLUMNS, RowContext, count_equal_items, shorten_repr
from alphaapollo.data.examples import (
    LoadedExamples,
    RowPlace,
    apply_max_length,
    join_prompt_and_answer,
    list_text_prompts,
    make_row,
    read_answer,
    read_examples,
    tokenize_examples,
)
from alphaapollo.data.files import DataRow, to_file_list
from alphaapollo.data.formats import (
    LABELLED_FORMATS,
    PAIR_FORMATS,
    DataFormat,
    make_pair_formats,
    read_rows_in_known_format,
)
from alphaapollo.data.image_messages import ImageReader
from alphaapollo.data.prompts import list_text_notices
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.turns import TextPiece
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


def load_preferences(
    files: str | Sequence[str], renderer: Renderer, data: PairData, max_samples: int = -1, single_answers: bool = False
) -> LoadedExamples[PreferenceExample]:
    """Load and tokenize preference data; at most max_samples data rows if positive. An example is a pair, or with
    single_answers, for KTO, one labelled answer with an answer to another prompt. Raises ValueError for invalid files
    or rows, if an answer is too long and data.truncation=error, or if all labels are equal."""
    pair = (data.chosen_key, data.rejected_key)
    needed: list[tuple[str, ...]] = [(*pair, data.prompt_key)]
    names = {"chosen": data.chosen_key, "rejected": data.rejected_key, "prompt": data.prompt_key}
    formats: Sequence[DataFormat] = [*PAIR_FORMATS, *make_pair_formats(*pair)]
    if single_answers and isinstance(data, PreferenceData):
        needed, formats = [(data.response_key, data.label_key), *needed], (*LABELLED_FORMATS, *formats)
        names |= {"response": data.response_key, "label": data.label_key}
    optional = (getattr(data, "margin_key", ""), *CONTEXT_COLUMNS)
    read_rows = partial(
        read_rows_in_known_format, needed=needed, formats=formats, names=names, optional=optional, renderer=renderer
    )
    convert = partial(_parse_row, renderer=renderer, data=data, single_answers=single_answers)
    parsed_rows, findings = read_examples(files, read_rows, convert, max_samples, data)
    piece_lists = [pieces for _, (answers, _) in parsed_rows for pieces in answers]
    rows = iter(tokenize_examples(piece_lists, renderer))
    examples = list[tuple[RowPlace, PreferenceExample]]()
    for place, (_, example) in parsed_rows:
        example.rows = [next(rows) for _ in example.is_good]
        labelled_rows = zip(example.rows, example.is_good, strict=True)
        single_examples = [replace(example, rows=[row], is_good=[good]) for row, good in labelled_rows]
        examples += [(place, part) for part in (single_examples if single_answers else [example])]
    noun = "answers" if single_answers else "pairs"
    loaded = apply_max_length(files, examples, lambda example: example.longest_row_length, noun, data)
    if single_answers:
        _add_unrelated_answers(files, loaded.examples, data)
    text_notices = list_text_notices(list_text_prompts(piece_lists), renderer)
    return replace(loaded, notices=[*loaded.notices, *text_notices], findings=findings)


def _add_unrelated_answers(files: str | Sequence[str], answers: Sequence[PreferenceExample], data: PairData) -> None:
    if len({answer.is_good[0] for answer in answers}) == 1:
        kind = "desirable" if answers[0].is_good[0] else "undesirable"
        raise ValueError(
            f"{', '.join(to_file_list(files))}: all {len(answers)} answers are {kind}, so there is nothing to compare. "
            f"Provide rows of both labels (true and false), or pairs of {data.chosen_key!r} and {data.rejected_key!r}."
        )
    unrelated = make_unrelated_answers([answer.rows[0] for answer in answers], data.seed, data.max_length)
    for answer, row in zip(answers, unrelated, strict=True):
        answer.unrelated_answer = row


def make_unrelated_answers(answers: Sequence[Row], seed: int, max_length: int) -> list[Row]:
    """Combine each prompt with a random answer to a different prompt, truncated to max_length tokens in total, for
    KTO's estimate of the KL. Raises ValueError if all prompts are equal."""
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
        rows.append(make_row(ids, mask, [len(ids) - 1], images))
    return rows


def _parse_row(
    row: DataRow, renderer: Renderer, data: PairData, single_answers: bool, reader: ImageReader
) -> tuple[list[list[TextPiece]], PreferenceExample]:
    """Return the pieces of the answers of a row, each with the prompt, and the example without tokens."""
    context, source = RowContext.from_row(row, reader, data.system_prompt), row.get("data_source")
    example = PreferenceExample([], [True, False], source if isinstance(source, str) else "", _read_margin(row, data))
    prompt: object = None
    if single_answers and isinstance(data, PreferenceData) and {data.response_key, data.label_key} <= row.keys():
        if (label := row[data.label_key]) not in (True, False):  # 1 and 0 are equal to True and False
            raise ValueError(f"{data.label_key!r} is {label!r}; it must be true (desirable) or false.")
        prompt, example.is_good = row.get(data.prompt_key), [bool(label)]
        answers = [read_answer(row, data.response_key, reader)]
    else:
        prompt, *answers = _read_pair(row, data, reader)
    piece_lists = [
        pieces
        for answer in answers
        for pieces in join_prompt_and_answer(prompt, data.prompt_key, answer, context, renderer, in_one_example=True)
    ]
    return piece_lists, example


def _read_pair(
    row: DataRow, data: PairData, reader: ImageReader
) -> tuple[object, str | list[Message], str | list[Message]]:
    """Return the prompt, the chosen answer and the rejected answer of a row."""
    chosen, rejected = (read_answer(row, key, reader) for key in (data.chosen_key, data.rejected_key))
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError(
            f"{data.chosen_key!r} and {data.rejected_key!r} must both be text or both be lists of messages."
        )
    if chosen == rejected:
        raise ValueError(f"{data.chosen_key!r} and {data.rejected_key!r} are equal. Remove the row or fix one of them.")
    if isinstance(chosen, list) and isinstance(rejected, list) and chosen[0]["role"] != "assistant":
        return _split_common_prompt(chosen, rejected, data)
    if isinstance(chosen, str) and isinstance(rejected, str) and data.prompt_key not in row:
        return _split_common_text(chosen, rejected, row, data)
    return row.get(data.prompt_key), chosen, rejected


def _split_common_prompt(
    chosen: list[Message], rejected: list[Message], data: PairData
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split two complete chats into their common prompt, the chosen answer and the rejected answer."""
    split = count_equal_items(chosen, rejected)
    roles = [chat[split]["role"] if split < len(chat) else "no message" for chat in (chosen, rejected)]
    if roles != ["assistant", "assistant"]:
        raise ValueError(
            f"{data.chosen_key!r} and {data.rejected_key!r} answer different prompts: they first differ in message "
            f"{split} (roles {roles[0]} and {roles[1]}). Make all messages before the answers equal."
        )
    return chosen[:split], chosen[split:], rejected[split:]


def _split_common_text(chosen: str, rejected: str, row: DataRow, data: PairData) -> tuple[str, str, str]:
    """Split two texts into the prompt (the words with which both begin), the chosen answer and the rejected answer."""
    common = chosen[: count_equal_items(chosen, rejected)]
    end = max(common.rfind(" "), common.rfind("\n"))  # the answers begin with the space
    if not common[: max(end, 0)].strip():
        raise ValueError(
            f"there is no {data.prompt_key!r}, and {data.chosen_key!r} and {data.rejected_key!r} have no common "
            "beginning. Add a column with the prompts, or set data.prompt_key."
        )
    others = {name: row[name] for name in row if name not in (data.chosen_key, data.rejected_key, *CONTEXT_COLUMNS)}
    num_words = len(common[:end].split())
    if longer := [name for name, text in others.items() if isinstance(text, str) and len(text.split()) > num_words]:
        raise ValueError(
            f"there is no {data.prompt_key!r}. {data.chosen_key!r} and {data.rejected_key!r} begin with "
            f"{shorten_repr(common[:end])}, but {longer[0]!r} has more words and may be the prompt. Set "
            f"data.prompt_key={longer[0]}, or remove the column."
        )
    return common[:end], chosen[end:], rejected[end:]


def _read_margin(row: DataRow, data: PairData) -> float:
    if not isinstance(data, RewardData):
        return 0.0
    value = row.get(data.margin_key)
    value = 0.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{data.margin_key!r} is {value!r}; it must be a number of at least 0.")
    return float(value)
