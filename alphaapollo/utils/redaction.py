"""Redact secrets, such as API keys in environment variables, from logs and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from alphaapollo.utils.json_types import Json

SECRET_VARIABLE = re.compile(
    r"(?:(?:^|_)(?:KEY|PAT|PASS|PWD)|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION)"
    r"\d*(?:_|$)",
    re.IGNORECASE,
)
MIN_SECRET_LENGTH = 12  # characters; shorter values may be ordinary words
SECRET_KEY_NAME = re.compile(
    r"(?:api_?key|secret|password|passwd|authorization|access_token|auth_token)$", re.IGNORECASE
)
URL_PASSWORD = re.compile(r"://([^/\s:@]*:[^/\s]+@|[^/\s@]{12,}@)")  # https://user:password@host, https://token@host


def find_secret_variables() -> dict[str, str]:
    """Return {secret: variable} of the environment, longest secret first: the values of variables whose name denotes a
    secret, e.g. HF_TOKEN, except existing paths; and `user:password@` and `token@` of URLs in any variable."""
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        found |= dict.fromkeys(URL_PASSWORD.findall(value), name)
        if len(value) >= MIN_SECRET_LENGTH and SECRET_VARIABLE.search(name) and not _is_existing_path(value):
            found[value] = name
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _is_existing_path(value: str) -> bool:
    return value[0] in "/~" and os.path.exists(os.path.expanduser(value))


def redact(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """Replace each secret in the text by its variable, e.g. `$HF_TOKEN`. secrets: see find_secret_variables."""
    for value, name in (find_secret_variables() if secrets is None else secrets).items():
        text = text.replace(value, f"${name}@" if value.endswith("@") else f"${name}")
    return text


def redact_values(value: Json, secrets: Mapping[str, str]) -> Json:
    """Redact all texts of nested values, before JSON escapes their quotes and line breaks."""
    return map_texts(value, partial(redact, secrets=secrets))


def map_texts(value: Json, convert: Callable[[str], str]) -> Json:
    """Convert all texts of nested maps, lists and tuples, including keys."""
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, Mapping):
        return {map_texts(key, convert): map_texts(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_texts(item, convert) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8 encoding, by question marks."""
    return text.encode("utf-8", "replace").decode()


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
