"""Weights sent to a spawned process without vLLM: CUDA IPC handles on a GPU, shared memory on a CPU. Digests are equal,
and five rounds leak no memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from alphaapollo.weight_sync.digest import compute_joint_digest
from scripts.gpu_check.kit import Kit

ROUNDS = 5
SLACK = 2**26  # bytes


def run(kit: Kit) -> dict[str, Any]:
    buckets, elements = (4, 2**27) if kit.on_gpu else (2, 2**18)
    generator = torch.Generator(device=kit.device).manual_seed(0)
    weights = [torch.randn(elements, generator=generator, device=kit.device).bfloat16() for _ in range(buckets)]
    context = multiprocessing.get_context("spawn")
    here, there = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(here, there), daemon=True)
    receiver.start()
    try:
        held, seconds = [], []
        for number in range(ROUNDS):
            expected = [compute_joint_digest([tensor]) for tensor in weights]
            with kit.clock() as clock:
                for tensor in weights:
                    here.put(tensor)
                    there.get(timeout=60)
            seconds += clock
            here.put(None)
            got = there.get(timeout=60)
            assert got == expected, f"round {number}: the receiver has different weights"
            if kit.on_gpu:
                torch.cuda.ipc_collect()
                held.append(torch.cuda.mem_get_info()[0])
            for tensor in weights:
                tensor.add_(1)
    finally:
        receiver.kill()
    moved = sum(tensor.nbytes for tensor in weights)
    figures = {"gb_per_s": moved / min(seconds[1:]) / 1e9, "gb": moved / 1e9}
    if kit.on_gpu:
        figures["leaked_gib"] = (held[1] - held[-1]) / 2**30
        assert held[1] - held[-1] < SLACK, f"free memory by round: {held}"
    return figures


def receive(here: Any, there: Any) -> None:
    """Copy received tensors and report their digest at the end of each round."""
    own: list[torch.Tensor] = []
    number = 0
    while True:
        tensor = here.get()
        if tensor is None:
            there.put([compute_joint_digest([one]) for one in own])
            number = 0
            continue
        if number == len(own):
            own.append(torch.empty_like(tensor))
        own[number].copy_(tensor)
        number += 1
        del tensor
        if own[0].is_cuda:
            torch.cuda.synchronize()
        there.put(True)
