"""What the headers of a model's weight files say: tensors that no module takes, and an output head of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")  # in names of weights
HEAD = "lm_head.weight"  # end of the name of an output head, as vLLM finds it, too
WITHOUT_EFFECT = re.compile(r"inv_freq$|scale$")  # computed from config.json; of quantized activations or caches


def find_weight_files(path: str) -> list[Path]:
    """Return the safetensors files that transformers loads from a local folder, or from a hub id in the cache. Empty:
    the model has other files, or is not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path).expanduser()
    if not folder.is_dir() and (config := try_to_load_from_cache(path, "config.json")):
        folder = Path(str(config)).parent
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single] * single.is_file()
    files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return files if all(map(Path.is_file, files)) else []


def find_head(path: str) -> Literal["", "tied", "own", "alone"]:
    """Return what the files of a model have as output head: nothing, a copy of the embedding, a head that differs from
    it, or a head without an embedding."""
    return _find_head(tuple((file, file.stat().st_mtime_ns) for file in find_weight_files(path)))


@lru_cache(64)
def _find_head(files: tuple[tuple[Path, int], ...]) -> Literal["", "tied", "own", "alone"]:
    from safetensors import safe_open

    places = {name: file for file, _ in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118  it is no dict
    head = next((name for name in places if name.endswith(HEAD)), None)
    if head is None:
        return ""
    with safe_open(places[head], "pt") as opened:
        own = opened.get_tensor(head)
    others = [one for one in places if one != head and not LAYER.match(one)]
    embeddings = [one for one in others if _read_shape(places[one], one) == [*own.shape]]
    if not embeddings:
        return "alone"
    return "tied" if any(safe_open(places[one], "pt").get_tensor(one).equal(own) for one in embeddings) else "own"


def _read_shape(file: Path, name: str) -> list[int]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.get_slice(name).get_shape())


def check_tensor_names(config: PretrainedConfig, unexpected: Collection[str], missing: Collection[str]) -> None:
    """Raise ValueError if a model differs from its weight files.

    Args:
        unexpected: names of tensors that no module takes, as transformers lists them.
        missing: names of parameters that no file has.
    """
    text = config.get_text_config()
    num_layers, has_more = getattr(text, "num_hidden_layers", None), getattr(text, "num_nextn_predict_layers", None)
    layers = {name: int(match[1]) for name in unexpected if (match := LAYER.match(name))}
    for name, wrapper in _find_wrapped(unexpected, missing):
        raise ValueError(f"its tensors have names of a wrapper, e.g. {name}: save the inner model, without {wrapper!r}")
    if num_layers and not has_more and (count := max(layers.values(), default=-1) + 1) > num_layers:
        raise ValueError(f"the weights have {count} layers, but config.json has num_hidden_layers={num_layers}")
    if missing:
        raise ValueError(f"weights are missing ({len(missing)} in total), e.g. {', '.join(sorted(missing)[:3])}")
    inner = [name for name, layer in layers.items() if num_layers and layer < num_layers]
    if unused := sorted(name for name in inner if not WITHOUT_EFFECT.search(name)):
        raise ValueError(f"no module takes {len(unused)} tensors of its layers, e.g. {unused[0]}")


def _find_wrapped(unexpected: Collection[str], missing: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield names that have more parts than a missing one, e.g. those of a compiled model, and these parts."""
    inner = {part for name in missing for part in name.split(".")}
    for name in sorted(unexpected):
        more = [part for part in name.split(".") if part not in inner]
        if more and ".".join(part for part in name.split(".") if part in inner) in missing:
            yield name, "".join(f"{part}." for part in more)
