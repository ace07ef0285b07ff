"""Connection settings for OpenAI-compatible servers, shared by the judge and by self-evolution."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

MALFORMED_RESPONSE_ERRORS = (ValueError, TypeError, AttributeError, IndexError)
"""Exceptions raised when a response is not OpenAI-compatible; the client accepts any JSON."""


def make_connection_options(section: str, base_url: str, api_key_env: str) -> dict[str, Any]:
    """Return `base_url` and `api_key` for openai.OpenAI and openai.AsyncOpenAI.

    `section` is the configuration section that error messages name, e.g. reward.judge. Raises ValueError if the openai
    package is missing, or if the variable `api_key_env` is not set for OpenAI's own server (empty base_url).
    """
    if importlib.util.find_spec("openai") is None:
        raise ValueError(f"{section} needs the openai package. Run `pip install -e '.[judge]'` in the clone.")
    key = os.environ.get(api_key_env, "")
    if not key and not base_url:
        raise ValueError(
            f"{section}.api_key_env: the environment variable {api_key_env} is not set. Set it to your API key."
        )
    return {"base_url": base_url or None, "api_key": key or "none"}
