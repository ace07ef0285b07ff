"""Weight syncs into a running vLLM engine in the order of session/publish.py, with both verifications. tests/gpu runs
them on GPUs; tests/loop runs the same steps on a CPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineError, EngineSpec
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.engines.weight_sync import buckets
from alphaapollo.engines.weight_sync.shared_memory import SharedMemorySender
from alphaapollo.engines.weight_sync.transport import TransportKind, WeightUpdate
from alphaapollo.engines.weight_sync.vllm_transfer import VllmTransferSender
from alphaapollo.models.sharding import join_process_group
from alphaapollo.types import Sampling
from tests.loop.engine_kit import PROBE, checkpoint, logprobs_of, make_model, mean_abs_difference

NUM_TOKENS = 8  # sampled after each weight sync
GIB = 2**30


@dataclass(frozen=True)
class TransferCase:
    """Engine and transport of a test."""

    kind: str = "Qwen3"
    sizes: dict[str, Any] = field(default_factory=dict)
    device: Device = "cuda"
    colocate: bool = True
    tensor_parallel: int = 1
    has_graphs: bool = False
    bucket_bytes: int = buckets.BUCKET_BYTES
    limit: float = 0.1  # mean |difference| of log-probs of engine (bfloat16 on GPUs) and transformers (float32)

    @property
    def transport(self) -> TransportKind:
        if self.device == "cpu":
            return "shared_memory"
        return "ipc" if self.colocate else "nccl"

    @property
    def num_trainers(self) -> int:
        """Training ranks: over IPC, one on each GPU of the engine."""
        return self.tensor_parallel if self.transport == "ipc" else 1

    @property
    def engine_gpus(self) -> str:
        first = 0 if self.colocate else 1
        return ",".join(map(str, range(first, first + self.tensor_parallel)))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def make_models(self) -> tuple[Any, Any]:
        sizes = {"tie_word_embeddings": True, "head_dim": 64} | self.sizes
        return make_model(self.kind, 0, **sizes), make_model(self.kind, 1, **sizes)

    def make_engine(self, folder: Path) -> VllmEngine:
        rollout = {"gpu_memory_utilization": 0.2} if self.device == "cuda" else {"kv_cache_gib": 0.1}
        return VllmEngine(
            EngineSpec(
                index=0,
                model_path=str(folder / "model"),
                trust_remote_code=False,
                rollout=Rollout(
                    max_num_seqs=32,
                    colocate=self.colocate,
                    enforce_eager=not self.has_graphs,
                    tensor_model_parallel_size=self.tensor_parallel,
                    **rollout,  # type: ignore[arg-type]
                ),
                device=self.device,
                dtype=str(self.dtype).removeprefix("torch."),
                max_model_len=256,
                log_path=str(folder / "engine.log"),
                transport=self.transport,
            )
        )


class Client:
    """Engine client for the trainer's thread. Counts the buckets."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop):
        self._engine, self._loop = engine, loop
        self.num_buckets = 0

    def __call__(self, method: str, *arguments: Any) -> None:
        self.num_buckets += method == "update_weights"
        call = getattr(self._engine, method)(*arguments)
        asyncio.run_coroutine_threadsafe(call, self._loop).result(300)


def transfer(rank: int, num_ranks: int, address: str, case: TransferCase, folder: Path) -> None:
    """Training rank of a test. Rank 0 also has the engine."""
    if case.device == "cuda":
        torch.cuda.set_device(rank)
    if num_ranks > 1:
        join_process_group(case.device, rank, num_ranks, address)
    models = case.make_models()
    with mock.patch.object(buckets, "BUCKET_BYTES", case.bucket_bytes):
        if rank == 0:
            asyncio.run(publish_and_verify(case, folder, *models))
            return
        sender = VllmTransferSender(None, case.dtype, rank, "ipc")
        for version, model in enumerate(reversed(models), start=1):
            assert sender.send(to_device(checkpoint(model), case).items(), version) is None
            sender.release_sent_weights()


