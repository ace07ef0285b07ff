"""Split chats into the texts to train on: each assistant turn, and the prompt that the model sees before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alphaapollo.data.chats import (
    THOUGHT_KEYS,
    add_thoughts,
    count_equal_items,
    drop_thoughts,
    read_inline_thoughts,
    read_thoughts,
    split_answer,
)
from alphaapollo.data.images import ImageTokens
from alphaapollo.data.rendering import Renderer, check_chat_is_shown
from alphaapollo.types import Message
from alphaapollo.utils.thoughts import PAIRS, split_open_mark

EMPTY_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Separately tokenized part of an example's text, e.g. one assistant turn."""

    text: str
    is_trained: bool  # whether the model is trained on the tokens of the piece
    is_chat_text: bool = True  # part of a chat; False: plain text, for which the tokenizer adds BOS and EOS
    encoded_images: tuple[ImageTokens, ...] = ()  # images whose placeholders are in the text, in order


def split_chat(
    chat: Sequence[Message], renderer: Renderer, last_turn_only: bool = False, in_one_example: bool = False
) -> list[list[TextPiece]]:
    """Split a chat into examples. Each assistant message (turn) is trained on, unless it has `train: False` or is the
    first message of the chat, which answers nothing. last_turn_only: train only on the last of these turns.
    in_one_example: the turns are one example, as the model wrote them, even if the template rewrites earlier turns.
    Raises ValueError if there is nothing to train on, or if the template does not show a message."""
    check_chat_is_shown(chat, renderer)
    chat = [_drop_end(message, renderer) for message in chat]
    template = str(renderer.tokenizer.chat_template)
    if "</think>" not in template and any(f".{key}" in template for key in THOUGHT_KEYS):  # gpt-oss: no inline thoughts
        chat = [
            add_thoughts(drop_thoughts(message), read_thoughts(message) or read_inline_thoughts(message))
            for message in chat
        ]
    answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    turns = [index for index in answers if index > 0 and chat[index].get("train", True)]
    turns = turns[-1:] if last_turn_only else turns
    if not turns:
        excluded = "its assistant messages have the weight 0 or precede the first question"
        reason = excluded if answers else "it has no assistant message"
        raise ValueError(f"the chat has nothing to train on: {reason}. Add an answer or remove the row.")
    examples: list[list[TextPiece]] = []
    stop_ids = renderer.missing_end_ids if renderer.template_end_ids else []  # if the template ends a turn with text
    appended_stop = "".join(renderer.tokenizer.convert_ids_to_tokens(stop_ids))
    seen, num_seen = "", 0  # text and number of messages of the current example
    for turn in turns:
        prompt, answer = render_turn(chat, turn, renderer)
        if not prompt.startswith(seen) and prompt.startswith(shown := seen.removesuffix(appended_stop)):
            prompt = seen + prompt[len(shown) :]  # keep the stop token that the model writes, as in an episode
        if in_one_example and seen and not prompt.startswith(seen):
            prompt = seen + _find_text_after(seen, examples[-1][-1].text, prompt, turn)
        if not seen or not prompt.startswith(seen):
            examples.append([])
            seen, num_seen = "", 0
        encoded_images = renderer.tokenize_images(chat[num_seen:turn])
        prompt_piece = TextPiece(prompt[len(seen) :], is_trained=False, encoded_images=encoded_images)
        pieces = [prompt_piece, TextPiece(answer, is_trained=True)]
        if images := renderer.images:
            for piece in pieces:
                images.check_placeholders(piece.text.count(images.placeholder), len(piece.encoded_images))
        examples[-1] += pieces
        seen, num_seen = prompt + answer, turn + 1
    return examples


def _drop_end(message: Message, renderer: Renderer) -> Message:
    """Return a message without a stop token at the end of an assistant's content, because the template writes one."""
    text = message["content"].rstrip() if message["role"] == "assistant" else ""
    stops = renderer.tokenizer.convert_ids_to_tokens([*renderer.eos_token_ids])
    found = next((stop for stop in stops if text.endswith(stop)), "")
    return {**message, "content": text.removesuffix(found)} if found else message


