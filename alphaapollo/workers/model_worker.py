"""Base classes of the workers, their forward passes and metrics. A worker is one rank of a frozen or trained model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.batching.batch import MiniBatch, RankBatch, Rows
from alphaapollo.config.schema import Fsdp, LoraForm, Model
from alphaapollo.engines.weight_sync.digest import compute_joint_digest
from alphaapollo.models.checkpoint import CheckpointWriter
from alphaapollo.models.export import export_model
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.moe_routing import ExpertLoadBalancer, RouterHooks
from alphaapollo.models.sharding import FsdpRoot, reshard
from alphaapollo.models.train_state import OptimizerStep, TrainState
from alphaapollo.models.update_record import UpdateRecord
from alphaapollo.observability.timing import measure_process_memory
from alphaapollo.workers.process_group import WITHOUT_REPLICAS, RankPlacement, initialize_rank, shut_down_rank

MAX_SUFFIX = "_max"


class MetricSums:
    """Sums of metrics over micro-batches and ranks; maxima for names that end in _max.

    `add` does not wait for the GPU. All ranks of `group` (None: all ranks) must add the same names.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.totals: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().double()
            if name in self.totals:
                combine = torch.maximum if name.endswith(MAX_SUFFIX) else torch.add
                value = combine(self.totals[name], value)
            self.totals[name] = value

    def reduce(self, device: torch.device) -> dict[str, float]:
        """Return the sums and maxima over all ranks. All ranks of the group must call this (a collective)."""
        reduced: dict[str, float] = {}
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            is_max = operation == dist.ReduceOp.MAX
            names = sorted(name for name in self.totals if name.endswith(MAX_SUFFIX) is is_max)
            if names:
                totals = torch.stack([self.totals[name].to(device) for name in names])
                dist.all_reduce(totals, operation, group=self.group)
                reduced |= dict(zip(names, totals.tolist(), strict=True))
        return reduced


def compute_optimizer_metrics(steps: Sequence[OptimizerStep], grad_clip: float) -> dict[str, float]:
    """Compute gradient norm, clipping and learning rate of optimizer steps. Leaves out norms of skipped steps."""
    norms = [step.grad_norm for step in steps if not step.skipped] or [math.nan]
    return {
        "grad_norm": sum(norms) / len(norms),
        "grad_norm_max": max(norms),
        "grad_clipped": sum(norm > grad_clip for norm in norms) / len(norms),
        "lr": steps[-1].lr,
        "steps_skipped": float(sum(step.skipped for step in steps)),
    }


TokenParts = list[tuple[list[int], Tensor]]  # for each micro-batch: indices of its rows, a number per response token


@torch.no_grad()
def compute_token_outputs(
    model: FsdpRoot,
    compute_outputs: Callable[[MicroBatch], Tensor],
    rows: Rows,
    mini_batches: Iterable[MiniBatch],
    builder: MicroBatchBuilder,
) -> np.ndarray:
    """Compute one or several numbers per response token of the rows in `mini_batches`, and 0 for other rows. Returns
    float32 [response tokens, ...], and reshards the model. compute_outputs: forward pass of a micro-batch, [n, ...]."""
    parts: TokenParts = []
    for mini_batch in mini_batches:
        for row_indices in mini_batch.micro_batches:
            micro = builder.build(rows, row_indices)
            parts.append((row_indices, micro.drop_dummy_row(compute_outputs(micro))))
    reshard(model)
    return merge_token_values(rows, parts)


def merge_token_values(rows: Rows, parts: TokenParts, initial_values: np.ndarray | None = None) -> np.ndarray:
    """Merge numbers that were computed in micro-batches into one array [response tokens of `rows`].

    Tokens in no micro-batch keep their number in `initial_values` (None: 0). float32, or float64 if an input is.
    """
    offsets, num_merged = rows.response_offsets, 0
    values = np.zeros(0, dtype=np.float32)
    if parts:
        computed = torch.cat([part for _, part in parts])
        values = computed.to(torch.promote_types(computed.dtype, torch.float32)).cpu().numpy()
    column = np.zeros((offsets[-1], *values.shape[1:]), values.dtype) if initial_values is None else initial_values
    column = column.astype(np.promote_types(column.dtype, values.dtype), copy=False)
    for index in (index for row_indices, _ in parts for index in row_indices):
        start, end = offsets[index], offsets[index + 1]
        column[start:end] = values[num_merged : num_merged + end - start]
        num_merged += end - start
    return column


