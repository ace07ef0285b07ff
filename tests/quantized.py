"""Folders with weights of 4 bits, packed by the package compressed-tensors, and the same weights dequantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}


def make_section(**changes: Any) -> dict[str, Any]:
    """quantization_config of config.json. changes: of the weights."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | changes}
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return described | {"quantization_status": "compressed", "config_groups": {"group_0": group}}


def save_quantized(source: Path, folder: Path, group_size: int = 16) -> tuple[Path, Path]:
    """Write folder/w4 and folder/plain. Every code from -8 to 7 occurs."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    quantized, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        plain[name] = weight
        if not name.endswith("_proj.weight"):
            quantized[name] = weight
            continue
        groups = weight.float().unflatten(1, (-1, group_size))
        scale = (groups.abs().amax(2) / 8).to(torch.bfloat16)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
        plain[name] = (codes * scale.float()[..., None]).flatten(1).to(weight.dtype)
        parts = {"packed": pack_to_int32(codes.flatten(1).to(torch.int8), 4), "scale": scale}
        parts["shape"] = torch.tensor(weight.shape)
        quantized |= {f"{name}_{part}": tensor.contiguous() for part, tensor in parts.items()}
    for kind, tensors in (("w4", quantized), ("plain", plain)):
        shutil.copytree(source, folder / kind)
        save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = make_section(group_size=group_size)
    (folder / "w4" / "config.json").write_text(json.dumps(config))
    return folder / "w4", folder / "plain"
