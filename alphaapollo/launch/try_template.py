"""Trial rendering of one chat of the data with the chat template, before anything starts."""

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
    """Raise ValueError if the template takes too long, rejects the chat, or drops the last message's content."""
    marked = Message(role=chat[-1]["role"], content=chat[-1]["content"] + PLACEHOLDER)
    text = run_with_time_limit(lambda: renderer.render_chat([*chat[:-1], marked]), time_limit)
    if PLACEHOLDER not in text:
        raise ValueError(
            f"the chat template drops the content of the last message (role {marked['role']!r}), so all prompts look "
            f"the same to the model: {text[:80]!r}. Fix the tokenizer's chat_template."
        )


def run_with_time_limit(render: Callable[[], ResultT], time_limit: float = TIME_LIMIT) -> ResultT:
    """Run `render` in a thread and return its result. Raises ValueError after `time_limit` seconds."""
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
            f"the chat template has not rendered one chat within {time_limit:g} s. Fix the tokenizer's chat_template: "
            "it may have an endless loop."
        ) from None
