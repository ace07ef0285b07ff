"""The sender of vLLM's GPU weight transfer, tested against the installed vLLM on a CPU: the functions it calls exist,
and a complete send makes the calls that an inference engine expects. tests/gpu has real transfers."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.engines.types import EngineError, EngineSpec
from alphaapollo.engines.vllm.engine import VllmEngine
from alphaapollo.engines.vllm.images import ImagePromptBuilder
from alphaapollo.engines.vllm.settings import build_engine_arguments
from alphaapollo.engines.weight_sync import buckets
from alphaapollo.engines.weight_sync import transfer as weight_transfer
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.engines.weight_sync.transfer import SingleUpdateClient
from alphaapollo.engines.weight_sync.vllm_transfer import VllmTransferSender
from tests.loop.weight_transfer import TransferCase, transfer

TENSORS = {"a": torch.randn(8, 8), "b": torch.randn(5), "c": torch.randn(16, 4)}


class Client:
    """Record the calls to the inference side."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, method: str, *arguments: Any) -> None:
        self.calls.append((method.split("_")[0], arguments[0] if arguments else None))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run vLLM's IPC engine on a CPU: the tensors are real, the handles are fake."""
    from types import SimpleNamespace

    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    empty = torch.empty
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    for module in (torch.cuda, torch.accelerator):  # vLLM 0.32 and 0.33
        monkeypatch.setattr(module, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr(module, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(weight_transfer, "prefetch_buckets", lambda parts: parts)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how | {"device": "cpu"}))
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ("handle", tensor.numel())))
    assert ipc_engine.packed_ipc_producer is packed_tensor.packed_ipc_producer
    yield


def test_all_batches_are_one_update(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 256)
    client = Client()
    sender = VllmTransferSender(client, torch.float32, rank=0, transport="ipc")
    for version in (1, 2):
        update = sender.send(iter(TENSORS.items()), version)
        assert update is not None and update.version == version and update.folder == ""
        assert update.digest == format_digest(compute_joint_digest(TENSORS.values()))
    one_update = ["start", "update", "update", "finish"]  # a has 256 bytes, b and c have 20 + 256
    assert [name for name, _ in client.calls] == ["init", *one_update, *one_update]
    assert client.calls[0][1] == {"packed": True}
    first, second = (info for name, info in client.calls[2:4])
    assert (first["names"], first["tensor_sizes"]) == (["a"], [256])
    assert (second["names"], second["tensor_sizes"], second["shapes"]) == (["b", "c"], [20, 256], [[5], [16, 4]])
    assert second["ipc_handles"] == {"GPU-0": ("handle", 276)}  # the buffer is as large as the batch


def test_called_vllm_functions_exist() -> None:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_worker import Worker

    assert issubclass(SingleUpdateClient, VLLMWeightSyncClient)
    for method in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        ours = inspect.signature(getattr(SingleUpdateClient, method))
        assert list(ours.parameters) == list(inspect.signature(getattr(VLLMWeightSyncClient, method)).parameters)
        assert hasattr(Worker, method)
    assert {"packed", "rank"} <= {field.name for field in dataclasses.fields(IPCTrainerInitInfo)}
    nccl = {field.name for field in dataclasses.fields(NCCLTrainerInitInfo)}
    assert {"master_address", "master_port", "world_size", "packed", "rank"} <= nccl
    assert "packed_buffer_size_bytes" in inspect.signature(IPCTrainerWeightTransferEngine).parameters
    assert {"client", "source"} <= set(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters)
    assert {"level"} <= set(inspect.signature(AsyncLLM.sleep).parameters)
    assert {"tags"} <= set(inspect.signature(AsyncLLM.wake_up).parameters)
    for method in ("pause_generation", "release_kv_cache_memory"):
        own = inspect.signature(getattr(AsyncLLM, method)).parameters.values()
        assert all(one.default is not one.empty for one in own if one.name != "self")
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for device in ("cpu", "cuda"):
        rollout = Rollout(max_num_seqs=256, gpu_memory_utilization=0.5)
        spec = EngineSpec(0, "m", False, rollout, device, "float32", 64, "log")
        assert build_engine_arguments(spec).keys() <= known


