"""Try the chat template on one chat of the data, before workers start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from alphaapollo.data.rendering import PLACEHOLDER, Renderer
from alphaapollo.types import Message

TIME_LIMIT = 60.0  # seconds per chat
ResultT = TypeVar("ResultT")


def try_template(renderer: Renderer, chat: list[Message], time_limit: float = TIME_LIMIT) -> None:
    """Render one chat. Raises ValueError if the chat template takes longer than `time_limit` seconds, rejects the chat,
    or drops the content of the last message."""
    marked: Message = {**chat[-1], "content": chat[-1]["content"] + PLACEHOLDER}
    text = render_with_time_limit(lambda: renderer.render_chat([*chat[:-1], marked]), time_limit)
    if PLACEHOLDER not in text:
        raise ValueError(
            f"the chat template drops the content of the last message (role {marked['role']!r}), so all prompts look "
            f"the same to the model: {text[:80]!r}. Fix the tokenizer's chat_template."
        )


def render_with_time_limit(render: Callable[[], ResultT], time_limit: float = TIME_LIMIT) -> ResultT:
    """Call `render`, a function that renders a chat, in a thread. Raises ValueError after `time_limit` seconds."""
    done: Future[ResultT] = Future()

    def render_and_store_result() -> None:
        try:
            done.set_result(render())
        except BaseException as error:  # noqa: BLE001 raised again by result()
            done.set_exception(error)

    Thread(target=render_and_store_result, daemon=True, name="chat template").start()
    try:
        return done.result(time_limit)
    except TimeoutError:
        raise ValueError(
            f"the chat template did not render a chat within {time_limit:g} s. Fix the tokenizer's chat_template: "
            "it may have an endless loop."
        ) from None