def render_turn(chat: Sequence[Message], turn: int, renderer: Renderer) -> tuple[str, str]:
    """Return the prompt of an assistant turn, and the text that the model must write, including the end of the turn.
    Raises ValueError if the turn is empty, or no text of the rendered chat is the answer to the prompt."""
    message = chat[turn]
    if not (message["content"].strip() or message.get("tool_calls") or read_thoughts(message)):
        raise ValueError(f"the assistant message {turn} is empty. Fill it or remove the row.")
    prompt = renderer.render_chat(chat[:turn])
    answer = _find_answer(chat[:turn], message, prompt, renderer)
    if answer is None:  # the template drops the thoughts of earlier turns if this turn follows
        bare = [drop_thoughts(message) for message in chat[:turn]]
        answer = _find_answer(bare, message, renderer.render_chat(bare), renderer)
    if answer is None:
        raise ValueError(
            f"the rendered chat does not continue the prompt of message {turn}, which ends with {prompt[-40:]!r}. If "
            "the prompt closes the thoughts (enable_thinking=false), remove the thoughts of the message. Otherwise, "
            "use another chat_template."
        )
    return prompt, answer


def _find_answer(history: Sequence[Message], message: Message, prompt: str, renderer: Renderer) -> str | None:
    """Return the text that the model must write after a prompt; None if the rendered chat does not continue the prompt,
    or if the prompt has already closed the thoughts, but the message has some."""
    chat = [*history, message]
    shown = renderer.render_chat(chat, add_generation_prompt=False)
    start, opening = split_open_mark(prompt)
    opens_thoughts = start != prompt  # the prompt ends with the mark that opens the thoughts of the answer
    closing = PAIRS.get(opening, "</think>")
    if shown.startswith(prompt):
        answer = shown[len(prompt) :]
    elif shown.startswith(start) and opens_thoughts:  # the chat shows no thoughts, or empty ones of another format
        answer = shown[len(start) :].removeprefix(opening)
    else:
        return None
    (split,) = renderer.split_control_strings([message])  # as in `shown`
    thoughts = read_thoughts(split) or read_inline_thoughts(split)
    if thoughts and prompt.rstrip().endswith(tuple(PAIRS.values())):
        return None
    before, end, _ = answer.partition(closing)
    if not opens_thoughts and thoughts.strip() not in answer:
        answer = f"<think>\n{thoughts}\n</think>\n\n{EMPTY_THOUGHT.sub('', answer)}"
    elif opens_thoughts and not end:
        answer = f"{thoughts}\n{closing}\n\n" + answer.lstrip("\n")
    elif opens_thoughts and thoughts.strip() not in before:
        answer = thoughts + answer
    stops = renderer.tokenizer.convert_ids_to_tokens([*renderer.eos_token_ids])
    if ends := [answer.index(stop) + len(stop) for stop in stops if stop in answer]:
        return answer[: min(ends)]
    if message.get("tool_calls"):  # GLM ends a turn with the name of the next role: after a call, that of tool results
        following = renderer.render_chat([*chat, Message(role="tool", content="?")])[len(shown) :]
        if role_name := next(filter(following.startswith, stops), ""):
            return answer + role_name
    return answer + "".join(renderer.tokenizer.convert_ids_to_tokens(renderer.missing_end_ids))


def _find_text_after(seen: str, answer: str, prompt: str, turn: int) -> str:
    """Return the text of a prompt after an earlier `answer`, which is the end of `seen`. The template may have dropped
    the thoughts of this answer from the prompt."""
    start, _ = split_open_mark(seen.removesuffix(answer))
    common = count_equal_items(prompt, start)
    _, found, following = prompt[common:].partition(split_answer(answer).lstrip("\n"))
    if not found:
        raise ValueError(
            f"the chat template changes the turns before message {turn}, so they are no example together. Move these "
            "turns to the prompt."
        )
    return following
