"""How weights are sent from the training ranks to the engines, and the senders through shared memory.

shared_memory   CPU engines: safetensors under /dev/shm
ipc             engines on the training GPUs: CUDA IPC through vLLM's weight transfer
nccl            engines on separate GPUs: NCCL through vLLM's weight transfer
adapter         engines that serve LoRA adapters on their own base weights: peft files under /dev/shm

All training ranks gather each full tensor (FSDP), so every node has all weights. With shared_memory and adapter, one
rank per node then writes files for the engines on its node; engines on nodes without ranks copy the files of rank 0
through Ray. With ipc, each rank sends to the engine on its own GPU. With nccl, rank 0 sends to all engines.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from alphaapollo.types import WeightUpdate
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.weight_sync.digest import compute_joint_digest, format_digest

TransportKind = Literal["shared_memory", "ipc", "nccl", "adapter"]
BUCKET_BYTES = 1 << 30  # minimum size of a bucket; every bucket costs some 50 ms of calls

Bucket = dict[str, torch.Tensor]


class WeightSender(Protocol):
    """Interface of the object that sends a training rank's weights to the engines."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate | None:
        """Send (name, full tensor) pairs to the engines. A collective: all ranks send the same names in the same order.
        Returns the weights' version and digest on ranks that write or send the tensors, else None."""

    def release_sent_weights(self) -> None:
        """Free the files or buffers of the last weight sync. Call after all engines have confirmed the weights."""


WeightReader = Callable[[str, Path], Awaitable[None]]
"""`copy(folder, target)`: copy the files of the sent folder (WeightUpdate.folder) to the folder `target`, on a node
without training ranks."""


@dataclass(frozen=True)
class Transport:
    """Settings of the weight transfer from the trainer to the engines."""

    kind: TransportKind
    dtype: str  # dtype of the engine's weights: float32 | bfloat16
    shared_folder: str  # folder of the run under /dev/shm, with the same path on every node
    num_engine_ranks: int  # total number of GPUs (or CPU processes) of all engines


def choose_transport(
    device: str, is_colocated: bool, is_vllm_on_ray: bool, serves_adapters: bool = False
) -> TransportKind:
    """Choose how the engines receive weights. ipc and nccl are vLLM's own transfers and need engines over Ray.
    serves_adapters: whether the engines serve LoRA adapters (rollout.lora=adapter)."""
    if serves_adapters:
        return "adapter"
    if device == "cpu" or not is_vllm_on_ray:
        return "shared_memory"
    return "ipc" if is_colocated else "nccl"


def get_weights_folder(shared_folder: str, node_id: str) -> str:
    """Return the shared-memory folder with the weights for a node's engines. node_id: Ray's id of the node."""
    return f"{shared_folder}/weights/{node_id}"


def assign_weight_writers(rank_nodes: Sequence[str], engine_nodes: Collection[str]) -> list[str | None]:
    """Choose the first training rank of each node with engines to write the weights for these engines, and rank 0 if
    there are engines on other nodes. Returns for each rank the node for which it writes, or None."""
    nodes = {*engine_nodes, *rank_nodes[:1]} if set(engine_nodes) - set(rank_nodes) else engine_nodes
    return [node if node in nodes and node not in rank_nodes[:rank] else None for rank, node in enumerate(rank_nodes)]


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
        digests: list[Future[int]] = []
        with ThreadPoolExecutor(1) as pool:  # a bucket is hashed while it is written and the next one is gathered
            for number, bucket in enumerate(make_buckets(tensors, self.dtype, torch.device("cpu"))):
                wait(digests[-1:])
                digests.append(pool.submit(compute_joint_digest, bucket.values()))
                write_safetensors(bucket, folder / f"{number:05d}.safetensors")
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


def make_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[Bucket]:
    """Yield buckets with the tensors cast to `dtype`, contiguous, on `device` (None: unchanged). A bucket ends with the
    tensor that reaches its size. All ranks that iterate the same tensors get the same buckets."""
    bucket: Bucket = {}
    for name, tensor in tensors:
        bucket[name] = tensor.detach().to(device or tensor.device, dtype).contiguous()
        if count_bytes(bucket) >= BUCKET_BYTES:
            HEARTBEAT.tick()
            yield bucket
            bucket = {}
    if bucket:
        yield bucket


def prefetch_buckets(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Yield the buckets, and gather the next bucket on a separate CUDA stream while the caller sends the current one.
    Every rank starts the next gather before it yields, so all ranks run their collectives in the same order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the current stream computes the weights

    def start_gathering_next_bucket() -> tuple[Bucket | None, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            bucket = next(buckets, None)
            return bucket, stream.record_event()

    bucket, gathered = start_gathering_next_bucket()
    while bucket is not None:
        following = start_gathering_next_bucket()
        gathered.synchronize()
        yield bucket
        bucket, gathered = following


def get_largest_bucket_bytes(total_bytes: int) -> int:
    """Return the minimum size of the largest bucket of a model with `total_bytes`."""
    return min(total_bytes, BUCKET_BYTES)


def count_bytes(bucket: Bucket) -> int:
    """Return the size of a bucket in bytes."""
    return sum(tensor.nbytes for tensor in bucket.values())
