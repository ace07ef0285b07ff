"""Prepare prompts and examples of a data file: texts without a chat template, and length limits.

data.truncation: drop or truncate those above a limit, or raise an error.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from alphaapollo.data.cache import load_or_compute
from alphaapollo.data.images import collect_images
from alphaapollo.data.rendering import Renderer
from alphaapollo.types import Prompt

BATCH = 4096  # texts that are tokenized at a time
Truncation = Literal["error", "left", "right", "drop"]


def prepare_texts(prompts: Sequence[Prompt], renderer: Renderer) -> tuple[list[Prompt], list[str]]:
    """Remove a BOS that the tokenizer adds again from prompts that are texts. Returns the prompts, and notices about
    texts that a model does not continue as its users expect."""
    texts, tokenizer = [prompt.content for prompt in prompts if isinstance(prompt.content, str)], renderer.tokenizer
    if not texts:
        return [*prompts], []
    notices, bos, eos = list[str](), tokenizer.bos_token or "", tokenizer.eos_token or ""
    adds_bos = bos and renderer.encode([""], add_special_tokens=True)[0][:1] == [tokenizer.bos_token_id]
    if adds_bos and (doubled := sum(text.startswith(bos) for text in texts)):
        notices.append(f"{doubled} prompts start with {bos}, which the tokenizer adds. They get it once.")
        prompts = [replace(one, content=str(one.content).removeprefix(bos)) for one in prompts]
    if eos and (ended := sum(text.rstrip().endswith(eos) for text in texts)):
        notices.append(
            f"{ended} prompts end with {eos}, so that there is nothing to continue. Remove it from the data."
        )
    if tokenizer.chat_template and not any(token in texts[0] for token in tokenizer.added_tokens_encoder):
        notices.append(
            "the prompts are texts, so the chat template of the tokenizer is not applied. For chats, make each prompt "
            'a list of messages: [{"role": "user", "content": TEXT}].'
        )
    return [*prompts], notices


def apply_length_limit(
    prompts: Sequence[Prompt], renderer: Renderer, max_prompt_length: int, truncation: Truncation
) -> tuple[list[Prompt], int]:
    """Apply data.max_prompt_length. Returns the remaining prompts, and the number of prompts that are too long.

    truncation=drop removes these prompts. With left or right, `truncate_prompt` truncates them when they are rendered.
    Raises ValueError if truncation is error and a prompt is too long, if a prompt with images would be truncated, if
    the model's processor rejects an image, or if no prompt remains.
    """

    def count_tokens() -> array[int]:
        parts = (prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH))
        return array("q", chain.from_iterable(map(renderer.count_prompt_tokens, parts)))

    lengths = load_or_compute(renderer, [(one.content, one.template_arguments) for one in prompts], count_tokens)
    has_images = [bool(collect_images(prompt.content)) for prompt in prompts]
    limit = ("prompts", "data.max_prompt_length", max_prompt_length, truncation)
    locations = [prompt.location or f"row {prompt.id}" for prompt in prompts]
    num_long = check_length_limit(lengths, locations, *limit, has_images)
    if truncation != "drop":
        return list(prompts), num_long
    return [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length], num_long


def check_length_limit(
    lengths: Sequence[int],
    locations: Sequence[str],
    plural_noun: str,
    key: str,
    limit: int,
    truncation: Truncation,
    has_images: Sequence[bool] = (),
) -> int:
    """Count the lengths over `limit`, the value of the config key `key`. Images are dropped, but not truncated.

    Raises ValueError if some are too long and truncation=error, or all are too long and truncation=drop.
    """
    chosen = [index for index, has_image in enumerate(has_images) if has_image]
    if chosen and truncation != "drop":
        rows = [locations[index] for index in chosen]
        check_length_limit(
            [lengths[index] for index in chosen], rows, f"{plural_noun} with images", key, limit, "error"
        )
    long = [index for index, length in enumerate(lengths) if length > limit]
    if long and truncation == "error":
        choices = "drop, left or right" if plural_noun in ("prompts", "examples") else "drop"
        if "images" in plural_noun:
            choices += " (images are not cut)"
        raise ValueError(
            f"{len(long)} of {len(lengths)} {plural_noun} are longer than {key}={limit}. The first is "
            f"{locations[long[0]]} with {lengths[long[0]]} tokens; the longest has {max(lengths)}. Raise {key}, or "
            f"set data.truncation to {choices}."
        )
    if long and truncation == "drop" and len(long) == len(lengths):
        raise ValueError(
            f"all {len(lengths)} {plural_noun} are longer than {key}={limit} (the shortest has {min(lengths)} tokens), "
            f"so data.truncation=drop leaves none. Raise {key}."
        )
    return len(long)


def truncate_prompt(token_ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Truncate a prompt to max_length tokens. truncation=left removes tokens at its start, right at its end."""
    if len(token_ids) <= max_length:
        return token_ids
    assert truncation in ("left", "right"), "check_length_limit rejects or drops such a prompt"
    return token_ids[-max_length:] if truncation == "left" else token_ids[:max_length]
