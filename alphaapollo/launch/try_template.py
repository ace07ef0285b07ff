"""The chat template on one chat of the data before anything starts: what never ends, or does not show what is asked."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from alphaapollo.data.rendering import PLACEHOLDER, Renderer
from alphaapollo.types import Message

TIME_LIMIT = 60.0  # seconds for a chat
ResultT = TypeVar("ResultT")


def try_template(renderer: Renderer, chat: list[Message], time_limit: float = TIME_LIMIT) -> None:
    """ValueError: the template takes too long, refuses the chat, or leaves out what its last message says."""
    marked = Message(role=chat[-1]["role"], content=chat[-1]["content"] + PLACEHOLDER)
    text = in_time(lambda: renderer.text([*chat[:-1], marked]), time_limit)
    if PLACEHOLDER not in text:
        raise ValueError(
            f"the chat template leaves out what the last message of a prompt (of the role {marked['role']!r}) says, so "
            f"that all prompts are the same to the model: {text[:80]!r}. Mend the tokenizer's chat_template."
        )


def in_time(render: Callable[[], ResultT], time_limit: float = TIME_LIMIT) -> ResultT:
    """What `render` returns or raises; ValueError: it does not end. Its thread is then left behind."""
    done: Future[ResultT] = Future()

    def work() -> None:
        try:
            done.set_result(render())
        except BaseException as error:  # noqa: BLE001 raised again by result()
            done.set_exception(error)

    Thread(target=work, daemon=True, name="chat template").start()
    try:
        return done.result(time_limit)
    except TimeoutError:
        raise ValueError(
            f"the chat template has not rendered one chat within {time_limit:g} s. Mend the tokenizer's chat_template: "
            "a loop in it may have no end."
        ) from None
