"""Secrets stay in the environment: what they are there, and texts without them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

NAME = re.compile(
    r"(?:^|_)(?:APIKEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTHORIZATION)(?:_|$)", re.IGNORECASE
)
SHORTEST = 12  # characters: what is shorter may be any word
OF_A_KEY = re.compile(r"(?:api_?key|secret|password|passwd|authorization|access_token|auth_token)$", re.IGNORECASE)
IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # https://user:password@host


def secrets() -> dict[str, str]:
    """value -> name, of the environment variables that are named as secrets are; paths to them are none."""
    found = {value: name for name, value in os.environ.items() if NAME.search(name)}
    return {value: name for value, name in found.items() if len(value) >= SHORTEST and not value.startswith(("/", "~"))}


def redacted(text: str, known: Mapping[str, str] | None = None) -> str:
    """With the name of its variable in place of each secret. known: as `secrets` gives them, for many texts."""
    for value, name in (secrets() if known is None else known).items():
        text = text.replace(value, f"${name}")
    return text


def secret_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, why) of each entry of nested values that holds a secret. The values are in no message."""
    known = secrets()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from secret_keys(value, f"{key}.")
            continue
        text = str(value) if isinstance(value, str | list) else ""
        if variable := next((variable for secret, variable in known.items() if secret in text), None):
            yield key, f"the value of the environment variable {variable}"
        elif IN_ADDRESS.search(text):
            yield key, "an address with a password"
        elif OF_A_KEY.search(str(name)) and text:
            yield key, "what its name calls a secret"
