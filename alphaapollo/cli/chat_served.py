"""`alphaapollo chat --url URL`: plain chat with the model of an OpenAI-compatible server; tools are the server's."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from alphaapollo.config.errors import report_error

KEY = "OPENAI_API_KEY"


def talk_to_server(url: str, name: str | None) -> int:
    """Until the person ends it. Returns 0, or 2 where the server cannot be talked to."""
    if importlib.util.find_spec("openai") is None:
        return report_error(ValueError("chat --url needs the package openai: pip install 'alphaapollo[judge]'."), 2)
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=url, api_key=os.environ.get(KEY, "none"))
    past: list[dict[str, str]] = []
    try:
        model = name or next(iter(client.models.list())).id
        print(f"{model} at {url}. /new begins anew, /quit or Ctrl-D ends.")
        while (text := _ask()) != "/quit":
            if text == "/new":
                past = []
            elif text:
                past.append({"role": "user", "content": text})
                past.append({"role": "assistant", "content": _answer(client, model, past)})
    except StopIteration:
        return report_error(ValueError(f"the server at {url} names no model. Give one: --name MODEL."), 2)
    except OpenAIError as error:
        return report_error(ValueError(f"the server at {url}: {error}. Is it up (alphaapollo serve), and {KEY} its key?"), 2)
    return 0


def _answer(client: Any, model: str, past: list[dict[str, str]]) -> str:
    """Shown as it comes."""
    parts = []
    for chunk in client.chat.completions.create(model=model, messages=past, stream=True):
        part = chunk.choices[0].delta.content if chunk.choices else None
        if part:
            parts.append(part)
            print(part, end="", flush=True)
    print()
    return "".join(parts)


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return "/quit"
