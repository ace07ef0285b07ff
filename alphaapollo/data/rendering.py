"""Convert chats to token ids with the chat template, and decode tokens for display and graders.

    encode_prompt(chat) -> sampled tokens -> encode_observation(messages) -> sampled tokens -> ...

The token ids of a multi-turn episode are this concatenation. Sampled tokens are decoded, but never encoded again.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import date
from functools import cached_property
from itertools import chain, dropwhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from alphaapollo.data.chat_template import apply_chat_template
from alphaapollo.data.chats import drop_thoughts, reads_arguments_as_text, write_arguments_as_text
from alphaapollo.data.images import (
    ImageProcessor,
    ImageTokens,
    check_images_are_supported,
    collect_images,
    make_content_parts,
)
from alphaapollo.data.thought_marks import MarkFinder
from alphaapollo.data.vocabulary import SPLIT, make_control_pattern, read_end_token_ids, split_control_text
from alphaapollo.types import ChatMessage, EncodedImage, ImageInput, Json, JsonObject, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = "strftime_now"  # function that a chat template calls for the date
PLACEHOLDER = "\u2063action\u2063"  # replaces the sampled text in a chat that is rendered


class Renderer:
    """Tokenizer and chat template of a model.

    Methods that render a chat raise ValueError if the tokenizer has no chat template or the template rejects the chat.

    Args:
        template_arguments: variables for the chat template (data.apply_chat_template_kwargs). `strftime_now` is the
            day, e.g. 2026-11-26, that a template which calls this function writes; by default today.
        images: the model's image processor; None for a text model, for which images raise ValueError.
        model_path: the model, if it is not where the tokenizer was loaded from. Both folders' generation_config.json
            are read.
    """

    skips_special_tokens = True  # whether `decode` leaves special tokens out

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_arguments: Mapping[str, object] = MappingProxyType({}),
        images: ImageProcessor | None = None,
        model_path: str = "",
    ):
        self.tokenizer = tokenizer
        self.model_path = model_path
        day = template_arguments.get(DATE)
        dates = {DATE: date.fromisoformat(day).strftime} if isinstance(day, str) else {}
        self.template_arguments = {**template_arguments, **dates}
        self.images = images
        self.control_strings, self.control_strings_of_texts = Counter[str](), Counter[str]()
        self.checked_chats: set[tuple[object, ...]] = set()  # kinds of chats that check_chat_is_shown has checked

    def with_arguments(self, arguments: Mapping[str, object]) -> Self:
        """Return a copy with more variables for the chat template, e.g. the tools of a data row."""
        if not arguments:
            return self
        other = copy(self)
        other.template_arguments = {**self.template_arguments, **arguments}
        return other

    def encode_prompt(self, content: list[Message] | str) -> list[int]:
        """Tokenize a chat and its generation prompt, or a text (with BOS if the tokenizer adds it)."""
        return self.expand_placeholders(self._encode_unexpanded([content])[0], content)

    def encode_for_prompt(self, content: list[Message] | str, prompt: Prompt) -> list[int]:
        """Tokenize a chat or a text with the tools and variables of a prompt's row."""
        return self.with_arguments(prompt.template_arguments).encode_prompt(content)

    def count_prompt_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the lengths of prompts without decoding images. Raises ValueError with the row if the model's
        processor rejects an image or a text contains the placeholder."""
        renderers = [self.with_arguments(prompt.template_arguments) for prompt in prompts]
        encoded = self._encode_unexpanded([prompt.content for prompt in prompts], renderers)
        lengths = []
        for ids, prompt in zip(encoded, prompts, strict=True):
            try:
                lengths.append(self._count_expanded(ids, collect_images(prompt.content)))
            except ValueError as error:
                raise ValueError(f"{prompt.location or f'row {prompt.id}'}: {error}") from error
        return lengths

    def prepare_images(self, content: Sequence[ChatMessage] | str) -> tuple[ImageInput, ...]:
        """Return the prepared images of a chat, in order. Raises ValueError if an image cannot be read."""
        check_images_are_supported(content, self.images)
        return tuple(map(self.images.prepare, collect_images(content))) if self.images else ()

    def tokenize_images(self, content: Sequence[ChatMessage]) -> tuple[ImageTokens, ...]:
        """Return the images of a chat with their tokens, in order. Raises ValueError if an image cannot be read."""
        pairs = zip(collect_images(content), self.prepare_images(content), strict=True)
        return tuple(ImageTokens(encoded_image, image.token_ids) for encoded_image, image in pairs)

    def expand_placeholders(self, token_ids: list[int], content: Sequence[ChatMessage] | str) -> list[int]:
        """Replace the placeholder of each image of `content` by the tokens of the image."""
        if self.images is None:
            return token_ids
        return self.images.expand_placeholders(token_ids, self.prepare_images(content))

    def _count_expanded(self, token_ids: list[int], encoded_images: Sequence[EncodedImage]) -> int:
        """Return the length that a prompt has after its placeholders are expanded."""
        if self.images is None:
            return len(token_ids)
        self.images.check_placeholders(token_ids.count(self.images.placeholder_id), len(encoded_images))
        return len(token_ids) + sum(self.images.count_tokens(encoded_image) - 1 for encoded_image in encoded_images)

    def _encode_unexpanded(
        self, contents: Sequence[list[Message] | str], renderers: Sequence[Renderer] = ()
    ) -> list[list[int]]:
        """Tokenize prompts with one placeholder per image. renderers: one per prompt; empty: this one for all."""
        pairs = zip(contents, renderers or [self] * len(contents), strict=True)
        texts = [renderer.render_chat(content) if isinstance(content, list) else content for content, renderer in pairs]
        are_chats = [isinstance(content, list) for content in contents]
        assert all(are_chats) or not any(are_chats), "chats and texts cannot be mixed"
        return self.encode(texts, add_special_tokens=not all(are_chats))

    def encode_observation(self, messages: list[Message], last_sampled_token: int | None = None) -> list[int]:
        """Tokenize what follows sampled tokens: end of the assistant turn, `messages` of the environment, and
        generation prompt. The end of the turn is left out if it is the last sampled token."""
        if "tools" not in self.template_arguments:
            check_chat_is_shown([Message(role="user", content="?"), *messages], self)
        ids = self.expand_placeholders(self._encode_following_messages(messages, add_generation_prompt=True), messages)
        return self.skip_turn_end(ids, last_sampled_token)

    def skip_turn_end(self, following: list[int], last_sampled_token: int | None) -> list[int]:
        """Return `following`, the tokens after an answer, without the template's end of the turn if the model has
        sampled this or another stop token. A token that also starts the next message, e.g. GLM's <|user|>, is left out
        only if it is the sampled token."""
        end = next((index for index, token in enumerate(following) if token in self._marker_ids), None)
        if end is None or last_sampled_token not in self.eos_token_ids:
            return following
        template_end = self.template_end_ids  # a text, without stop token, if there are missing_end_ids
        if template_end and self.missing_end_ids and following[: len(template_end)] == template_end:
            return following[len(template_end) :]
        is_end = following[end] in (last_sampled_token, *self._closing_ids)
        return following[end + 1 :] if is_end else following

    def find_turn_end(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens from the first end of a turn on; empty without one."""
        ends = {*self.eos_token_ids, *self._closing_ids}
        return [*dropwhile(lambda token: token not in ends, token_ids)]

    def append_turn_end(self, token_ids: list[int]) -> list[int]:
        """If the last token is the end-of-turn token, append what the chat template has after it, e.g. a newline."""
        turn_end = self.turn_end_ids
        marker = next((index for index, token in enumerate(turn_end) if token in self._marker_ids), 0)
        ends_with_marker = turn_end[marker : marker + 1] == token_ids[-1:]
        return token_ids + turn_end[marker + 1 :] if ends_with_marker else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text without special tokens and without a stop token at the end, for display, graders and
        environments (never re-encoded)."""
        has_stop = bool(token_ids) and token_ids[-1] in self.eos_token_ids
        return self.decode_raw(token_ids[:-1] if has_stop else token_ids, self.skips_special_tokens)

    def decode_raw(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode all tokens, e.g. of an answer that did not end. Special tokens are shown, by default."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(token_ids), **options))

    def render_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """Convert a chat to text with the chat template, including special tokens."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, but the prompts are chats. Use an instruct model, add a "
                "chat_template to the tokenizer, or use plain texts as prompts."
            )
        check_images_are_supported(messages, self.images)
        chat = [make_content_parts(message) if message.get("images") else message for message in messages]
        if any(message.get("tool_calls") for message in chat) and self._reads_arguments_as_text:
            chat = [write_arguments_as_text(message) for message in chat]
        arguments = self.split_tools(self.template_arguments)
        return self._apply_template(self.split_control_strings(chat), add_generation_prompt, arguments)

    def split_tools(self, arguments: Mapping[str, object]) -> JsonObject:
        """Return variables for the chat template, with the control strings in the texts of `tools` split, so that they
        are encoded as ordinary text."""
        pattern, tools = self._control_patterns["user"], arguments.get("tools")
        return {**arguments, **({"tools": split_control_text(tools, pattern, Counter())} if tools else {})}

    def render_prompt(self, prompt: Prompt) -> str:
        """Convert the chat of a prompt to text, with the tools and variables of its row. A text is unchanged."""
        renderer, content = self.with_arguments(prompt.template_arguments), prompt.content
        return content if isinstance(content, str) else renderer.render_chat(content)

    def split_control_strings(self, chat: Sequence[ChatMessage]) -> list[Any]:
        """Return messages with the control strings in their texts split, so that they are encoded as ordinary text."""
        patterns = [self._control_patterns.get(message["role"], self._control_patterns["user"]) for message in chat]
        pairs = zip(chat, patterns, strict=True)
        return [split_control_text(message, pattern, self.control_strings) for message, pattern in pairs]

    def _apply_template(
        self, chat: Sequence[ChatMessage], add_generation_prompt: bool, arguments: Mapping[str, Json] | None = None
    ) -> str:
        variables = self.template_arguments if arguments is None else arguments
        return apply_chat_template(self.tokenizer, chat, add_generation_prompt, variables)

    @cached_property
    def _reads_arguments_as_text(self) -> bool:
        return reads_arguments_as_text(self._apply_template)

    def _encode_following_messages(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        """Tokenize what the chat template renders after the text of an assistant turn: end of turn, then `messages`."""
        chat = [Message(role="user", content="?"), Message(role="assistant", content=PLACEHOLDER), *messages]
        return self.encode([self.render_chat(chat, add_generation_prompt).partition(PLACEHOLDER)[2]])[0]

    @cached_property
    def marks(self) -> MarkFinder:
        """Finder of the marks of thoughts that texts of answers lack."""
        return MarkFinder(self.tokenizer, self._apply_template, self.skips_special_tokens)

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the chat template changes earlier answers, e.g. removes their thinking."""
        question = [Message(role="user", content="?")]
        action = "{0}\n{2}\n{1}\n\n{2}".format(*self.marks.pair, PLACEHOLDER)
        chat = [*question, Message(role="assistant", content=action), Message(role="user", content="?")]
        return not self.render_chat(chat).startswith(self.render_chat(question) + action)

    def encode(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Tokenize each text. The text of a rendered chat needs add_special_tokens=False. With add_special_tokens=True,
        a text gets a single BOS if the tokenizer adds it."""
        if add_special_tokens:
            texts = [text.removeprefix(self.added_bos) for text in texts]
            for text in texts:
                self.control_strings_of_texts.update(self._control_patterns["user"].findall(text))
        encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False)
        return [
            [*chain(*self.encode(text.split(SPLIT)))] if SPLIT in text else ids
            for text, ids in zip(texts, encoded["input_ids"], strict=True)
        ]

    @cached_property
    def added_bos(self) -> str:
        """BOS token that the tokenizer adds to texts; empty if it adds none."""
        ids = self.tokenizer([""], add_special_tokens=True, return_attention_mask=False)["input_ids"][0]
        bos = self.tokenizer.bos_token_id
        return str(self.tokenizer.bos_token) if bos is not None and ids[:1] == [bos] else ""

    def template_reads(self, name: str) -> bool:
        """Whether the chat template has the name of a variable."""
        return bool(re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)))

    def list_control_notices(self) -> list[str]:
        """Return notices about the control strings in the chats and texts rendered so far."""
        kinds = (
            (self.control_strings, "Messages", "They are ordinary text, so that they do not end or start a turn."),
            (self.control_strings_of_texts, "Text prompts", "They stay control tokens. Use messages for a chat."),
        )
        return [
            f"{texts} contain {strings.total()} control strings, e.g. {next(iter(strings))}. {effect}"
            for strings, texts, effect in kinds
            if strings
        ]

    @cached_property
    def _control_patterns(self) -> dict[str, re.Pattern[str]]:
        """Patterns of control strings by role; other roles are like the user. The assistant may write special tokens
        that do not start or end a turn, e.g. those of tool calls."""
        question, answer = Message(role="user", content=PLACEHOLDER), Message(role="assistant", content=PLACEHOLDER)
        frame = set[int]()  # tokens that start or end turns
        with suppress(ValueError):  # the template rejects this chat
            shown = self._apply_template([question, answer, question], True) if self.tokenizer.chat_template else ""
            frame = ({*self.encode([shown])[0]} & self._marker_ids) | {*self.eos_token_ids}
        added, template = self.tokenizer.added_tokens_decoder, str(self.tokenizer.chat_template)
        markers = {
            token for token in self._marker_ids & {*added} if added[token].special or added[token].content in template
        }
        id_sets = (markers | frame, frame, self._marker_ids)
        forbidden, framing, known = ({*self.tokenizer.convert_ids_to_tokens([*ids])} for ids in id_sets)
        tokens_and_known = {"user": (forbidden, known), "tool": (forbidden, ()), "assistant": (framing, known)}
        return {role: make_control_pattern(*arguments) for role, arguments in tokens_and_known.items()}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an assistant turn: EOS, the ids in generation_config.json, and the chat template's
        first token with a name after an answer. Raises ValueError if generation_config.json cannot be read."""
        ids = [self.tokenizer.eos_token_id]
        for path in dict.fromkeys((str(self.tokenizer.name_or_path), self.model_path)):
            ids += [token for token in read_end_token_ids(path) if token < len(self.tokenizer)]
        ids += self._find_marker(self.template_end_ids)
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @property
    def turn_end_ids(self) -> list[int]:
        """Token ids after the last assistant turn, with a token that stops sampling; empty without a template."""
        return [*self.template_end_ids, *self.missing_end_ids]

    @cached_property
    def template_end_ids(self) -> list[int]:
        """Token ids that the chat template adds after the last assistant turn; empty without a template."""
        chat = [Message(role="user", content="?"), Message(role="assistant", content=PLACEHOLDER)]
        shown = self._apply_template(chat, add_generation_prompt=False) if self.tokenizer.chat_template else ""
        return self.encode([shown.partition(PLACEHOLDER)[2]])[0] if shown else []

    @cached_property
    def missing_end_ids(self) -> list[int]:
        """Token to append to the last answer of a chat: the stop token that starts the next user message, or EOS. Empty
        if the template itself ends a turn with a stop token. It may end a turn with nothing (GLM) or with a newline."""
        if not self.tokenizer.chat_template or {*self.eos_token_ids} & {*self.template_end_ids}:
            return []
        question = self._encode_following_messages([Message(role="user", content="?")], add_generation_prompt=True)
        tokens = [*self._find_marker(question), *self.eos_token_ids]
        return [token for token in tokens if token in self.eos_token_ids][:1]

    def describe_stops(self) -> str:
        """Return the tokens that end a turn."""
        return ", ".join(map(str, self.tokenizer.convert_ids_to_tokens([*self.eos_token_ids]))) or "none"

    def list_end_notices(self) -> list[str]:
        """Return a notice if the chat template ends a turn with text, at which no engine stops."""
        if not (self.missing_end_ids and self.template_end_ids):
            return []
        end, added = self.decode_raw(self.template_end_ids), self.decode_raw(self.missing_end_ids)
        return [f"The chat template ends a turn with {end!r}, which stops no engine, so fine-tuning adds {added}."]

    @cached_property
    def _closing_ids(self) -> set[int]:
        """Tokens that only end a message: the first tokens with a name after a last answer and after a user message."""
        if not self.tokenizer.chat_template:
            return set()
        question = self.render_chat([Message(role="user", content=PLACEHOLDER)], add_generation_prompt=False)
        after = self.encode([question.rpartition(PLACEHOLDER)[2]])[0]
        return {*self._find_marker(self.template_end_ids), *self._find_marker(after)}

    def _find_marker(self, token_ids: Sequence[int]) -> list[int]:
        """Return the first token with a name, e.g. `<|im_end|>`, as a list; empty without one."""
        return [token for token in token_ids if token in self._marker_ids][:1]

    @cached_property
    def _marker_ids(self) -> set[int]:
        """Ids of special tokens, and of added tokens whose names are not plain words, e.g. `<tool_call>`."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {
            *self.tokenizer.all_special_ids,
            *(token_id for token_id, token in added if re.search(r"[^\w\s]", token.content)),
        }


