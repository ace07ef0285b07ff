"""Trainer side of the CPU weight transfer: writes weights or a LoRA adapter to a shared-memory folder.

<folder>/v7/00000.safetensors ...    files of version 7. One rank per node writes them, every engine on that node loads
                                     them, and the rank removes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.buckets import Bucket, count_bytes, make_buckets
from alphaapollo.weight_sync.digest import format_digest, tensors_digest


class SharedMemorySender:
    """Weight sender that writes each version, cast to the engine's dtype, to a folder in shared memory.

    Args:
        folder: folder below /dev/shm that belongs to one run on one node.
        dtype: dtype of the engine's weights.
        is_writer: whether this rank writes files. Other ranks only take part in gathering the tensors.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, is_writer: bool = True):
        self._folder = Path(folder)
        self._dtype = dtype
        self._is_writer = is_writer

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Write (name, full tensor) pairs: each parameter once, with its name in a Hugging Face checkpoint. Every rank
        must iterate `tensors`, because gathering a tensor is a collective. Returns the update on the writer and None on
        all other ranks. Raises ValueError if shared memory is too small."""
        if not self._is_writer:
            for _ in tensors:
                pass
            return None
        self.release()
        target, partial = self._folder / f"v{version}", self._folder / f".v{version}"
        partial.mkdir(parents=True)
        digest = self._write(tensors, partial)
        partial.rename(target)
        return WeightUpdate(version, format_digest(digest), target.name)

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
        """Write the tensors to files in `folder` and return their digest."""
        written: list[Future[None]] = []
        digests: list[Future[int]] = []
        with ThreadPoolExecutor(2) as pool:  # a bucket is written and hashed while the next one is gathered
            for number, bucket in enumerate(make_buckets(tensors, self._dtype, torch.device("cpu"))):
                wait(written[-1:])
                wait(digests[-1:])
                written.append(pool.submit(write_file, bucket, folder / f"{number:05d}.safetensors"))
                digests.append(pool.submit(tensors_digest, bucket.values()))
        for future in written:
            future.result()
        return sum(digest.result() for digest in digests)

    def release(self) -> None:
        """Remove the files of the last update. Call it after every engine has confirmed the update."""
        if self._is_writer:
            shutil.rmtree(self._folder, ignore_errors=True)


class SharedAdapterSender(SharedMemorySender):
    """Weight sender that writes LoRA adapters as a peft folder, for engines that serve adapters (rollout.lora=adapter).
    The tensors are A and B of every adapted layer, named as in peft's files. B is multiplied by the adapter's scale
    before it is sent, so the engine holds exactly the numbers in the files and one digest verifies them."""

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
        adapter = {name: tensor.to("cpu", self._dtype).contiguous() for name, tensor in tensors}
        write_file(adapter, folder / "adapter_model.safetensors")
        layers = sorted({name.split(".")[-3] for name in adapter})  # ...q_proj.lora_A.weight
        rank = next(tensor.shape[0] for name, tensor in adapter.items() if name.endswith("lora_A.weight"))
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return tensors_digest(adapter.values())


def write_file(tensors: Bucket, path: Path) -> None:
    """Write tensors to a safetensors file in shared memory. Raises ValueError if shared memory is too small."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        needed = count_bytes(tensors) / 2**30
        free = shutil.disk_usage(path.parent).free / 2**30
        raise ValueError(
            f"publishing weights through {path.parent} failed ({error}): the next file needs {needed:.2f} GiB, but "
            f"only {free:.2f} GiB are free. Increase shared memory (docker run --shm-size=...)."
        ) from error
