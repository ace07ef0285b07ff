"""Read and tokenize fine-tuning examples. Their action mask marks the tokens to train on: the text of the answers.

A file of supervised examples has a column `messages` with chats, of which every assistant message is trained on, or the
columns `prompt` and `response` (each text or messages), or one of the formats in data/formats.py. A chat is split into
prompts and answers (data/turns.py), which are tokenized separately, as in a rollout. The end-of-turn token is
trained on, the template text after it is not.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

from alphaapollo.config.schema import PairData, SftData
from alphaapollo.data.chats import (
    CONTEXT_COLUMNS,
    THOUGHT_KEYS,
    RowContext,
    add_thoughts,
    read_chat,
    read_chat_text,
    read_thoughts,
)
from alphaapollo.data.files import DataRow, DataRows, convert_rows, to_file_list
from alphaapollo.data.findings import DataFinding
from alphaapollo.data.formats import SFT_FORMATS, read_rows_in_known_format
from alphaapollo.data.image_messages import ImageReader
from alphaapollo.data.images import LazyImages
from alphaapollo.data.prompts import BATCH, Truncation, check_length_limit, list_text_notices, truncate_prompt
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.stream import choose_rows
from alphaapollo.data.turns import TextPiece, split_chat
from alphaapollo.types import ImageInput, Message, Row
from alphaapollo.utils.hub import DATA_FILE

E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedExamples(Generic[E]):
    """Fine-tuning examples that were loaded from the data files."""

    examples: list[E]  # examples of all files, concatenated
    file_sizes: list[int]  # number of examples of each file
    notices: list[str]  # messages for the user
    findings: list[DataFinding] = field(default_factory=list)

    def split_by_file(self) -> list[list[E]]:
        """Return one list of examples per file."""
        ends = [sum(self.file_sizes[: index + 1]) for index in range(len(self.file_sizes))]
        return [self.examples[end - size : end] for end, size in zip(ends, self.file_sizes, strict=True)]


RowPlace = tuple[int, str]  # index of the entry of data.train_files, and place in it, e.g. "train.jsonl, row 7"


def load_examples(
    files: str | Sequence[str], renderer: Renderer, data: SftData, max_samples: int = -1
) -> LoadedExamples[Row]:
    """Load and tokenize supervised examples of at most max_samples data rows if positive. Raises ValueError for invalid
    files or rows, or if an example is too long and data.truncation=error."""
    read_rows = partial(
        read_rows_in_known_format,
        needed=[(data.messages_key,), (data.prompt_key, data.response_key)],
        formats=SFT_FORMATS,
        names={"messages": data.messages_key, "prompt": data.prompt_key, "response": data.response_key},
        optional=(*CONTEXT_COLUMNS, *THOUGHT_KEYS, "loss_mask"),
        renderer=renderer,
    )
    convert = partial(_split_row_into_pieces, renderer=renderer, data=data)
    chats, findings = read_examples(files, read_rows, convert, max_samples, data)
    notices = list[str]()
    placed_pieces = [(place, pieces) for place, examples in chats for pieces in examples]
    if len(placed_pieces) > len(chats):
        notices.append(
            f"{len(chats)} rows are {len(placed_pieces)} examples: the chat template changes earlier turns, so each "
            "assistant turn is an example with its own prompt. data.train_turns=last uses the last turns only."
        )
    piece_lists = [pieces for _, pieces in placed_pieces]
    rows = tokenize_examples(piece_lists, renderer)
    has_images = [bool(row.images) for row in rows]
    placed_rows = [(place, row) for (place, _), row in zip(placed_pieces, rows, strict=True)]
    truncate = partial(_truncate_example, max_length=data.max_length, truncation=data.truncation)
    loaded = apply_max_length(
        files, placed_rows, lambda row: len(row.token_ids), "examples", data, truncate, has_images
    )
    notices = [*notices, *loaded.notices, *list_text_notices(list_text_prompts(piece_lists), renderer)]
    return replace(loaded, notices=notices, findings=findings)


def read_examples(
    files: str | Sequence[str],
    read_rows: Callable[[str], tuple[DataRows, list[DataFinding]]],
    convert: Callable[..., T],
    max_samples: int,
    data: SftData | PairData,
) -> tuple[list[tuple[RowPlace, T]], list[DataFinding]]:
    """Read the rows of all files with `read_rows` (read_rows_in_known_format), at most max_samples if positive, and
    convert them: `convert(row, reader=ImageReader)`. Returns examples and findings. Raises ValueError for invalid rows.
    """
    examples, findings = list[tuple[RowPlace, T]](), list[DataFinding]()
    for number, path in enumerate(to_file_list(files)):
        rows, file_findings = read_rows(path)
        findings += file_findings
        reader = ImageReader(rows.source.folder, data.allow_image_urls)
        places = ((number, location) for location in rows.locations)
        examples += zip(places, convert_rows(path, rows, partial(convert, reader=reader)), strict=True)
    return choose_rows(examples, max_samples, data.seed, data.shuffle), findings


def apply_max_length(
    files: str | Sequence[str],
    examples: Sequence[tuple[RowPlace, E]],
    count_tokens: Callable[[E], int],
    plural_noun: str,
    data: SftData | PairData,
    truncate: Callable[[E], E | None] = lambda example: None,
    has_images: Sequence[bool] = (),
) -> LoadedExamples[E]:
    """Drop examples that are longer than data.max_length, or shorten them with `truncate`; examples with images are not
    shortened. Raises ValueError if an example is too long and data.truncation=error, or if no example remains."""
    lengths = [count_tokens(example) for _, example in examples]
    limit, locations = data.max_length, [location for (_, location), _ in examples]
    num_long = check_length_limit(
        lengths, locations, plural_noun, "data.max_length", limit, data.truncation, has_images
    )
    fitted = [
        (number, (example if size <= limit else truncate(example)))
        for ((number, _), example), size in zip(examples, lengths, strict=True)
    ]
    remaining = [(number, example) for number, example in fitted if example is not None]
    sizes = Counter(number for number, _ in remaining)
    action = "dropped" if data.truncation == "drop" else f"truncated ({data.truncation})"
    notice = f"{num_long} of {len(lengths)} {plural_noun} are longer than data.max_length and were {action}."
    file_sizes = [sizes[number] for number in range(len(to_file_list(files)))]
    return LoadedExamples([example for _, example in remaining], file_sizes, [notice] if num_long else [])


def make_source_names(files: str | Sequence[str]) -> list[str]:
    """Return a name for each file: as few last parts of its path as tell the files apart, e.g. "a/train", "b/train".
    The suffix is left out, unless files differ only in it. Only a file that is listed twice has the same name twice."""
    files_with_suffix = [Path(file).expanduser().absolute() for file in to_file_list(files)]
    paths = [Path(DATA_FILE.sub("", str(file))) for file in files_with_suffix]
    if len({*paths}) < len({*files_with_suffix}):
        paths = files_with_suffix
    num_parts = next(number for number in count(1) if len({path.parts[-number:] for path in paths}) == len({*paths}))
    return ["/".join(path.parts[-num_parts:]) for path in paths]


def list_text_prompts(examples: Iterable[Sequence[TextPiece]]) -> list[str]:
    """Return the prompts that are plain texts."""
    return [pieces[0].text for pieces in examples if not pieces[0].is_chat_text and pieces[0].text]


def make_text_pieces(prompt: str, answer: str) -> list[TextPiece]:
    """Return two pieces: a prompt that is plain text, and the answer that continues it."""
    make_piece = partial(TextPiece, is_chat_text=False)
    return [make_piece(prompt, is_trained=False), make_piece(answer, is_trained=True)]


def _split_row_into_pieces(
    row: DataRow, renderer: Renderer, data: SftData, reader: ImageReader
) -> list[list[TextPiece]]:
    context, thoughts = RowContext.from_row(row, reader, data.system_prompt), read_thoughts(row)
    last_turn_only = data.train_turns == "last"
    value = row.get(data.messages_key)
    messages = read_chat_text(value) or value
    if messages is not None:
        if not isinstance(messages, list):
            raise ValueError(f"{data.messages_key!r} is a {type(messages).__name__}; it must be a list of messages.")
        if isinstance(masks := row.get("loss_mask"), list):  # LLaMA-Factory: a weight for each message
            if len(masks) != len(messages):
                raise ValueError(f"'loss_mask' has {len(masks)} values for {len(messages)} messages. Write one each.")
            messages = [{**message, "loss_mask": weight} for message, weight in zip(messages, masks, strict=True)]
        chat = _add_missing_thoughts(context.read_chat(messages, data.messages_key), thoughts)
        return split_chat(chat, renderer.with_arguments(context.template_arguments), last_turn_only)
    if not row.keys() & {data.prompt_key, data.response_key}:  # SFT_FORMATS: plain text
        if data.system_prompt:
            raise ValueError("data.system_prompt is for chats, but the row is a plain text. Remove one of them.")
        return [make_text_pieces("", read_text_column(row, "text").removeprefix(renderer.added_bos))]
    answer, prompt = read_answer(row, data.response_key, reader), row.get(data.prompt_key)
    return join_prompt_and_answer(prompt, data.prompt_key, answer, context, renderer, thoughts, last_turn_only)


def _add_missing_thoughts(chat: Sequence[Message], thoughts: str) -> list[Message]:
    """Add thoughts to the last message, if it is an assistant's and has none."""
    *before, last = chat
    is_complete = last["role"] != "assistant" or bool(read_thoughts(last))
    return [*before, (last if is_complete else add_thoughts(last, thoughts))]


