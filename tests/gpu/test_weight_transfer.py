"""vLLM's weight transfer on real GPUs: CUDA IPC with sleep on a shared GPU, NCCL between two."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.protocol import EngineError
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.types import Sampling
from alphaapollo.weight_sync.vllm_transfer import VllmTransferSender
from tests.loop.engine_kit import PROBE, checkpoint, logprobs_of, make_model, mean_abs_difference

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(600)


class Client:
    """Engine client for the trainer's thread."""

    def __init__(self, engine: VllmEngine, loop: asyncio.AbstractEventLoop):
        self._engine, self._loop = engine, loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._engine.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._wait(self._engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._engine.finish_weight_update(weight_version))

    def _wait(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result(300)


@contextmanager
def visible(gpu: int) -> Iterator[None]:
    """Restore only this variable. vLLM's front end still needs others that it set during its start."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = str(gpu)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


async def publish_and_prove(folder: Path, colocate: bool) -> None:
    old, new = (make_model("Qwen3", seed, tie_word_embeddings=True, head_dim=64) for seed in (0, 1))
    old.save_pretrained(folder / "model")
    rollout = Rollout(colocate=colocate, gpu_memory_utilization=0.2, enforce_eager=True)
    spec = EngineSpec(
        index=0,
        model_path=str(folder / "model"),
        trust_remote_code=False,
        rollout=rollout,
        device="cuda",
        dtype="bfloat16",
        max_model_len=256,
        log_path=str(folder / "engine.log"),
        transport="ipc" if colocate else "nccl",
    )
    engine = VllmEngine(spec)
    with visible(0 if colocate else 1):
        await engine.start()
    try:
        sender = VllmTransferSender(
            Client(engine, asyncio.get_running_loop()),
            torch.bfloat16,
            rank=0,
            transport=spec.transport,  # type: ignore[arg-type]
            master_address="127.0.0.1",
            num_engine_ranks=1,
        )
        on_gpu = {name: tensor.cuda() for name, tensor in checkpoint(new).items()}
        for version in (1, 2):
            free = torch.cuda.mem_get_info()[0]
            await engine.sleep()
            if colocate:
                assert torch.cuda.mem_get_info()[0] > free + 2**30, "sleep gives memory back"
                with pytest.raises(EngineError, match="Send weights first"):
                    await engine.generate(PROBE, Sampling(2), "too-early")
            await engine.wake_weights()
            update = await asyncio.to_thread(sender.send, on_gpu.items(), version)
            receipt = await engine.confirm_weights(version)
            sender.release_sent_weights()
            await engine.wake_cache()
            assert (receipt.version, receipt.digest) == (update.version, update.digest)
            gap = mean_abs_difference(await engine.log_probs(PROBE), logprobs_of(new, PROBE))
            assert gap < 0.1 < mean_abs_difference(logprobs_of(old, PROBE), logprobs_of(new, PROBE))
            assert (await engine.generate(PROBE, Sampling(4), f"r{version}")).weight_version == version
            if colocate:
                free = torch.cuda.mem_get_info()[0]
                await engine.release_cache()
                assert torch.cuda.mem_get_info()[0] > free + 2**30, "the cache's memory is lent"
                await engine.wake_cache()
                assert mean_abs_difference(await engine.log_probs(PROBE), logprobs_of(new, PROBE)) < 0.1
    finally:
        await engine.close()


def test_cuda_ipc_on_a_shared_gpu(tmp_path: Path) -> None:
    asyncio.run(publish_and_prove(tmp_path, colocate=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_between_two_gpus(tmp_path: Path) -> None:
    asyncio.run(publish_and_prove(tmp_path, colocate=False))