def make_template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the chat template, which config.json of an exported model contains."""
    return hashlib.blake2b(str(tokenizer.chat_template).encode(), digest_size=8).hexdigest()


def check_chat_is_shown(chat: Sequence[Message], renderer: Renderer) -> None:
    """Raise ValueError if the chat template does not show the content or the calls of a message. Renders the chat with
    other contents, once for each sequence of roles."""
    kind = tuple(
        (message["role"], bool(message["content"].strip()), len(message.get("tool_calls", []))) for message in chat
    )
    if kind in renderer.checked_chats:
        return
    probes, marks = list[JsonObject](), dict[str, str]()
    for index, message in enumerate(chat):
        probe: JsonObject = {**drop_thoughts(message)}
        if message["content"].strip() and not message.get("images"):
            probe["content"] = mark = f"message{index}x"
            marks[mark] = f"message {index} of the role {message['role']!r}"
        for number, call in enumerate(calls := message.get("tool_calls", [])):
            mark = f"call{index:02}x{number:02}"  # also as id, which some templates show instead
            marked = {**call, "id": mark, "function": {**call["function"], "name": mark}}
            probe["tool_calls"] = [*probe["tool_calls"][:number], marked, *calls[number + 1 :]]
            marks[mark] = f"the tool calls of message {index}"
        probes.append(probe)
    shown = renderer.render_chat(probes)
    if hidden := next((mark for mark in marks if mark not in shown), None):
        raise ValueError(
            f"the chat template does not show {marks[hidden]}. Remove it, write it into a message that is shown, e.g. "
            "of the role user, or use another chat_template."
        )
    renderer.checked_chats.add(kind)
