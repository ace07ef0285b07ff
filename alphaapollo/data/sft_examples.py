"""Tokenize supervised examples. Their action mask marks the tokens to train on: the text of the assistant turns.

A file has either a column `messages` with chats, of which every assistant message is trained on, or the columns
`prompt` and `response` (each text or messages), or one of the formats in data/formats.py. A chat is split where the
chat template begins and ends each assistant turn, and the pieces are tokenized separately, like prompts and answers in
a rollout. The end-of-turn token is trained on, the template text after it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alphaapollo.config.schema import SftData
from alphaapollo.data.chats import read_chat
from alphaapollo.data.files import DataRow, convert_rows
from alphaapollo.data.formats import SFT_FORMATS, read_rows_in_known_format
from alphaapollo.data.image_messages import PictureReader, RowPictures
from alphaapollo.data.images import LazyImages, PictureTokens, list_unused_mark_notices
from alphaapollo.data.length_limit import Truncation, truncate_prompt
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.resolved_files import resolve_entry
from alphaapollo.data.sources import LoadedExamples, apply_max_length, read_examples
from alphaapollo.types import Message, Row


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Separately tokenized part of an example's text, e.g. one assistant turn."""

    text: str
    is_trained: bool  # whether the model is trained on the tokens of the piece
    is_chat_text: bool = True  # part of a chat; False: plain text, for which the tokenizer adds BOS and EOS
    pictures: tuple[PictureTokens, ...] = ()  # pictures whose placeholders are in the text, in order


def load_examples(
    files: str | Sequence[str], renderer: Renderer, data: SftData, max_samples: int = -1
) -> LoadedExamples[Row]:
    """Load and tokenize supervised examples; at most max_samples if positive.

    Long examples are truncated or dropped as set by data.truncation, with a notice. The action mask of an example is
    its loss mask. Raises ValueError if a file is unreadable, lacks columns or has invalid rows, if the chat template
    changes earlier turns, or if an example is too long and data.truncation=error.
    """

    notices: list[str] = []

    def read_text_pieces(path: str) -> list[list[TextPiece]]:
        needed = [(data.messages_key,), (data.prompt_key, data.response_key)]
        names = {"messages": data.messages_key, "prompt": data.prompt_key, "response": data.response_key}
        rows, converted = read_rows_in_known_format(path, needed, SFT_FORMATS, names)
        notices.extend(converted)
        reader = PictureReader(resolve_entry(path).folder, data.allow_image_urls)
        return convert_rows(path, rows, lambda row: _split_row_into_pieces(row, renderer, data, reader))

    read = read_examples(files, read_text_pieces, max_samples, data)
    rows = tokenize_examples([pieces for _, pieces in read], renderer)
    has_pictures = [bool(row.images) for row in rows]
    if renderer.images and not any(has_pictures):
        notices += list_unused_mark_notices(
            "".join(piece.text for piece in pieces if not piece.is_trained) for _, pieces in read
        )
    numbered = [(number, row) for (number, _), row in zip(read, rows, strict=True)]
    truncate = partial(_truncate_example, max_length=data.max_length, truncation=data.truncation)
    loaded = apply_max_length(files, numbered, lambda row: len(row.token_ids), "examples", data, truncate, has_pictures)
    return replace(loaded, notices=notices + loaded.notices)


