"""Load tokenizers, find the token ids that a model must never sample, and split control strings in texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.utils.disk import read_json
from alphaapollo.utils.hub import check_model_files, is_local_path
from alphaapollo.utils.json_types import Json, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPLIT = "\ufdd0"  # splits a control string; not a character of any script


def find_excluded_ids(model_path: str, tokenizer_path: str, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the sorted ids that a model must never sample: placeholders of images, and ids of embeddings for which the
    tokenizer has no token. tokenizer_path: empty = model_path."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    tokens = load_tokenizer(tokenizer_path or model_path, trust_remote_code).get_vocab().values()
    unused = {*range(getattr(config.get_text_config(), "vocab_size", 0))} - {*tokens}
    return tuple(sorted({*unused, *find_placeholder_ids(config)}))


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, given as hub id or local folder. Raises ValueError if it cannot be loaded."""
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if not folder.is_dir() and is_local_path(path):
        raise ValueError(f"{path}: no such folder. Use a folder with a tokenizer, or a hub id.")
    if folder.is_dir():
        check_model_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else path, trust_remote_code=trust_remote_code
        )
        if len(tokenizer) < 2:  # from_pretrained returns this for a folder with a config and no vocabulary
            raise ValueError(f"its vocabulary has only {len(tokenizer)} tokens")
        if not hasattr(tokenizer, "is_fast"):  # e.g. the tokenizer of mistral-common, for tekken.json
            raise ValueError(f"{type(tokenizer).__name__} does not use a tokenizer.json; convert tekken.json to it")
    except Exception as error:  # the tokenizers library raises plain Exception for a broken file
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path}: the model has no tokenizer that can be loaded ({type(error).__name__}: {reason}). Save a "
            "tokenizer beside the model with tokenizer.save_pretrained, or set tokenizer_path. For a hub id, check the "
            "network and HF_HUB_OFFLINE."
        ) from error
    return tokenizer


def find_stop_ids(tokenizer: PreTrainedTokenizerBase, stop: Iterable[str]) -> tuple[int, ...]:
    """Return the ids of the stop strings that are special tokens. The text of an answer does not contain these."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(special[text] for text in stop if text in special)


def make_control_pattern(tokens: Iterable[str], known: Collection[str] = ()) -> re.Pattern[str]:
    """Return a pattern of control strings: `tokens` except tags, e.g. <think>, which people write on purpose. A tag and
    its end, e.g. </think>, are both in `known`. <s> and </s> are not tags."""
    tags = {tag for start in known if start != "<s>" and (end := f"</{start[1:]}") in known for tag in (start, end)}
    controls = sorted({*tokens} - tags, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, controls)) or "(?!)")


def split_control_text(value: object, pattern: re.Pattern[str], found: Counter[str]) -> Json:
    """Split the control strings in all texts of a JSON value, and count them in `found`."""
    if isinstance(value, str):
        strings = pattern.findall(value)
        found.update(strings)
        return pattern.sub(lambda match: match[0][0] + SPLIT + match[0][1:], value) if strings else value
    if isinstance(value, Mapping):
        return {key: split_control_text(item, pattern, found) for key, item in value.items()}
    return [split_control_text(item, pattern, found) for item in value] if isinstance(value, list | tuple) else value


GENERATION_CONFIG = "generation_config.json"


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
    if found:
        check_model_files(Path(found).parent)
    return Path(found) if found else None


def find_generation_config(model_path: str) -> Path | None:
    """Return the generation_config.json of a model, given as local folder or hub id. None if it has none."""
    return find_model_file(model_path, GENERATION_CONFIG)


def read_generation_config(model_path: str) -> JsonObject:
    """Return a model's generation_config.json; empty if it has none. Raises ValueError if it cannot be read."""
    if (file := find_generation_config(model_path)) is None:
        return {}
    try:
        return {**read_json(file.resolve())}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Copy it again from the model.") from error


def read_end_token_ids(model_path: str) -> list[int]:
    """Return `eos_token_id` of a model's generation_config.json as a list. Raises ValueError if it is not token ids."""
    value = read_generation_config(model_path).get("eos_token_id")
    ids = value if isinstance(value, list) else ([] if value is None else [value])
    if wrong := [token for token in ids if not isinstance(token, int) or isinstance(token, bool) or token < 0]:
        file = find_generation_config(model_path)
        raise ValueError(f"{file}: eos_token_id={wrong[0]!r} is not a token id. Use an id or a list of ids.")
    return ids


def read_sampling_settings(model_path: str) -> JsonObject:
    """Return temperature, top_p and top_k of a model's generation_config.json; greedy without do_sample."""
    written = read_generation_config(model_path)
    if not written.get("do_sample"):
        return {"temperature": 0.0}
    return {name: written[name] for name in ("temperature", "top_p", "top_k") if written.get(name) is not None}