async def publish_and_verify(case: TransferCase, folder: Path, old: Any, new: Any) -> None:
    """Start an engine with `old`, then send `new` and `old` again."""
    old.save_pretrained(folder / "model")
    engine = case.make_engine(folder)
    with visible_gpus(case.engine_gpus):
        await engine.start()
    client = Client(engine, asyncio.get_running_loop())
    try:
        sender = make_sender(case, client)
        for version, (model, other) in enumerate(((new, old), (old, new)), start=1):
            await sleep(engine, case)
            await engine.wake_weights()
            update = await send(sender, engine, to_device(checkpoint(model), case), version)
            receipt = await engine.confirm_weights(version)
            sender.release_sent_weights()
            await engine.wake_cache()
            assert (receipt.version, receipt.digest) == (update.version, update.digest)
            await verify(engine, case, version, model, other)
            if engine.spec.is_colocated:
                free = torch.cuda.mem_get_info()[0]
                await engine.release_cache()
                assert torch.cuda.mem_get_info()[0] > free + GIB, "the memory of the KV cache is not released"
                await engine.wake_cache()
                await verify(engine, case, version, model, other)
        weights = checkpoint(new)
        several = sum(tensor.numel() for tensor in weights.values()) * case.dtype.itemsize > 2 * case.bucket_bytes
        assert case.device == "cpu" or client.num_buckets == 2 or (several and client.num_buckets > 3)
    finally:
        await engine.close()


def make_sender(case: TransferCase, client: Client) -> VllmTransferSender | SharedMemorySender:
    if case.device == "cpu":
        return SharedMemorySender(f"/dev/shm/alphaapollo-test-{os.getpid()}", case.dtype)
    return VllmTransferSender(
        client,
        case.dtype,
        rank=0,
        transport=case.transport,  # type: ignore[arg-type]
        master_address="127.0.0.1",
        num_engine_ranks=case.tensor_parallel,
    )


async def sleep(engine: VllmEngine, case: TransferCase) -> None:
    free = torch.cuda.mem_get_info()[0] if case.device == "cuda" else 0
    await engine.sleep()
    if engine.spec.is_colocated:
        assert torch.cuda.mem_get_info()[0] > free + GIB, "sleep does not release memory"
        with pytest.raises(EngineError, match="Send weights first"):
            await engine.generate(PROBE, Sampling(2), "too-early")


async def send(sender: Any, engine: VllmEngine, weights: dict[str, torch.Tensor], version: int) -> WeightUpdate:
    update = await asyncio.to_thread(sender.send, weights.items(), version)
    if isinstance(sender, SharedMemorySender):
        await engine.receive_weights(str(Path(sender.folder, update.folder)), version)
    assert isinstance(update, WeightUpdate)
    return update


async def verify(engine: VllmEngine, case: TransferCase, version: int, model: Any, other: Any) -> None:
    """Log-probs of a prompt, and of tokens that the engine samples (with CUDA graphs, if the case has them)."""
    gap = mean_abs_difference(await engine.log_probs(PROBE), logprobs_of(model, PROBE))
    assert gap < case.limit < mean_abs_difference(logprobs_of(other, PROBE), logprobs_of(model, PROBE))
    answer = await engine.generate(PROBE, Sampling(NUM_TOKENS, seed=version), f"r{version}")
    assert answer.weight_version == version
    expected = logprobs_of(model, [*PROBE, *answer.token_ids])[-len(answer.token_ids) :]
    assert mean_abs_difference(list(answer.logprobs), expected) < case.limit


def to_device(weights: dict[str, torch.Tensor], case: TransferCase) -> dict[str, torch.Tensor]:
    return {name: tensor.to(case.device) for name, tensor in weights.items()}


@contextmanager
def visible_gpus(numbers: str) -> Iterator[None]:
    """Restore only this variable. vLLM's front end still needs others that it set during its start."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = numbers
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
