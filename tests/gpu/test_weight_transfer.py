"""vLLM's weight transfer on real GPUs: CUDA IPC with sleep on shared GPUs, NCCL between separate GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loop.weight_transfer import TransferCase, transfer
from tests.unit.tiny import run_ranks

pytest.importorskip("vllm")

SEVERAL = 2**18  # bytes of a bucket, so that the tiny model has several
MOE: dict[str, Any] = {"kind": "Qwen3Moe", "sizes": {"num_experts": 16}, "limit": 0.25}  # bfloat16 changes some experts
SHARED_GPU = {
    "one_bucket": TransferCase(),
    "several_buckets": TransferCase(bucket_bytes=SEVERAL),
    "graphs": TransferCase(bucket_bytes=SEVERAL, has_graphs=True),
    "moe": TransferCase(bucket_bytes=SEVERAL, **MOE),
}
SEVERAL_GPUS = {
    "ipc": TransferCase(bucket_bytes=SEVERAL, tensor_parallel=2),
    "ipc_moe": TransferCase(bucket_bytes=SEVERAL, tensor_parallel=2, **MOE),
    "nccl": TransferCase(bucket_bytes=SEVERAL, colocate=False),
    "nccl_tensor_parallel": TransferCase(bucket_bytes=SEVERAL, colocate=False, tensor_parallel=2),
}


@pytest.mark.parametrize("name", SHARED_GPU)
def test_cuda_ipc_on_a_shared_gpu(tmp_path: Path, name: str) -> None:
    transfer(0, 1, "", SHARED_GPU[name], tmp_path)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_several_gpus(tmp_path: Path, name: str) -> None:
    case = SEVERAL_GPUS[name]
    needed = int(case.engine_gpus[-1]) + 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    run_ranks(transfer, case.num_trainers, case, tmp_path, timeout=500, fresh=True)
