"""OpenAI-compatible servers, as the judge and self-evolution speak to them: how a client is made, and what may go
wrong with a reply."""

from __future__ import annotations

import os
from typing import Any

NOT_AS_OPENAI = (ValueError, TypeError, AttributeError, IndexError)
"""What comes of reading a reply of another shape: the client takes any JSON for one."""


def client_options(section: str, base_url: str, api_key_env: str, timeout: float, max_retries: int) -> dict[str, Any]:
    """The arguments of openai.OpenAI and openai.AsyncOpenAI. section: of the configuration, e.g. reward.judge.

    It retries 408, 409, 429, 5xx and broken connections by itself, with growing pauses.

    Raises:
        ValueError: the openai package is missing, or no key where the server is OpenAI's own.
    """
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{section} needs the openai package: pip install -e '.[judge]' in the clone.") from error
    key = os.environ.get(api_key_env, "")
    if not key and not base_url:
        raise ValueError(f"the environment variable {api_key_env} ({section}.api_key_env) is not set.")
    return {
        "base_url": base_url or None,
        "api_key": key or "none",
        "timeout": timeout,
        "max_retries": max_retries,
    }
