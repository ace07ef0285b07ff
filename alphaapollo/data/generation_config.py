"""A model's generation_config.json, which lists the tokens that end its answers."""

from __future__ import annotations

import json
from pathlib import Path

from alphaapollo.utils.hub import is_local_path

FILE_NAME = "generation_config.json"


def find_generation_config(model_path: str) -> Path | None:
    """Return the generation_config.json of a model, given as local folder or hub id. None if it has none."""
    folder = Path(model_path).expanduser()
    if not model_path or folder.is_dir() or is_local_path(model_path):
        return folder / FILE_NAME if model_path and (folder / FILE_NAME).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        model_path,
        FILE_NAME,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def read_end_token_ids(model_path: str) -> list[int]:
    """Return `eos_token_id` of a model's generation_config.json as a list, empty without file or value.

    Raises ValueError if the file cannot be read or the value is not a token id or a list of token ids.
    """
    file = find_generation_config(model_path)
    if file is None:
        return []
    try:
        value = json.loads(file.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Copy it again from the model.") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in ids if not isinstance(one, int) or isinstance(one, bool) or one < 0]:
        raise ValueError(f"{file}: eos_token_id={wrong[0]!r} is not a token id. Use an id or a list of ids.")
    return ids