class ModelWorker:
    """Worker with one rank of a model. All methods except get_memory_metrics are collectives.

    Args:
        model: model section after `resolve_model`.
        fsdp: section with the numbers of ranks that share a copy of the model, and the experts (make_mesh).
    """

    def __init__(self, model: Model, placement: RankPlacement, fsdp: Fsdp = WITHOUT_REPLICAS):
        assert model.dtype != "auto", "call resolve_model first"
        self.config, self.placement = model, placement
        self.mesh, sequence, self.data_group = initialize_rank(placement, fsdp)
        self.device = torch.device(placement.device)
        self.dtype: torch.dtype = getattr(torch, model.dtype)  # dtype of forward and backward
        self.builder = MicroBatchBuilder(model.attention == "padded", self.device, sequence)

    def get_memory_metrics(self) -> dict[str, float]:
        """Return the memory that this process uses, in GiB, as metrics."""
        return measure_process_memory()

    def close(self) -> None:
        shut_down_rank()


class TrainingWorker(ModelWorker):
    """Worker that trains one rank of a model. Saves checkpoints in the foreground or in the background."""

    batch: RankBatch  # set by `load_batch`: the rows of this iteration
    state: TrainState
    hf_model: Any  # transformers model to be written by `export`
    logprob_check_warnings: Sequence[str] = ()  # of the log-prob check after the model is loaded
    balancer: ExpertLoadBalancer | None = None  # for the current update; None: a dense model

    def __init__(self, model: Model, placement: RankPlacement, fsdp: Fsdp, saves_in_background: bool):
        super().__init__(model, placement, fsdp)
        self.writer = CheckpointWriter(saves_in_background)

    def load_batch(self, batch: RankBatch) -> None:
        """Set the batch that the following calls compute with and, in RL, train on."""
        self.batch = batch

    def run_step(
        self, rows: Rows, mini_batch: MiniBatch, compute_loss: Callable[[list[int]], Tensor], skip_bad_step: bool
    ) -> OptimizerStep:
        """Run forward and backward passes over the micro-batches of a mini-batch, and an optimizer step. compute_loss:
        computes this rank's share of the loss of some rows."""
        self.accumulate_gradients(rows, mini_batch, compute_loss)
        return self.state.step(skip_bad_step)

    def accumulate_gradients(
        self, rows: Rows, mini_batch: MiniBatch, compute_loss: Callable[[list[int]], Tensor]
    ) -> None:
        """Run forward and backward passes over the micro-batches of a mini-batch, and add their gradients."""
        if self.balancer:
            self.balancer.begin_step(rows, mini_batch.row_indices)
        for row_indices in self.state.iterate_micro_batches(mini_batch.micro_batches):
            loss = compute_loss(row_indices)
            if self.balancer:
                loss = loss + self.balancer.compute_last_pass_loss()
            (loss * self.placement.world_size).backward()  # FSDP averages over the ranks

    def begin_record(self, folder: str, sample_tokens: int) -> None:
        """Write the gradients of the following optimizer steps to a folder (models/update_record.py)."""
        self.state.record = UpdateRecord(folder, self.state.module, sample_tokens)

    def end_record(self) -> None:
        """Write the weights, and stop recording."""
        assert self.state.record is not None
        self.state.reload()
        self.state.record.write_weights()
        self.state.record = None
        self.offload()

    def offload(self) -> None:
        """Free GPU memory for other workers: reshard the model and offload the configured tensors."""
        self.state.offload()
        torch.cuda.empty_cache()  # for other processes; does nothing on a CPU

    def save(self, checkpoint_folder: str) -> None:
        """Start to write a checkpoint. Raises FloatingPointError if the weights are not finite, and OSError if the
        checkpoint cannot be written; in the background, the future of `get_save_future` raises this OSError."""
        self.writer.start([self.state.snapshot(checkpoint_folder)])

    def get_save_future(self) -> Future[float]:
        """Return the future of the last `save`: the writing time in seconds, or an OSError."""
        return self.writer.save_future

    def load(self, checkpoint_folder: str) -> None:
        """Load a checkpoint, which any number of ranks may have written."""
        self.state.load(checkpoint_folder)
        self.offload()

    @torch.no_grad()
    def compute_state_fingerprints(self) -> dict[str, tuple[int, float]]:
        """Compute (digest, sum of squares) of this rank's shard of the weights and of each optimizer moment.

        The values of all ranks add up to those of the model. With several replicas (HSDP), all but the first return 0.
        """
        fingerprints = {}
        for name, shards in self.state.get_trained_tensors().items():
            counted = shards if self.mesh.is_first_replica() else []
            squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2 for tensor in counted]
            fingerprints[name] = (compute_joint_digest(counted), sum(squares))
        return fingerprints

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """Write a Hugging Face model folder. Raises FloatingPointError if the weights are not finite."""
        self.state.reload()
        self.state.check_weights_finite()
        export_model(folder, self.hf_model, self.config, self.dtype, form)

    def make_expert_load_balancer(self, routers: RouterHooks | None) -> ExpertLoadBalancer | None:
        """Create the object that computes the MoE load-balancing loss of an update. None for a dense model."""
        if routers is None:
            return None
        return ExpertLoadBalancer(routers, self.config.router_aux_loss_coef, self.device, self.data_group)

    def close(self) -> None:
        self.writer.close()
        super().close()