def read_answer(row: DataRow, column: str, reader: ImageReader) -> str | list[Message]:
    """Return the text or the messages in a column. Raises ValueError if there is none or if they are malformed."""
    value = read_chat_text(row.get(column)) or row.get(column)
    if value and isinstance(value, list | dict):
        return read_chat(value if isinstance(value, list) else [value], repr(column), reader)
    return read_text_column(row, column)


def join_prompt_and_answer(
    prompt: object,
    prompt_key: str,
    answer: str | list[Message],
    context: RowContext,
    renderer: Renderer,
    thoughts: str = "",
    last_turn_only: bool = False,
    in_one_example: bool = False,
) -> list[list[TextPiece]]:
    """Split a prompt and an answer, each text or messages, into the pieces of examples (split_chat). Only the answer,
    with the row's `thoughts`, is trained on. Raises ValueError if the prompt is empty or ends with an assistant, or the
    answer does not fit it."""
    prompt = read_chat_text(prompt) or prompt
    if not isinstance(prompt, list):
        text = read_text_column({prompt_key: prompt}, prompt_key)
        if context.needs_chat or "tools" in renderer.template_arguments:
            prompt = [Message(role="user", content=text)]
        else:
            context.check_has_no_images(prompt_key)
            if isinstance(answer, str):
                return [make_text_pieces(text, (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + answer)]
            raise ValueError(f"{prompt_key!r} is text, but its answers are messages. Convert the prompt to a chat.")
    chat = context.read_chat(prompt, prompt_key)
    if chat[-1]["role"] == "assistant":
        raise ValueError(f"{prompt_key!r} ends with an assistant message. Remove it; the answers follow the prompt.")
    answers = [Message(role="assistant", content=answer)] if isinstance(answer, str) else answer
    if answers[0]["role"] != "assistant" or answers[-1]["role"] != "assistant":
        raise ValueError(
            f"the first and the last message of an answer have the roles {answers[0]['role']} and "
            f"{answers[-1]['role']}; both must be assistant."
        )
    if any(message.get("images") for message in answers):
        raise ValueError(f"the answer to {prompt_key!r} has messages with images. Use a column of complete chats.")
    given: list[Message] = [{**message, "train": False} for message in chat]
    row_renderer = renderer.with_arguments(context.template_arguments)
    return split_chat([*given, *_add_missing_thoughts(answers, thoughts)], row_renderer, last_turn_only, in_one_example)


def read_text_column(row: DataRow, column: str) -> str:
    """Return the text in a column of a data row. Raises ValueError if the value is empty or not text."""
    value = row.get(column)
    if value is None or value == "" or (isinstance(value, str) and value.isspace()):
        raise ValueError(f"{column!r} is empty. Fill it or remove the row.")
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is a {type(value).__name__}; it must be text.")
    return value


def tokenize_examples(examples: list[list[TextPiece]], renderer: Renderer) -> list[Row]:
    """Tokenize examples (lists of pieces) in batches: the tokenizer uses all cores, but its results are large."""
    batches = (examples[start : start + BATCH] for start in range(0, len(examples), BATCH))
    return [row for batch in batches for row in _tokenize_batch(batch, renderer)]


def _tokenize_batch(examples: list[list[TextPiece]], renderer: Renderer) -> list[Row]:
    pieces = [piece for example in examples for piece in example]
    gets_bos = [not piece.is_chat_text and not piece.is_trained for piece in pieces]  # the start of a plain text
    tokens: dict[bool, Iterator[list[int]]] = {}
    for with_bos in (False, True):
        texts = [piece.text for piece, is_start in zip(pieces, gets_bos, strict=True) if is_start == with_bos]
        tokens[with_bos] = iter(renderer.encode(texts, add_special_tokens=with_bos) if texts else [])
    piece_tokens = (next(tokens[with_bos]) for with_bos in gets_bos)
    eos, stop_ids, rows = renderer.tokenizer.eos_token_id, {*renderer.eos_token_ids}, list[Row]()
    for example in examples:
        ids, mask, ends = list[int](), list[int](), list[int]()
        for piece, token_ids in zip(example, piece_tokens, strict=False):
            if renderer.images:
                token_ids = renderer.images.expand_placeholders(token_ids, piece.encoded_images)
            ids += token_ids
            lacks_end = not piece.is_chat_text and stop_ids.isdisjoint(token_ids[-1:])
            if piece.is_trained and lacks_end and eos is not None:
                ids.append(eos)
            mask += [int(piece.is_trained)] * (len(ids) - len(mask))
            ends += [len(ids) - 1] if piece.is_trained else []
        mask[0] = 0  # the first token, e.g. of a text without BOS, cannot be predicted: it has no context
        encoded_images = tuple(image.encoded_image for piece in example for image in piece.encoded_images)
        images = LazyImages(renderer.images, encoded_images) if renderer.images and encoded_images else ()
        rows.append(make_row(ids, mask, ends, images))
    return rows


def make_row(ids: Sequence[int], mask: Sequence[int], ends: list[int], images: Sequence[ImageInput] = ()) -> Row:
    """Return a row that no engine sampled. It has arrays, because lists would need several times their memory."""
    return Row(array("i", ids), array("b", mask), array("d", bytes(8 * len(ids))), ends, images=images)


def _truncate_example(row: Row, max_length: int, truncation: Truncation) -> Row | None:
    """Truncate a tokenized example. Returns None if truncation=drop, or if no token to train on remains."""
    if truncation == "drop":
        return None
    assert not row.images, "check_length_limit rejects or drops such an example"
    mask = truncate_prompt(list(row.action_mask), max_length, truncation)
    mask[0] = 0  # the first token cannot be predicted, because it has no context
    if 1 not in mask:
        return None
    shift = len(row.token_ids) - max_length if truncation == "left" else 0
    ends = [end - shift for end in row.turn_ends if 0 < end - shift < max_length]
    return make_row(truncate_prompt(list(row.token_ids), max_length, truncation), mask, ends)
