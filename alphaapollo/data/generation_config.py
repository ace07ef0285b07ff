"""A model's generation_config.json, which has the tokens that end its answers and its sampling settings."""

from __future__ import annotations

import json
from pathlib import Path

from alphaapollo.utils.hub import is_local_path
from alphaapollo.utils.json_types import JsonObject

FILE_NAME = "generation_config.json"


def find_model_file(model_path: str, name: str) -> Path | None:
    """Return a file of a model, given as local folder or hub id. None if the model does not have the file."""
    folder = Path(model_path).expanduser()
    if not model_path or (is_local_path(model_path) and not folder.is_dir()):
        return None
    from transformers.utils.hub import cached_file

    found = cached_file(
        folder if folder.is_dir() else model_path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def find_generation_config(model_path: str) -> Path | None:
    """Return the generation_config.json of a model, given as local folder or hub id. None if it has none."""
    return find_model_file(model_path, FILE_NAME)


def read_generation_config(model_path: str) -> JsonObject:
    """Return the content of a model's generation_config.json, empty without file. Raises ValueError if the file cannot
    be read."""
    if (file := find_generation_config(model_path)) is None:
        return {}
    try:
        return {**json.loads(file.read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Copy it again from the model.") from error


def read_end_token_ids(model_path: str) -> list[int]:
    """Return `eos_token_id` of a model's generation_config.json as a list, empty without file or value.

    Raises ValueError if the file cannot be read or the value is not a token id or a list of token ids.
    """
    value = read_generation_config(model_path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in ids if not isinstance(one, int) or isinstance(one, bool) or one < 0]:
        file = find_generation_config(model_path)
        raise ValueError(f"{file}: eos_token_id={wrong[0]!r} is not a token id. Use an id or a list of ids.")
    return ids


def read_sampling_settings(model_path: str) -> JsonObject:
    """Return temperature, top_p and top_k of a model's generation_config.json; greedy without do_sample, as in
    transformers. Raises ValueError if the file cannot be read."""
    written = read_generation_config(model_path)
    if not written.get("do_sample"):
        return {"temperature": 0.0}
    return {name: written[name] for name in ("temperature", "top_p", "top_k") if written.get(name) is not None}
