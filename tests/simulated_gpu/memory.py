"""Memory of an update at real size: allocations on a fake GPU, replayed through a model of torch's caching allocator.

    python -m tests.simulated_gpu.memory '{"model": DIR, "world_size": 8, "max_tokens": 4096, "row_length": 2048}'

Prints {"allocated", "reserved", "smallest", "planned"} in GiB as JSON. smallest: the smallest device on which the
second update survives. planned: what alphaapollo/planning expects. With "publishes": true, it measures a weight sync.
"""

from __future__ import annotations

import bisect
import gc
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alphaapollo.config.schema import Actor
from alphaapollo.engines.weight_sync.buckets import count_bytes, make_buckets, prefetch_buckets
from alphaapollo.models import expert_parallel, policy
from alphaapollo.models.export import gather_parameters
from alphaapollo.planning.model_memory import count_sent_bytes, estimate_update, load_model_sizes, make_rank_model
from alphaapollo.workers.policy import PolicyWorker
from tests.simulated_gpu.fake_cuda import FakeGpu, Stream
from tests.simulated_gpu.workers import fake_rank, make_batch, make_columns, make_policy, make_rows

MIB, GIB = 1 << 20, 1 << 30
MICRO_BATCHES = 3
Event = tuple[
    str, int, int, int
]  # ("allocate", number, bytes, stream), ("free", number, 0, 0) or ("empty_cache", 0, 0, 0)


