"""Connection settings for OpenAI-compatible servers, shared by the judge and by self-evolution."""

from __future__ import annotations

import base64
import importlib.util
import os
from typing import Any

from alphaapollo.runs.rollout_log import find_image_extension, read_image_bytes
from alphaapollo.types import IMAGE_MARK, ChatMessage, JsonObject

MALFORMED_RESPONSE_ERRORS = (ValueError, TypeError, AttributeError, IndexError)
"""Exceptions raised when a response is not OpenAI-compatible; the client accepts any JSON."""


def make_connection_options(section: str, base_url: str, api_key_env: str) -> dict[str, Any]:
    """Return `base_url` and `api_key` of openai.AsyncOpenAI. section: configuration section, for the ValueErrors."""
    if importlib.util.find_spec("openai") is None:
        raise ValueError(f"{section} needs the openai package. Run `pip install -e '.[judge]'` in the clone.")
    key = os.environ.get(api_key_env, "")
    if not key and not base_url:
        raise ValueError(
            f"{section}.api_key_env: the environment variable {api_key_env} is not set. Set it to your API key."
        )
    return {"base_url": base_url or None, "api_key": key or "none"}


def make_openai_message(message: ChatMessage) -> JsonObject:
    """Return a message in OpenAI's format, with its images as parts that contain `data:` URLs."""
    others = {key: value for key, value in message.items() if key != "images"}
    if not message.get("images"):
        return others
    first, *texts = message["content"].split(IMAGE_MARK)
    parts: list[JsonObject] = [{"type": "text", "text": first}] if first else []
    for encoded_image, text in zip(message["images"], texts, strict=True):
        data = read_image_bytes(encoded_image)
        url = f"data:image/{find_image_extension(data)};base64,{base64.b64encode(data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
        parts += [{"type": "text", "text": text}] if text else []
    return {**others, "content": parts}
