"""A model's folder before a worker loads it: weights that are whole and of the shapes that config.json says, and a
vocabulary with room for the tokenizer's words. Only the heads of the files are read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Model
from alphaapollo.models.load import has_own_code, load_config, load_without_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LENGTH = struct.Struct("<Q")  # of a safetensors file's head, in front of it
LARGEST_HEAD = 100_000_000  # bytes: what the format allows
LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


def check_weights(model: Model, key: str) -> None:
    """ValueError: weights of a local folder that are cut off, missing, of other shapes than the model's, or of layers
    that it does not have. key: of the path, e.g. actor_rollout_ref.model.path."""
    folder = Path(model.path).expanduser()
    if not model.path or not folder.is_dir():
        return
    where = f"{key}={model.path}"
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder, where):
        shapes |= _shapes(file, where)
    config = load_config(model)
    if not shapes or has_own_code(model, config):
        return
    expected = load_without_weights(model)
    for name, parameter in expected.state_dict().items():
        if name in shapes and shapes[name] != tuple(parameter.shape):
            raise ValueError(
                f"{where}: {name} has the shape {list(shapes[name])}, and config.json makes it "
                f"{list(parameter.shape)}. Give weights and configuration of one model."
            )
    _check_layers(config, shapes, getattr(expected, "_keys_to_ignore_on_load_unexpected", None) or (), where)


def check_vocabulary(model: Model, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """ValueError: the tokenizer has words, or ends of turns, for which the model has no embedding. Special tokens
    besides may lie beyond: some models have one for images that they never see."""
    size = getattr(load_config(model).get_text_config(), "vocab_size", None)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = [index for index in tokenizer.get_vocab().values() if index not in special]
    ids += [index for index in (tokenizer.eos_token_id, tokenizer.pad_token_id) if index is not None]
    if size is not None and ids and max(ids) >= size:
        raise ValueError(
            f"{key}={model.path}: its vocabulary has {size} tokens, and the tokenizer's go up to id {max(ids)}. Give "
            "the model's own tokenizer, or a model with as many embeddings."
        )


def _weight_files(folder: Path, where: str) -> Iterator[Path]:
    """The safetensors files of the folder; none where it has weights of another format alone."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {INDEX} cannot be read ({error}). Copy the model anew.") from None
        for name in names:
            if not (folder / str(name)).is_file():
                raise ValueError(f"{where}: {name} is missing, which {INDEX} names. Copy the model anew.")
            yield folder / str(name)
    elif (folder / SINGLE).is_file():
        yield folder / SINGLE


def _shapes(file: Path, where: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file. ValueError: the file is cut off, or none."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = LENGTH.unpack(stream.read(LENGTH.size))
            if length > min(size, LARGEST_HEAD):
                raise ValueError("its head is cut off")
            head: dict[str, Any] = json.loads(stream.read(length))
        head.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in head.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in head.items()}
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {file.name} is no whole safetensors file: {error}. Copy the model anew.") from None
    if LENGTH.size + length + end != size:
        raise ValueError(
            f"{where}: {file.name} has {size} bytes, and its head tells of {LENGTH.size + length + end}. Copy the "
            "model anew."
        )
    return shapes


def _check_layers(config: PretrainedConfig, shapes: dict[str, tuple[int, ...]], ignored: Any, where: str) -> None:
    """Layers beyond the last would be left out without a word. Some models have more on purpose, for another use."""
    text = config.get_text_config()
    layers: int | None = getattr(text, "num_hidden_layers", None)
    if layers is None or getattr(text, "num_nextn_predict_layers", None):
        return
    found = {int(match[1]) for name in shapes if (match := LAYER.match(name)) and not _matches(ignored, name)}
    if found and max(found) >= layers:
        raise ValueError(
            f"{where}: the weights have {max(found) + 1} layers, and config.json says num_hidden_layers={layers}. Give "
            "weights and configuration of one model."
        )


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