class Trace(TorchDispatchMode):
    """Mode that records allocations and releases of storages on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._alive: dict[int, tuple[int, Any, int]] = {}  # address of a storage -> (number, weak reference, bytes)
        self._known: set[int] = set()
        self._count = 0

    def empty_cache(self) -> None:
        self.events.append(("empty_cache", 0, 0, 0))

    def resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Record `UntypedStorage.resize_`, by which FSDP frees and allocates gathered parameters."""
        key, before = storage._cdata, storage.nbytes()
        if key in self._alive and before != size:
            self._free(key)
        result = RESIZE(storage, size)
        if before != size and key in self._known:
            self._allocate(storage)
        return result

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        if size == 0 or key in self._alive:
            return
        self._count += 1
        number = self._count
        self._alive[key] = (number, weakref.ref(storage, lambda _: self._forget(key, number)), size)
        self.events.append(("allocate", number, size, Stream.current.stream_id))

    def _forget(self, key: int, number: int) -> None:
        self._known.discard(key)
        if key in self._alive and self._alive[key][0] == number:
            self._free(key)

    def _free(self, key: int) -> None:
        self.events.append(("free", self._alive.pop(key)[0], 0, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda" and leaf.fake_mode is FakeGpu.fakes:
                self._allocate(leaf.untyped_storage())
        return made


RESIZE = torch.UntypedStorage.resize_


@dataclass(eq=False)
class Block:
    """Part of a segment of memory, free or in use."""

    segment: tuple[int, bool, int, int]  # number, is in the pool of small blocks, stream, bytes
    start: int
    size: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


def _order(block: Block) -> tuple[int, int, int]:
    return block.size, block.segment[0], block.start


@dataclass
class CachingAllocator:
    """Model of torch's caching allocator: best fit, splits and merges of blocks, pools by stream and by size."""

    capacity: int = 0  # bytes; 0: unlimited
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    failures: int = 0  # allocations beyond the capacity
    _pools: dict[tuple[bool, int], list[Block]] = field(default_factory=dict)  # free blocks by size
    _used: dict[int, Block] = field(default_factory=dict)
    _segments: int = 0

    def allocate(self, number: int, size: int, stream: int) -> None:
        size = max(512, -(-size // 512) * 512)
        is_small = size <= MIB
        free = self._pools.setdefault((is_small, stream), [])
        index = bisect.bisect_left(free, (size, 0, 0), key=_order)
        block = free.pop(index) if index < len(free) else self._make_segment(size, is_small, stream)
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            new = Block(block.segment, block.start + size, rest, before=block, after=block.after)
            if block.after:
                block.after.before = new
            block.after, block.size = new, size
            self._put(new)
        block.is_free = False
        self._used[number] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _make_segment(self, size: int, is_small: bool, stream: int) -> Block:
        segment = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity and self.reserved + segment > self.capacity:
            self.empty_cache()
            self.failures += self.reserved + segment > self.capacity
        self.reserved += segment
        self._segments += 1
        return Block((self._segments, is_small, stream, segment), 0, segment)

    def _put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._pools.setdefault(block.segment[1:3], []), block, key=_order)

    def free(self, number: int) -> None:
        block = self._used.pop(number)
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other and other.is_free:
                pool = self._pools[other.segment[1:3]]
                del pool[bisect.bisect_left(pool, _order(other), key=_order)]
                first, second = (other, block) if other is block.before else (block, other)
                first.size, first.after = first.size + second.size, second.after
                if second.after:
                    second.after.before = first
                block = first
        self._put(block)

    def empty_cache(self) -> None:
        for key, free in self._pools.items():
            whole = [block for block in free if block.size == block.segment[3]]
            self.reserved -= sum(block.size for block in whole)
            self._pools[key] = [block for block in free if block.size != block.segment[3]]

    def replay(self, events: list[Event]) -> None:
        for kind, number, size, stream in events:
            if kind == "allocate":
                self.allocate(number, size, stream)
            elif kind == "free":
                self.free(number)
            else:
                self.empty_cache()


def survives(first: list[Event], second: list[Event], capacity: int) -> bool:
    """Whether the second update fits into a device of `capacity` bytes after the first one."""
    allocator = CachingAllocator()
    allocator.replay(first)
    allocator.empty_cache()
    allocator.capacity = capacity
    allocator.replay(second)
    return not allocator.failures


@contextmanager
def traced_worker(case: dict[str, Any]) -> Iterator[tuple[Trace, PolicyWorker]]:
    """Context manager with a policy worker on a fake GPU, all of whose allocations are traced."""
    trace, pairs = Trace(), [0]
    exchange = expert_parallel._exchange_and_compute

    def exchange_balanced(*args: Any) -> Any:
        pairs[0] = args[4].numel()
        return exchange(*args)

    def balance(sizes: torch.Tensor) -> list[list[int]] | None:
        if sizes.ndim != 2 or sizes.shape[0] != 2 or not pairs[0]:
            return None
        ranks = sizes.shape[1]
        return [[pairs[0] // ranks + (rank < pairs[0] % ranks) for rank in range(ranks)]] * 2

    with (
        mock.patch.object(expert_parallel, "_exchange_and_compute", exchange_balanced),
        mock.patch.object(policy, "find_excluded_ids", lambda *_: ()),  # the folders have no tokenizer
        mock.patch.object(torch.UntypedStorage, "resize_", lambda storage, size: trace.resize(storage, size)),
        fake_rank(case["world_size"], [trace]),
        mock.patch.object(torch.cuda, "empty_cache", trace.empty_cache),
    ):
        FakeGpu.hints.append(balance)
        model = {"enable_gradient_checkpointing": case.get("checkpointing", False)}
        model["activation_offload"] = case.get("offloads", False)
        yield trace, make_policy(Path(case["model"]), case.get("actor"), model, case["world_size"])


def trace_updates(case: dict[str, Any]) -> tuple[list[Event], list[Event], Any]:
    """Trace two updates, each with the offloading after it. Returns their events, and the worker's model section."""
    world, length = case["world_size"], case["row_length"]
    random, count = np.random.default_rng(0), world * MICRO_BATCHES * (case["max_tokens"] // length)
    rows = make_rows(random.integers(length // 2, length - 256, count).tolist(), 256, 30_000)
    with traced_worker(case) as (trace, worker):
        batch = make_batch(worker, rows, world, max_tokens=case["max_tokens"])
        worker.load_batch(batch.rank_batches[0])
        ends = []
        for _ in range(2):
            worker.update(make_columns(batch))
            gc.collect()
            worker.offload()
            gc.collect()
            ends.append(len(trace.events))
    return trace.events[: ends[0]], trace.events[ends[0] : ends[1]], worker.config


def measure_publish(case: dict[str, Any]) -> dict[str, float]:
    """Measure what a rank needs in addition while it gathers the weights, packs them and sends them over CUDA IPC."""
    with traced_worker(case) as (trace, worker):
        worker.offload()
        start = len(trace.events)
        for bucket in prefetch_buckets(
            make_buckets(gather_parameters(worker.policy.model, worker.dtype), worker.dtype)
        ):
            packed = torch.empty(count_bytes(bucket), dtype=torch.uint8, device="cuda")
            del bucket, packed
    allocator = CachingAllocator()
    allocator.replay([*trace.events[:start], ("empty_cache", 0, 0, 0)])
    idle = allocator.peak_reserved = allocator.reserved
    allocator.replay(trace.events[start:])
    planned = count_sent_bytes(load_model_sizes(worker.config), 2)
    return {"reserved": (allocator.peak_reserved - idle) / GIB, "planned": planned / GIB}


def measure(case: dict[str, Any]) -> dict[str, float]:
    first, second, section = trace_updates(case)
    allocator = CachingAllocator()
    allocator.replay(first)
    allocator.empty_cache()
    allocator.peak_reserved = allocator.peak_allocated = 0
    allocator.replay(second)
    low, high = allocator.peak_allocated, allocator.peak_reserved
    while high - low > GIB // 4:
        middle = (low + high) // 2
        low, high = (low, middle) if survives(first, second, middle) else (middle, high)
    shape = case["max_tokens"] // case["row_length"], case["row_length"]
    fsdp = Actor(**case.get("actor", {})).fsdp_config
    planned = estimate_update(make_rank_model(section, fsdp, "cuda", case["world_size"], shape, steps_per_update=1))
    sizes = {"allocated": allocator.peak_allocated, "reserved": allocator.peak_reserved, "smallest": high}
    return {name: size / GIB for name, size in {**sizes, "planned": planned.total()}.items()}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    found = measure_publish(arguments) if arguments.get("publishes") else measure(arguments)
    print(json.dumps({name: round(size, 2) for name, size in found.items()}))
