"""Senders of weights through shared memory, and their files."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from alphaapollo.engines.weight_sync.buckets import Bucket, count_bytes, make_buckets
from alphaapollo.engines.weight_sync.changes import FileChanges, SentFiles, find_changes
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.engines.weight_sync.transport import WeightUpdate

FILE_BYTES = 1 << 26  # minimum size of a file in shared memory; a file is hashed while others are written


@dataclass
class SharedMemorySender:
    """Weight sender that writes each version of the weights to a folder in shared memory.

    If engines on other nodes have read a version, its files are kept, and the next version is compared with them."""

    folder: str | Path  # below /dev/shm, belongs to one run on one node
    dtype: torch.dtype  # dtype of the engine's weights, to which tensors are cast
    is_writer: bool = True  # whether this rank writes files; other ranks only take part in gathering the tensors
    _sent: Path | None = field(default=None, init=False)  # files of the sent version, until its release
    _sent_id: str = field(default="", init=False)
    _base_id: str = field(default="", init=False)  # earlier version whose files are kept; empty: no files are kept
    _is_read: bool = field(default=False, init=False)  # whether engines on other nodes have read the sent version
    _changes: dict[str, FileChanges | None] = field(default_factory=dict, init=False)  # since _base_id, by file

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Write the tensors to files (see WeightSender). Raises ValueError if shared memory is too small."""
        if not self.is_writer:
            for _ in tensors:  # gathers them
                pass
            return None
        self.release_sent_weights()
        target, partial = Path(self.folder, f"v{version}"), Path(self.folder, f".v{version}")
        Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)  # not for other users of the machine
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        digest = self._write_tensors(tensors, partial)
        partial.rename(target)
        self._sent, self._sent_id = target, f"{target.name}-{secrets.token_hex(8)}"
        return WeightUpdate(version, format_digest(digest), target.name)

    def _write_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
        """Write (name, tensor) pairs to safetensors files in `folder` and return the digest of all tensors."""
        digests: list[Future[int]] = []
        with ThreadPoolExecutor(1) as pool:  # a bucket is hashed while it is written and the next one is gathered
            for number, bucket in enumerate(make_buckets(tensors, self.dtype, torch.device("cpu"), FILE_BYTES)):
                wait(digests[:-1])  # so that few buckets are in memory
                digests.append(pool.submit(compute_joint_digest, bucket.values()))
                write_safetensors(bucket, folder / f"{number:05d}.safetensors")
        return sum(digest.result() for digest in digests)

    def read_files(self, folder: str, base_id: str = "") -> SentFiles:
        """Return the files of the sent folder, e.g. `v7`, for an engine on another node that has version `base_id`. If
        this sender has kept the files of that version, a file is returned as changes if they are smaller."""
        self._is_read = True
        paths = [*Path(self.folder, folder).iterdir()]
        common_base_id = base_id if base_id == self._base_id else ""
        if common_base_id and not self._changes:
            compare = lambda path: find_changes(path, self._base_folder / path.name, self.dtype.itemsize)  # noqa: E731
            with ThreadPoolExecutor() as pool:
                self._changes = dict(zip((path.name for path in paths), pool.map(compare, paths), strict=True))
        changes = self._changes if common_base_id else {}
        files = {path.name: changes.get(path.name) or np.fromfile(path, np.uint8) for path in paths}
        return SentFiles(self._sent_id, common_base_id, files)

    def release_sent_weights(self) -> None:
        """Remove the sent files. Keep those that engines on other nodes have read, as the base of the next changes."""
        if not self.is_writer or (self._base_id and not self._sent):  # only the base is left
            return
        shutil.rmtree(self._base_folder, ignore_errors=True)
        if self._sent and self._is_read and has_space_for_copy(self._sent):
            self._sent.rename(self._base_folder)
            self._base_id = self._sent_id
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._base_id = ""
        self._sent, self._is_read, self._changes = None, False, {}

    @property
    def _base_folder(self) -> Path:
        return Path(self.folder, "base")


class SharedAdapterSender(SharedMemorySender):
    """Weight sender that writes a LoRA adapter as a peft folder, for engines with rollout.lora=adapter.

    A folder is kept until the next one is complete, because an engine may load its adapter again."""

    base_digest: int = 0  # of the quantized weights of the base model, which the engine has loaded itself

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        update = super().send(tensors, version)
        if update is not None:
            for folder in Path(self.folder).iterdir():
                if folder.name != update.folder:
                    shutil.rmtree(folder)
        return update

    def _write_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> int:
        return write_adapter_files(tensors, folder, self.dtype) + self.base_digest

    def release_sent_weights(self) -> None:
        """Keep the files (see the class)."""


def write_adapter_files(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype, base_path: str = ""
) -> int:
    """Write a LoRA adapter in peft's format, and return its digest.

    The tensors are A and B of every adapted layer, named as in peft's files. B is already multiplied by the adapter's
    scale, so the engine loads exactly the numbers in the files, and a digest can verify them."""
    adapter = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors}
    write_safetensors(adapter, folder / "adapter_model.safetensors")
    layers = sorted({name.split(".")[-3] for name in adapter})  # ...q_proj.lora_A.weight
    rank = next(tensor.shape[0] for name, tensor in adapter.items() if name.endswith("lora_A.weight"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}
    config["task_type"] = "CAUSAL_LM"
    config |= {"base_model_name_or_path": base_path} if base_path else {}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return compute_joint_digest(adapter.values())


def has_space_for_copy(folder: Path) -> bool:
    """Return whether the folder exists and its file system has space for a second copy of its files."""
    if not folder.is_dir():
        return False
    return shutil.disk_usage(folder).free > sum(path.stat().st_size for path in folder.iterdir())


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
            f"{free:.2f} GiB are free. Free space, or increase shared memory (docker run --shm-size=...)."
        ) from error


def read_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) pairs of all *.safetensors files in a folder."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
