"""Weights of a worker sent to a spawned process in the buckets of a weight sync, without vLLM: CUDA IPC handles on a
GPU, shared memory on a CPU. Digests are equal, and five rounds leak no memory. Speed of gathering, digests and IPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from alphaapollo.engines.weight_sync import buckets
from alphaapollo.engines.weight_sync.digest import MODULUS, compute_joint_digest
from alphaapollo.models.export import gather_parameters
from alphaapollo.workers.policy import PolicyWorker
from scripts.gpu_check.kit import Kit

ROUNDS = 5
SLACK = 2**26  # bytes


def run(kit: Kit) -> None:
    worker = kit.worker(kit.model())
    worker.state.reload()
    context = multiprocessing.get_context("spawn")
    here, there = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(here, there), daemon=True)
    receiver.start()
    try:
        send_rounds(kit, worker, here, there)
    finally:
        receiver.kill()
    gathered = list(gather_buckets(worker))
    moved = sum(map(buckets.count_bytes, gathered))
    weights = [tensor for bucket in gathered for tensor in bucket.values()]
    kit.record("digest_gb_per_s", moved / kit.time(lambda: compute_joint_digest(weights)) / 1e9)
    kit.record("gather_gb_per_s", moved / kit.time(lambda: list(gather_buckets(worker))) / 1e9)


def gather_buckets(worker: PolicyWorker) -> Iterator[buckets.Bucket]:
    """Buckets of about 1 GiB, like VllmTransferSender."""
    return buckets.make_buckets(gather_parameters(worker.policy.model, worker.dtype), worker.dtype)


def send_rounds(kit: Kit, worker: PolicyWorker, here: Any, there: Any) -> None:
    used, moved, count = [], 0, 0
    for number in range(ROUNDS):
        expected, moved, count = 0, 0, 0
        with kit.clock() as seconds:
            for bucket in gather_buckets(worker):
                expected += compute_joint_digest(bucket.values())
                moved, count = moved + buckets.count_bytes(bucket), count + 1
                here.put(bucket)
                there.get(timeout=60)
                del bucket  # free its memory before another gather starts
        here.put(None)
        assert there.get(timeout=60) == expected % MODULUS, f"round {number}: the receiver has different weights"
        kit.memory.free_unused()
        used.append(kit.memory.get_used())
        kit.record(f"round {number} gb_per_s", moved / seconds[0] / 1e9)
        with torch.no_grad():
            for parameter in worker.policy.parameters():
                parameter.mul_(1.01)
    kit.record("gb", moved / 1e9)
    kit.record("buckets", count)
    kit.record("leaked_gib", (used[-1] - used[1]) / 2**30)
    assert not kit.on_gpu or used[-1] - used[1] < SLACK, f"used memory by round: {used}"


def receive(here: Any, there: Any) -> None:
    """Copy received buckets, and report the joint digest at the end of each round."""
    own: dict[str, torch.Tensor] = {}
    while True:
        bucket = here.get()
        if bucket is None:
            there.put(compute_joint_digest(own.values()))
            continue
        for name, tensor in bucket.items():
            own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        on_gpu = next(iter(bucket.values())).is_cuda
        del bucket, tensor
        if on_gpu:
            torch.cuda.synchronize()
        there.put(True)
