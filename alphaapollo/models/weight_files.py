"""Read a model's weight files: their tensors, which tensors no module takes, and which output head the files have."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

LAYER_PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")  # in names of weights
HEAD_SUFFIX = "lm_head.weight"  # of the name of an output head; vLLM finds it in the same way
UNUSED_NAME = re.compile(r"inv_freq$|scale$")  # inv_freq is computed from config.json; scales are for quantization


def find_weight_files(path: str) -> list[Path]:
    """Return the safetensors files that transformers loads from a local folder, or from a hub id in the cache. Empty:
    the model has other files, or is not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path).expanduser()
    if not folder.is_dir() and (config := try_to_load_from_cache(path, "config.json")):
        folder = Path(str(config)).parent
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return files if all(map(Path.is_file, files)) else []


def find_head(path: str) -> Literal["", "tied", "own", "alone"]:
    """Return what the files of a model have as output head: nothing, a copy of the embedding, a head that differs from
    it, or a head without an embedding."""
    return _find_head(tuple((file, file.stat().st_mtime_ns) for file in find_weight_files(path)))


@lru_cache(64)
def _find_head(files: tuple[tuple[Path, int], ...]) -> Literal["", "tied", "own", "alone"]:
    file_of = map_tensors([file for file, _ in files])
    head_name = next((name for name in file_of if name.endswith(HEAD_SUFFIX)), None)
    if head_name is None:
        return ""
    head = read_tensor(file_of[head_name], head_name)
    others = [name for name in file_of if name != head_name and not LAYER_PREFIX.match(name)]
    embeddings = [name for name in others if read_tensor(file_of[name], name).shape == head.shape]
    if not embeddings:
        return "alone"
    is_tied = any(read_tensor(file_of[name], name).equal(head) for name in embeddings)
    return "tied" if is_tied else "own"


def map_tensors(files: Iterable[Path]) -> dict[str, Path]:
    """Return the file of each tensor, by its name."""
    from safetensors import safe_open

    return {name: file for file in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118  it is no dict


def read_tensor(file: Path, name: str, ranges: Sequence[slice] = ()) -> Tensor:
    """Map a tensor of a safetensors file, or a range of each of its first dimensions. Nothing else is read."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return opened.get_slice(name)[tuple(ranges) or ...]


def check_tensor_names(config: PretrainedConfig, unexpected: Collection[str], missing: Collection[str]) -> None:
    """Raise ValueError if a model differs from its weight files.

    Args:
        unexpected: names of tensors that no module takes, as transformers lists them.
        missing: names of parameters that no file has.
    """
    text = config.get_text_config()
    num_layers, num_mtp_layers = (getattr(text, f"num_{kind}_layers", None) for kind in ("hidden", "nextn_predict"))
    layers = {name: int(match[1]) for name in unexpected if (match := LAYER_PREFIX.match(name))}
    if wrapped := _find_wrapped_name(unexpected, missing):
        name, wrapper = wrapped
        raise ValueError(f"its tensors have names of a wrapper, e.g. {name}: save the inner model, without {wrapper!r}")
    if num_layers and not num_mtp_layers and (count := max(layers.values(), default=-1) + 1) > num_layers:
        raise ValueError(f"the weights have {count} layers, but config.json has num_hidden_layers={num_layers}")
    if missing:
        raise ValueError(f"weights are missing ({len(missing)} in total), e.g. {', '.join(sorted(missing)[:3])}")
    in_layers = [name for name, layer in layers.items() if num_layers and layer < num_layers]
    if unused := sorted(name for name in in_layers if not UNUSED_NAME.search(name)):
        raise ValueError(f"the model has no parameters for {len(unused)} tensors of its layers, e.g. {unused[0]}")


def _find_wrapped_name(unexpected: Collection[str], missing: Collection[str]) -> tuple[str, str] | None:
    """Find a missing name that the files extend, e.g. of a compiled model. Returns the longer name and new parts."""
    known_parts = {part for name in missing for part in name.split(".")}
    for name in sorted(unexpected):
        further_parts = [part for part in name.split(".") if part not in known_parts]
        if further_parts and ".".join(part for part in name.split(".") if part in known_parts) in missing:
            return name, "".join(f"{part}." for part in further_parts)
    return None
