"""Trainer side of the CPU weight transfer: write weights or a LoRA adapter to files in shared memory.

One rank per node writes version 7 to <folder>/v7/00000.safetensors etc. Every engine on that node loads these files.
After that, the rank removes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync.buckets import Bucket, count_bytes, make_buckets
from alphaapollo.weight_sync.digest import compute_joint_digest, format_digest


@dataclass
class SharedMemorySender:
    """Weight sender that writes each version of the weights to a folder in shared memory."""

    folder: str | Path  # below /dev/shm, belongs to one run on one node
    dtype: torch.dtype  # dtype of the engine's weights, to which tensors are cast
    is_writer: bool = True  # whether this rank writes files; other ranks only take part in gathering the tensors

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Write the tensors to files (see WeightSender). Raises ValueError if shared memory is too small."""
        if not self.is_writer:
            for _ in tensors:
                pass
            return None
        self.release_sent_weights()
        target, partial = Path(self.folder, f"v{version}"), Path(self.folder, f".v{version}")
        Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)  # not for other users of the machine
        partial.mkdir()
        digest = self._write_tensors(tensors, partial)
        partial.rename(target)
        return WeightUpdate(version, format_digest(digest), target.name)

    def _write_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
        """Write (name, tensor) pairs to safetensors files in `folder` and return the digest of all tensors."""
        written: list[Future[None]] = []
        digests: list[Future[int]] = []
        with ThreadPoolExecutor(2) as pool:  # a bucket is written and hashed while the next one is gathered
            for number, bucket in enumerate(make_buckets(tensors, self.dtype, torch.device("cpu"))):
                wait(written[-1:])
                wait(digests[-1:])
                written.append(pool.submit(write_safetensors, bucket, folder / f"{number:05d}.safetensors"))
                digests.append(pool.submit(compute_joint_digest, bucket.values()))
        for future in written:
            future.result()
        return sum(digest.result() for digest in digests)

    def read_files(self, folder: str) -> dict[str, np.ndarray]:
        """Return {file name: bytes, uint8} of the sent folder, e.g. `v7`, for engines on other nodes."""
        return {path.name: np.fromfile(path, np.uint8) for path in Path(self.folder, folder).iterdir()}

    def release_sent_weights(self) -> None:
        if self.is_writer:
            shutil.rmtree(self.folder, ignore_errors=True)


class SharedAdapterSender(SharedMemorySender):
    """Weight sender that writes a LoRA adapter as a peft folder, for engines with rollout.lora=adapter.

    The tensors are A and B of every adapted layer, named as in peft's files. B is already multiplied by the adapter's
    scale, so the engine loads exactly the numbers in the files, and a digest can verify them.
    """

    def _write_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
        adapter = {name: tensor.to("cpu", self.dtype).contiguous() for name, tensor in tensors}
        write_safetensors(adapter, folder / "adapter_model.safetensors")
        layers = sorted({name.split(".")[-3] for name in adapter})  # ...q_proj.lora_A.weight
        rank = next(tensor.shape[0] for name, tensor in adapter.items() if name.endswith("lora_A.weight"))
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return compute_joint_digest(adapter.values())


def write_safetensors(tensors: Bucket, path: Path) -> None:
    """Write tensors to a file in shared memory. Raises ValueError if shared memory is too small."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        needed = count_bytes(tensors) / 2**30
        free = shutil.disk_usage(path.parent).free / 2**30
        raise ValueError(
            f"cannot write weights to {path.parent} ({error}): the next file needs {needed:.2f} GiB, but only "
            f"{free:.2f} GiB are free. Increase shared memory (docker run --shm-size=...)."
        ) from error


def read_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) pairs of all *.safetensors files in a folder."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
