"""Try the chat template on chats of the data, and fix the date that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TypeVar

from alphaapollo.config.keys import flatten_maps, replace_value
from alphaapollo.config.schema import Config, InferenceConfig, Model, TuningConfig
from alphaapollo.data.rendering import DATE, Renderer, check_chat_is_shown
from alphaapollo.data.vocabulary import find_model_file
from alphaapollo.runs.resume import read_earlier_config
from alphaapollo.types import Prompt

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")  # one of them has the chat template
C = TypeVar("C", bound=Config | TuningConfig | InferenceConfig)


def fix_template_date(config: C, model: Model) -> C:
    """Let the chat template always write the day of the first start, because other days would give other prompts."""
    key, given = f"data.apply_chat_template_kwargs.{DATE}", config.data.apply_chat_template_kwargs
    files = (find_model_file(model.tokenizer_path or model.path, name) for name in TEMPLATE_FILES)
    if DATE in given or not any(file and DATE in file.read_text("utf-8", errors="replace") for file in files):
        return config
    earlier = flatten_maps(read_earlier_config(config)).get(key)
    return replace_value(config, "data.apply_chat_template_kwargs", {**given, DATE: earlier or str(date.today())})


def try_chats(renderer: Renderer, prompts: Sequence[Prompt]) -> None:
    """Render one chat of each kind. Raises ValueError if the chat template rejects it or drops a message."""
    for prompt in prompts:
        if not isinstance(prompt.content, list):
            return
        try:
            check_chat_is_shown(prompt.content, renderer.with_arguments(prompt.template_arguments))
        except ValueError as error:
            raise ValueError(f"{prompt.location}: {error}") from error
