"""What the workers of all roles share: their place among the ranks, and sums over ranks."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from alphaapollo.config.schema import Model
from alphaapollo.data.batch import MiniBatch, Rows
from alphaapollo.models.micro_batch import MicroBatch, build_micro_batch
from alphaapollo.models.sharding import join_process_group, make_mesh, reshard
from alphaapollo.models.training.train_state import OptimizerStep
from alphaapollo.models.ulysses import SequenceGroup, sequence_groups

LARGEST = "_max"
ALONE = ""  # the meeting point of one rank


@dataclass(frozen=True)
class RankPlacement:
    """Where one training rank stands."""

    rank: int
    world_size: int
    init_method: str  # where the ranks meet: as of models/sharding.py join_process_group
    device: str  # "cpu" or "cuda"
    threads: int  # torch threads
    sequence_parallel: int = 1  # ranks that share every sequence: consecutive ones, a divisor of all
    engine_node: str | None = None  # the node whose engines it writes weights for, where those go through shared memory


@dataclass(frozen=True)
class RankGroups:
    """Whom this rank works with."""

    shards: DeviceMesh  # who holds the copies and slices of the model
    sequence: SequenceGroup | None  # who computes the same rows; None: nobody
    data: dist.ProcessGroup | None  # ranks that together have every row once; None: all


def join(placement: RankPlacement, fsdp_size: int = -1) -> RankGroups:
    """Take this process's place among the ranks (a collective of all of them). `fsdp_size`: ranks that hold one copy of
    the model; -1 = all."""
    torch.set_num_threads(placement.threads)  # Ray starts its processes with one
    if placement.device == "cuda":
        torch.cuda.set_device(placement.rank % torch.cuda.device_count())  # a Ray actor sees its own GPU only
    join_process_group(placement.device, placement.rank, placement.world_size, placement.init_method)
    return RankGroups(
        make_mesh(placement.device, fsdp_size), *sequence_groups(placement.device, placement.sequence_parallel)
    )


def leave() -> None:
    """Give the place up.

    A thread of gloo may still be letting go of the last tensors; should it want the interpreter while that exits, the
    process aborts. Collecting garbage gives it the time.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def free_cache(device: torch.device) -> None:
    """What torch keeps of a GPU without using it goes back: the next one there is another process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def torch_dtype(model: Model) -> torch.dtype:
    """Of forward and backward. `model` is resolved (config/resolve.py); float64 is of replays alone."""
    assert model.dtype != "auto", "resolve_model comes first"
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def inexact(dtype: torch.dtype, section: str) -> str:
    """The key of a model's arithmetic, unless that is exact already. section: e.g. actor_rollout_ref.model."""
    return "" if dtype == torch.float32 else f"{section}.dtype"


class MetricSums:
    """Named sums, added up over micro-batches without waiting for the device, then over ranks; of names that end in
    _max the largest.

    All ranks must add the same names. `group`: ranks that together have every row once; None: all."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.totals: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            if name in self.totals:
                combine = torch.maximum if name.endswith(LARGEST) else torch.add
                value = combine(self.totals[name], value)
            self.totals[name] = value

    def reduce(self, device: torch.device) -> dict[str, float]:
        """A collective of all ranks."""
        return self._reduced(device, False) | self._reduced(device, True)

    def _reduced(self, device: torch.device, largest: bool) -> dict[str, float]:
        names = sorted(name for name in self.totals if name.endswith(LARGEST) is largest)
        if not names:
            return {}
        totals = torch.stack([self.totals[name].to(device) for name in names])
        dist.all_reduce(totals, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return dict(zip(names, totals.tolist(), strict=True))


def optimizer_step_metrics(steps: Sequence[OptimizerStep], grad_clip: float) -> dict[str, float]:
    """Of the optimizer steps of one iteration; the norms are of those that were made."""
    norms = [step.grad_norm for step in steps if not step.skipped] or [math.nan]
    return {
        "grad_norm": mean(norms),
        "grad_norm_max": max(norms),
        "grad_clipped": mean(norm > grad_clip for norm in norms),
        "lr": steps[-1].lr,
        "steps_skipped": float(sum(step.skipped for step in steps)),
    }


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


@torch.no_grad()
def compute_column(
    root: torch.nn.Module,
    compute: Callable[[MicroBatch], Tensor],
    rows: Rows,
    mini_batches: Iterable[MiniBatch],
    padded: bool,
    device: torch.device,
    sequence: SequenceGroup | None = None,
) -> np.ndarray:
    """What the model says about every response token of the rows in `mini_batches`, zero elsewhere: forward passes over
    their micro-batches. float32 [sum responses]

    Args:
        root: the model, which is not left gathered.
        compute: a micro-batch -> a number for each of its response tokens, [n].
    """
    column = ColumnBuilder(rows)
    for mini_batch in mini_batches:
        for positions in mini_batch.micro_batches:
            micro = build_micro_batch(rows, positions, padded, device, sequence=sequence)
            column.add(positions, micro.values(compute(micro)))
    reshard(root)
    return column.reload()


class ColumnBuilder:
    """A column [sum responses] of `rows` as micro-batches compute it. It stays on the device until all is there."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.positions: list[int] = []
        self.parts: list[Tensor] = []

    def add(self, positions: list[int], values: Tensor) -> None:
        """The flat values of the rows at `positions`."""
        self.positions += positions
        self.parts.append(values)

    def reload(self, column: np.ndarray | None = None) -> np.ndarray:
        """What was added, written into `column` (zeros). float32 (float64 stays) [sum responses]"""
        offsets, done = self.rows.response_offsets, 0
        values = np.zeros(0, dtype=np.float32)
        if self.parts:
            computed = torch.cat(self.parts)
            values = computed.to(torch.promote_types(computed.dtype, torch.float32)).cpu().numpy()
        column = np.zeros(offsets[-1], values.dtype) if column is None else column
        column = column.astype(np.promote_types(column.dtype, values.dtype), copy=False)
        for position in self.positions:
            start, end = offsets[position], offsets[position + 1]
            column[start:end] = values[done : done + end - start]
            done += end - start
        return column
