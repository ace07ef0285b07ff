"""Redact secrets, such as API keys in environment variables, from logs and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:APIKEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTHORIZATION)(?:_|$)", re.IGNORECASE
)
MIN_SECRET_LENGTH = 12  # characters; shorter values may be ordinary words
SECRET_KEY_NAME = re.compile(
    r"(?:api_?key|secret|password|passwd|authorization|access_token|auth_token)$", re.IGNORECASE
)
URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # https://user:password@host


def find_secret_variables() -> dict[str, str]:
    """Return {value: name} of the environment variables whose name denotes a secret, e.g. HF_TOKEN. Values that are
    paths are left out."""
    found = {value: name for name, value in os.environ.items() if SECRET_VARIABLE.search(name)}
    return {value: name for value, name in found.items() if len(value) >= MIN_SECRET_LENGTH and value[0] not in "/~"}


def redact(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """Replace each secret in the text by its variable, e.g. `$HF_TOKEN`. secrets: see find_secret_variables."""
    for value, name in (find_secret_variables() if secrets is None else secrets).items():
        text = text.replace(value, f"${name}")
    return text


def replace_control_characters(text: str) -> str:
    """Replace characters that could control a terminal, except line breaks, by spaces."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def find_secret_keys_and_reasons(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """For each value with a secret in a nested map, yield (dotted key, reason). The reason does not show the secret."""
    known = find_secret_variables()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from find_secret_keys_and_reasons(value, f"{key}.")
            continue
        text = str(value) if isinstance(value, str | list) else ""
        if variable := next((variable for secret, variable in known.items() if secret in text), None):
            yield key, f"the value of the environment variable {variable}"
        elif URL_PASSWORD.search(text):
            yield key, "a URL with a password"
        elif SECRET_KEY_NAME.search(str(name)) and text:
            yield key, "a value whose name denotes a secret"
