"""Chats to token ids, once; tokens to text for people and graders. The only home of the tokenizer.

    prompt_ids(chat)  -> action (sampled) -> delta_ids(messages) -> action -> ...     append-context trajectory

Each piece is tokenized on its own and never again: sampled tokens stay as they were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from alphaapollo.types import Message, Prompt
from alphaapollo.utils.hub import is_local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left", "right", "drop"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
TEMPLATE_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What a template's own code may raise besides Jinja's errors: some add a map to a text, or count too far."""
PLACEHOLDER = "\u2063action\u2063"  # stands for the sampled text while a template is rendered


class Renderer:
    """The tokenizer and chat template of one model. `template_arguments` are given to the template at every rendering.

    Raises:
        ValueError: a chat is rendered and the tokenizer has no chat template, or the template refuses the chat.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_arguments: Mapping[str, Any] = MappingProxyType({})
    ):
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments)

    def prompt_ids(self, content: list[Message] | str) -> list[int]:
        """A chat with the assistant's generation prompt; a text as it is (after BOS, if the tokenizer adds one)."""
        return self.prompt_ids_batch([content])[0]

    def prompt_ids_batch(self, contents: Sequence[list[Message] | str]) -> list[list[int]]:
        """prompt_ids of many prompts at once, tokenized in parallel."""
        texts = [self.text(content) if isinstance(content, list) else content for content in contents]
        chats = {isinstance(content, list) for content in contents}
        assert len(chats) <= 1, "chats and texts are rendered apart"
        return self.encode(texts, add_special_tokens=False in chats)

    def delta_ids(self, messages: list[Message], last_token: int | None = None) -> list[int]:
        """What the environment adds between two actions: the end of the assistant's turn, `messages`, the generation
        prompt. `last_token` is the action's last token: if it already ended the turn, the end is not added again.
        """
        ids = self._after_action(messages, add_generation_prompt=True)
        return ids[1:] if ids and ids[0] == last_token else ids

    def with_turn_end(self, token_ids: list[int]) -> list[int]:
        """An answer that was ended is followed by what the chat template writes after its end (a line break, say); one
        that was cut off stays so."""
        end = self.turn_end_ids
        return token_ids + end[1:] if end[:1] == token_ids[-1:] else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; for people, graders and environments, never to be encoded again."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def text(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        """The chat as the template writes it, special tokens included."""
        return self._text(messages, add_generation_prompt)

    def _text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, but the prompts are chats. Use an instruct model, add a "
                "chat_template to the tokenizer, or make the prompts plain texts."
            )
        import jinja2

        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_arguments,
            )
            rendered.encode()  # half a surrogate pair has no tokens
        except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
            roles = [message["role"] for message in messages]
            raise ValueError(f"the chat template refuses a chat with the roles {roles}: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _after_action(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        """What the template writes after an assistant's text, when `messages` follow."""
        chat = [Message(role="user", content="?"), Message(role="assistant", content=PLACEHOLDER), *messages]
        return self.encode([self.text(chat, add_generation_prompt).partition(PLACEHOLDER)[2]])[0]

    @cached_property
    def rewrites_history(self) -> bool:
        """Does the chat template show an earlier answer otherwise than it was given (e.g. without its thoughts)? Then
        prompt + action + delta is not what the template would write for the same chat."""
        asked = [Message(role="user", content="?")]
        action = f"<think>\n{PLACEHOLDER}\n</think>\n\n{PLACEHOLDER}"
        chat = [*asked, Message(role="assistant", content=action), Message(role="user", content="?")]
        return not self.text(chat).startswith(self.text(asked) + action)

    def encode(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of each text; a rendered chat has its special tokens already."""
        return self.tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant's turn: the tokenizer's EOS and, where it is a special token of its own,
        the one that the chat template puts after the turn."""
        ids = [self.tokenizer.eos_token_id]
        ids += [token for token in self.turn_end_ids[:1] if token in self.tokenizer.all_special_ids]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @cached_property
    def turn_end_ids(self) -> list[int]:
        """What the chat template writes after an assistant's last text; nothing without a template."""
        return self._after_action([], add_generation_prompt=False) if self.tokenizer.chat_template else []

    @property
    def pad_token_id(self) -> int:
        """The padding token, else EOS, else 0: padding is always masked."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0


def unused_template_arguments(arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One line for each argument that the chat template does not read, so that it changes nothing."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return []
    return [
        f"data.apply_chat_template_kwargs.{name} has no effect: the tokenizer's chat template does not read it."
        for name in arguments
        if not re.search(rf"\b{re.escape(name)}\b", template)
    ]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id or a local folder.

    Raises:
        ValueError: no such folder, no tokenizer in it, or an unreadable one.
    """
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{path}: has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). Save one beside the model with "
            "tokenizer.save_pretrained, or point actor_rollout_ref.model.tokenizer_path at one."
        )
    if not folder.is_dir() and is_local_path(path):
        raise ValueError(f"{path}: no such folder; give a folder with a tokenizer, or a hub id.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        raise ValueError(f"{path}: its tokenizer cannot be loaded ({type(error).__name__}: {error}).") from error
    if len(tokenizer) < 2:  # what from_pretrained makes of a folder with a config but without a vocabulary
        raise ValueError(f"{path}: its tokenizer has {len(tokenizer)} tokens; the vocabulary file is missing.")
    return tokenizer


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """How long the prompts (or examples) of a run are."""

    total: int  # prompts
    too_long: int  # of them, over the limit: dropped, or cut
    longest: int  # tokens


def fit_prompts(
    prompts: Sequence[Prompt], renderer: Renderer, max_prompt_length: int, truncation: Truncation
) -> tuple[list[Prompt], LengthSummary]:
    """Hold the prompts against the limit, once, before training.

    drop leaves long ones out; left and right keep them, to be cut by `cut_prompt` when rendered.

    Raises:
        ValueError: truncation is error and a prompt is too long, or nothing is left.
    """
    lengths = [len(ids) for ids in renderer.prompt_ids_batch([prompt.content for prompt in prompts])]
    rows = [prompt.id for prompt in prompts]
    counts = check_length_limit(lengths, rows, "prompts", "data.max_prompt_length", max_prompt_length, truncation)
    if truncation != "drop":
        return list(prompts), counts
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length], counts


def check_length_limit(
    lengths: Sequence[int], rows: Sequence[int], what: str, key: str, limit: int, truncation: Truncation
) -> LengthSummary:
    """Count what is over the limit of a config key (ValueError: truncation=error and some are, or drop and all are)."""
    long = [index for index, length in enumerate(lengths) if length > limit]
    counts = LengthSummary(len(lengths), len(long), max(lengths, default=0))
    if long and truncation == "error":
        raise ValueError(
            f"{len(long)} of {len(lengths)} {what} are longer than {key}={limit}: the first is row {rows[long[0]]} "
            f"with {lengths[long[0]]} tokens, the longest has {counts.longest}. Raise {key}, or set data.truncation to "
            "drop, left or right."
        )
    if long and truncation == "drop" and len(long) == len(lengths):
        raise ValueError(
            f"all {len(lengths)} {what} are longer than {key}={limit} (the shortest has {min(lengths)} tokens), so "
            f"data.truncation=drop leaves none. Raise {key}."
        )
    return counts


def cut_prompt(token_ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """A rendered prompt (or an example) within the limit: left cuts its start, right its end."""
    if len(token_ids) <= max_length:
        return token_ids
    assert truncation in ("left", "right"), "measure stops at such a prompt, or it is dropped"
    return token_ids[-max_length:] if truncation == "left" else token_ids[:max_length]
