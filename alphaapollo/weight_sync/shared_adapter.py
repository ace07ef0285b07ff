"""Sender of LoRA adapters to engines that serve them (rollout.lora=adapter): a peft folder in shared memory.

B is sent multiplied by the adapter's scale, so the engine holds exactly the numbers that are sent and one digest
verifies them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.digest import format_digest, tensors_digest
from alphaapollo.weight_sync.shared_memory import write_file


class SharedAdapterSender:
    """Writes each published version into its own folder, cast to the engine's dtype. Same arguments as
    SharedMemorySender."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, is_writer: bool = True):
        self._folder = Path(folder)
        self._dtype = dtype
        self._is_writer = is_writer

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Write A and B (times the scale) of every adapted layer, named as in peft's files. Every rank must iterate
        `tensors`; the writer returns the update. Raises ValueError when shared memory is too small."""
        adapter = {name: tensor.to("cpu", self._dtype).contiguous() for name, tensor in tensors}
        if not self._is_writer:
            return None
        self.release()
        target, partial = self._folder / f"v{version}", self._folder / f".v{version}"
        partial.mkdir(parents=True)
        write_file(adapter, partial / "adapter_model.safetensors")
        (partial / "adapter_config.json").write_text(json.dumps(_config(adapter)))
        partial.rename(target)
        return WeightUpdate(version, format_digest(tensors_digest(adapter.values())), target.name)

    def release(self) -> None:
        """Remove the files of the last update, which every engine has confirmed."""
        if self._is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)


def _config(adapter: dict[str, torch.Tensor]) -> dict[str, object]:
    """Adapter configuration for peft and vLLM, with alpha / rank = 1."""
    layers = sorted({name.split(".")[-3] for name in adapter})  # ...q_proj.lora_A.weight
    rank = next(tensor.shape[0] for name, tensor in adapter.items() if name.endswith("lora_A.weight"))
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}
