"""Prompts that are texts, which no chat template renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alphaapollo.data.rendering import Renderer
from alphaapollo.types import Prompt


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