def split_chat_into_pieces(messages: list[Message], renderer: Renderer) -> list[TextPiece]:
    """Render a chat and split its text into alternating pieces: text before an assistant turn, and the turn.

    Raises ValueError if the chat has no assistant message or an empty one, or if the chat template renders earlier
    turns differently when later turns exist (e.g. drops thinking).
    """
    pieces: list[TextPiece] = []
    done, num_done = "", 0
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("the chat has no assistant message to train on. Add one or remove the row.")
    for turn in turns:
        if not messages[turn]["content"].strip():
            raise ValueError(f"the assistant message {turn} is empty. Fill it or remove the row.")
        before = renderer.render_chat(messages[:turn])
        after = renderer.render_chat(messages[: turn + 1], add_generation_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise ValueError(
                f"the chat template does not append message {turn} to the text before it unchanged (e.g. it drops old "
                "thinking), so the trained tokens would differ from those that the model sees at inference. Create one "
                "row per assistant turn, or use a template that does not change earlier turns."
            )
        pictures = renderer.tokenize_pictures(messages[num_done:turn])
        new = [TextPiece(before[len(done) :], False, pictures=pictures), TextPiece(after[len(before) :], True)]
        if images := renderer.images:
            for piece in new:
                images.check_placeholders(piece.text.count(images.placeholder), len(piece.pictures))
        pieces += new
        done, num_done = after, turn + 1
    return pieces


def make_text_pieces(prompt: str, answer: str) -> list[TextPiece]:
    """Return two pieces: a prompt that is plain text, and the answer that continues it."""
    return [TextPiece(prompt, False, False), TextPiece(answer, True, False)]


def _split_row_into_pieces(row: DataRow, renderer: Renderer, data: SftData, reader: PictureReader) -> list[TextPiece]:
    messages, pictures = row.get(data.messages_key), RowPictures.from_row(row, reader)
    if messages is not None:
        if not isinstance(messages, list):
            raise ValueError(f"{data.messages_key!r} is a {type(messages).__name__}; it must be a list of messages.")
        chat = read_chat(messages, repr(data.messages_key), reader)
        return split_chat_into_pieces(pictures.place(chat), renderer)
    if row.keys() == {"text"}:  # SFT_FORMATS: plain text
        return make_text_pieces("", read_text_column(row, "text"))
    answer = read_answer(row, data.response_key, reader)
    return join_prompt_and_answer(row.get(data.prompt_key), data.prompt_key, answer, renderer, pictures)


def read_answer(row: DataRow, column: str, reader: PictureReader) -> str | list[Message]:
    """Return the text or the messages in a column. Raises ValueError if there is none or if they are malformed."""
    value = row.get(column)
    if isinstance(value, list) and value:
        return read_chat(value, repr(column), reader)
    return read_text_column(row, column)


def join_prompt_and_answer(
    prompt: object, prompt_key: str, answer: str | list[Message], renderer: Renderer, pictures: RowPictures
) -> list[TextPiece]:
    """Split a prompt and an answer, each text or messages, into pieces. Only the answer is trained on.

    Raises ValueError if the prompt is empty or ends with an assistant message, or if the answer does not fit it.
    """
    if not isinstance(prompt, list):
        text = read_text_column({prompt_key: prompt}, prompt_key)
        pictures.check_is_empty(prompt_key)
        if isinstance(answer, str):
            return make_text_pieces(text, answer)
        raise ValueError(f"{prompt_key!r} is text, but its answers are messages. Convert the prompt to a chat.")
    chat = pictures.place(read_chat(prompt, repr(prompt_key), pictures.reader))
    if chat[-1]["role"] == "assistant":
        raise ValueError(f"{prompt_key!r} ends with an assistant message. Remove it; the answers follow the prompt.")
    messages = [Message(role="assistant", content=answer)] if isinstance(answer, str) else answer
    if messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"the first and the last message of an answer have the roles {messages[0]['role']} and "
            f"{messages[-1]['role']}; both must be assistant."
        )
    pieces = split_chat_into_pieces([*chat, *messages], renderer)
    start = 2 * sum(message["role"] == "assistant" for message in chat) + 1
    if any(piece.pictures for piece in pieces[start:]):
        raise ValueError(f"the answer to {prompt_key!r} has messages with pictures. Use a column of complete chats.")
    prompt_pictures = tuple(one for piece in pieces[:start] for one in piece.pictures)
    text = "".join(piece.text for piece in pieces[:start])
    return [TextPiece(text, False, pictures=prompt_pictures), *pieces[start:]]


def read_text_column(row: DataRow, column: str) -> str:
    """Return the text in a column of a data row. Raises ValueError if the value is empty or not text."""
    value = row.get(column)
    if value is None or value == "" or (isinstance(value, str) and value.isspace()):
        raise ValueError(f"{column!r} is empty. Fill it or remove the row.")
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is a {type(value).__name__}; it must be text.")
    return value


def tokenize_examples(examples: list[list[TextPiece]], renderer: Renderer) -> list[Row]:
    """Tokenize examples, given as lists of pieces, in one call of the tokenizer, which then uses all cores."""
    pieces = [piece for example in examples for piece in example]
    tokens: dict[bool, Iterator[list[int]]] = {}
    for starts_text in (False, True):
        texts = [piece.text for piece in pieces if _is_prompt_text(piece) == starts_text]
        tokens[starts_text] = iter(renderer.encode(texts, add_special_tokens=starts_text) if texts else [])
    rows = []
    for example in examples:
        row = Row([], [], [], [])
        for piece in example:
            _append_piece(row, piece, next(tokens[_is_prompt_text(piece)]), renderer)
        pictures = tuple(one.picture for piece in example for one in piece.pictures)
        if renderer.images and pictures:
            row.images = LazyImages(renderer.images, pictures)
        end = row.turn_ends[-1] + 1
        # The first token cannot be predicted. It is an action only in a text without a prompt or BOS.
        row.token_ids, row.action_mask = row.token_ids[:end], [0, *row.action_mask[1:end]]
        row.logprobs = [0.0] * len(row.token_ids)
        rows.append(row)
    return rows


def _is_prompt_text(piece: TextPiece) -> bool:
    return not piece.is_chat_text and not piece.is_trained


def _append_piece(row: Row, piece: TextPiece, token_ids: list[int], renderer: Renderer) -> None:
    """Append the tokens of a piece to a tokenized example. Tokens after the end-of-turn token are not trained on."""
    if renderer.images:
        token_ids = renderer.images.expand_placeholders(token_ids, piece.pictures)
    eos = renderer.tokenizer.eos_token_id
    if piece.is_trained and not piece.is_chat_text and eos is not None:
        token_ids = [*token_ids, eos]
    num_trained = 0
    if piece.is_trained:
        ends = [index for index, token in enumerate(token_ids) if token in renderer.eos_token_ids]
        num_trained = ends[-1] + 1 if ends else len(token_ids)
        row.turn_ends.append(len(row.token_ids) + num_trained - 1)
    row.token_ids = [*row.token_ids, *token_ids]
    row.action_mask = [*row.action_mask, *[1] * num_trained, *[0] * (len(token_ids) - num_trained)]


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
    return Row(truncate_prompt(list(row.token_ids), max_length, truncation), mask, [0.0] * max_length, ends)
