"""Fix the date that the chat template writes, and try the template on chats of the data, before workers start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import date
from threading import Thread
from typing import TypeVar

from alphaapollo.config.keys import replace_value
from alphaapollo.config.load import flatten_maps
from alphaapollo.config.schema import Config, GenerationConfig, Model, TuningConfig
from alphaapollo.data.chats import check_chat_is_shown
from alphaapollo.data.rendering import DATE, Renderer
from alphaapollo.data.vocabulary import find_model_file
from alphaapollo.runs.resume import read_earlier_config
from alphaapollo.types import Message, Prompt

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")  # one of them has the chat template
TIME_LIMIT = 60.0  # seconds per chat
C = TypeVar("C", Config, TuningConfig, GenerationConfig)
ResultT = TypeVar("ResultT")


def fix_template_date(config: C, model: Model) -> C:
    """Return the configuration with the day that the chat template writes: that of the first start of the run. Without
    it, a run that is resumed on another day would have other prompts."""
    key, given = f"data.apply_chat_template_kwargs.{DATE}", config.data.apply_chat_template_kwargs
    files = (find_model_file(model.tokenizer_path or model.path, name) for name in TEMPLATE_FILES)
    if DATE in given or not any(file and DATE in file.read_text("utf-8", errors="replace") for file in files):
        return config
    earlier = flatten_maps(read_earlier_config(config)).get(key)
    return replace_value(config, "data.apply_chat_template_kwargs", {**given, DATE: earlier or str(date.today())})


def try_chats(renderer: Renderer, prompts: Sequence[Prompt]) -> None:
    """Try the template on each kind of chat. Raises ValueError like try_template, with the row."""
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt.content, list):
            return
        try:
            own = renderer.with_arguments(prompt.template_arguments)
            check_chat_is_shown(prompt.content, own) if number else try_template(own, prompt.content)
        except ValueError as error:
            raise ValueError(f"{prompt.location}: {error}") from error


def try_template(renderer: Renderer, chat: list[Message], time_limit: float = TIME_LIMIT) -> None:
    """Render one chat. Raises ValueError if the chat template takes longer than `time_limit` seconds, rejects the chat,
    or drops the content of a message."""
    render_with_time_limit(lambda: check_chat_is_shown(chat, renderer), time_limit)


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
