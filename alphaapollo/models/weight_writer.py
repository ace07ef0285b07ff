"""Write the weights of a model to safetensors files one tensor at a time, so that memory for one of them is enough."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_weights(folder: Path, shapes: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors, in any order, to the files into which huggingface_hub's `save_torch_state_dict` would split them.
    shapes: the same tensors on the meta device, in the order of the files. Raises OSError if the disk is full."""
    from huggingface_hub import split_torch_state_dict_into_shards

    folder.mkdir(parents=True, exist_ok=True)
    split = split_torch_state_dict_into_shards(dict(shapes))
    offsets: dict[str, int] = {}
    for file, names in split.filename_to_tensors.items():
        offsets |= _write_header(folder / file, {name: shapes[name] for name in names})
    for name, tensor in tensors:
        with (folder / split.tensor_to_filename[name]).open("r+b") as opened:
            opened.seek(offsets.pop(name))
            opened.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    assert not offsets, f"no values of {', '.join(offsets)}"
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_header(file: Path, shapes: dict[str, Tensor]) -> dict[str, int]:
    """Write the header of a new safetensors file. Returns the position of each tensor; larger elements come first, so
    that all are aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    positions, end = {}, 0
    for name, tensor in sorted(shapes.items(), key=lambda item: (-item[1].element_size(), item[0])):
        positions[name], end = end, end + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.").upper().replace("FLOAT", "F").replace("INT", "I")
        header[name] = {
            "dtype": dtype.replace("UI", "U"),
            "shape": [*tensor.shape],
            "data_offsets": [positions[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + position for name, position in positions.items()}
