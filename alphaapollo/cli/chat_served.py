"""`alphaapollo chat --url URL`: plain chat with a model of an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from alphaapollo.config.errors import report_error

KEY = "OPENAI_API_KEY"


def chat_with_server(url: str, name: str | None) -> int:
    """Run until the user exits. Returns 0, or 2 if the server cannot be used."""
    if importlib.util.find_spec("openai") is None:
        return report_error(ValueError("chat --url needs the package openai: pip install 'alphaapollo[judge]'."), 2)
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=url, api_key=os.environ.get(KEY, "none"))
    past: list[dict[str, str]] = []
    try:
        model = name or next(iter(client.models.list())).id
        print(f"{model} at {url}. /new starts a new chat, /quit or Ctrl-D exits.")
        while (text := _ask()) != "/quit":
            if text == "/new":
                past = []
            elif text:
                past.append({"role": "user", "content": text})
                past.append({"role": "assistant", "content": _answer(client, model, past)})
    except StopIteration:
        return report_error(ValueError(f"the server at {url} lists no model. Set --name MODEL."), 2)
    except OpenAIError as error:
        return report_error(
            ValueError(f"the server at {url} failed: {error}. Check that it runs and that {KEY} is its key."),
            2,
        )
    return 0


def _answer(client: Any, model: str, past: list[dict[str, str]]) -> str:
    """Stream and print an answer."""
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