class FakeNcclEngine:
    """vLLM's NCCL engine on the trainer: the engines are notified in a separate thread, and the broadcast ends when
    all of them have joined."""

    def __init__(self, client: Any, joined: threading.Event):
        self.client, self.joined, self.source = client, joined, None

    def send_weights(self) -> None:
        threading.Thread(target=self.client.update_weights, args=({},), daemon=True).start()
        self.joined.wait()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_failure_in_a_broadcast_does_not_block_rank_0(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    class Failing(Client):
        def __call__(self, method: str, *arguments: Any) -> None:
            if fails and method == "update_weights":
                raise EngineError("rollout engine 3: its core process died")

    monkeypatch.setattr(weight_transfer, "prefetch_buckets", lambda parts: parts)
    monkeypatch.setattr(weight_transfer, "TRANSFER_SECONDS", 30.0 if fails else 0.2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    sender, joined = VllmTransferSender(Failing(), torch.float32, rank=0, transport="nccl"), threading.Event()
    sender.connection = FakeNcclEngine(sender.client, joined)
    says = "engine 3: its core process died" if fails else r"did not join .* within 0 s\. See its log"
    with pytest.raises(EngineError if fails else TimeoutError, match=says):
        sender.send(TENSORS.items(), 1)
    joined.set()


class FakeAsyncLLM:
    """Record the calls, without the version of the weights: `NAME ARGUMENT ...`."""

    def __init__(self, error: str = "") -> None:
        self.calls: list[str] = []
        self.error = error  # of wake_up

    def __getattr__(self, name: str) -> Any:
        async def record(*arguments: Any, **options: Any) -> Any:
            if name == "wake_up" and self.error:
                raise Exception(self.error)
            shown = [*arguments, *options.values()] if name != "collective_rpc" else arguments
            self.calls.append(" ".join(map(str, [name, *shown])))
            return [0] if name == "collective_rpc" else True

        return record

    def get_num_unfinished_requests(self) -> int:
        return 0


def make_engine(llm: FakeAsyncLLM, device: Device, **rollout: Any) -> VllmEngine:
    """An engine of index 2 that calls a fake of vLLM. Needs a running event loop."""
    engine = VllmEngine(EngineSpec(2, "m", False, Rollout(**rollout), device, "bfloat16", 64, "logs/engine_2.log"))
    llm_of_engine: Any = llm
    engine._engine, engine._core_death = llm_of_engine, asyncio.get_running_loop().create_future()
    return engine


async def publish_and_sleep(device: Device, has_vision: bool = False, **rollout: Any) -> list[str]:
    """Calls to vLLM during a weight sync with sleep, followed by a release of the cache for the trainer."""
    llm = FakeAsyncLLM()
    engine = make_engine(llm, device, **rollout)
    if has_vision:
        engine._image_prompts = ImagePromptBuilder(None)  # type: ignore[arg-type]
    await engine.sleep()
    await engine.wake_weights()
    await engine.receive_weights("folder", 1)
    await engine.confirm_weights(1)
    await engine.wake_cache()
    await engine.release_cache()
    await engine.wake_cache()
    assert not engine.is_stale
    engine._engine = None
    return [call for call in llm.calls if not call.startswith("update_weight_version")]


def test_weights_are_reloaded_before_a_write_and_the_cache_last() -> None:
    write = [f"collective_rpc {name}" for name in ("start_weight_update", "update_weights", "finish_weight_update")]
    update = [*write, "collective_rpc alphaapollo_compute_weight_digest", "reset_prefix_cache"]
    first, last = ["sleep 2 keep", "wake_up ['weights']"], ["wake_up ['kv_cache']"]
    lent = ["pause_generation keep", "release_kv_cache_memory", *last]
    assert asyncio.run(publish_and_sleep("cuda")) == [*first, *update, *last, *lent]
    clear = "collective_rpc alphaapollo_clear_deepstack_features"
    seen = asyncio.run(publish_and_sleep("cuda", has_vision=True))
    assert seen == [*first, clear, *update, "reset_encoder_cache", *last, *lent]
    for device, rollout in (("cpu", {}), ("cuda", {"colocate": False}), ("cuda", {"free_cache_engine": False})):
        assert asyncio.run(publish_and_sleep(device, **rollout)) == update


def test_core_failure_names_engine_and_log() -> None:
    async def wake() -> None:
        engine = make_engine(FakeAsyncLLM("Call to wake_up method failed: CUDA Error: out of memory."), "cuda")
        await engine.sleep()
        await engine.wake_weights()

    with pytest.raises(EngineError, match=r"engine 2 .*logs/engine_2.*out of memory"):
        asyncio.run(wake())


def test_engine_ranks_in_the_group_are_consecutive(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(tensor_model_parallel_size=2, colocate=False)
    engine = VllmEngine(EngineSpec(3, "m", False, rollout, "cuda", "bfloat16", 64, "log"))
    asked = []

    async def on_workers(method: str, *arguments: Any) -> list[Any]:
        asked.append((method, arguments))
        return []

    monkeypatch.setattr(engine, "_call_workers", on_workers)
    asyncio.run(engine.init_weight_transfer_engine({"rank_offset": 1, "world_size": 9}))
    assert asked == [("init_weight_transfer_engine", ({"rank_offset": 7, "world_size": 9},))]


def test_steps_of_the_gpu_test_run_on_a_cpu(tmp_path: Path) -> None:
    """Several buckets and experts, through shared memory."""
    transfer(0, 1, "", TransferCase("Qwen3Moe", {"num_experts": 16}, "cpu", bucket_bytes=2**18, limit=1e-4), tmp_path)
