"""Policy workers on small batches, and their gradients as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from alphaapollo.algorithms.aggregation import row_weights, sequence_weights
from alphaapollo.config.schema import Actor, Model, Reference
from alphaapollo.data.batch import Columns, TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.models import sharding
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.models.train_state import StepFigures
from alphaapollo.workers.base import RankPlacement
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import some_rows

NUM_ROWS = 10


@dataclass(frozen=True)
class Case:
    """One way to cut and compute the same iteration."""

    folder: str
    actor: dict[str, Any] = field(default_factory=dict)
    attention: str = "padded"
    dtype: str = "auto"
    max_tokens: int = 10_000
    num_rows: int = NUM_ROWS
    mini_batch_size: int = NUM_ROWS
    needs_ref: bool = False
    checkpointing: bool = False
    min_unit: int = 0  # parameters of a layer that FSDP gathers on its own


def make_worker(case: Case, rank: int, num_ranks: int, address: str, **arguments: Any) -> PolicyWorker:
    sharding.MIN_UNIT = case.min_unit
    return PolicyWorker(
        model=Model(
            path=case.folder,
            attention=case.attention,
            dtype=case.dtype,
            enable_gradient_checkpointing=case.checkpointing,
        ),
        actor=Actor(**case.actor),
        ref=Reference(),
        needs_ref=case.needs_ref,
        placement=RankPlacement(rank, num_ranks, address, "cpu", 1),
        total_steps=10,
        temperature=0.9,
        seed=0,
        **arguments,
    )


def make_batch(case: Case, num_ranks: int) -> TrainBatch:
    rows = some_rows(case.num_rows)
    padded = case.attention == "padded"
    return build_train_batch(
        rows, list(range(case.num_rows)), num_ranks, case.mini_batch_size, case.max_tokens, padded, 0, False
    )


def make_columns(case: Case, batch: TrainBatch, rank: int, old: bool = True, ref: bool = False) -> Columns:
    """Columns as the driver makes them: read-only, with weights over the whole mini-batch."""
    generator = np.random.default_rng(1)
    shape = batch.num_rows, batch.max_response_length
    mask = batch.to_matrix([one.rows.action_mask for one in batch.rank_batches])
    lengths = torch.from_numpy(mask.sum(1).astype(np.int64))
    weights, per_sequence = np.zeros(batch.num_rows, np.float32), np.zeros(batch.num_rows, np.float32)
    mode = Actor(**case.actor).loss_agg_mode
    for rows in batch.mini_batch_rows:
        weights[rows] = row_weights(lengths[rows], torch.tensor(rows) // 2, mode, 16.0).numpy()
        per_sequence[rows] = sequence_weights(lengths[rows]).numpy()

    def column(scale: float, shift: float = 0.0) -> np.ndarray:
        flat = batch.split_columns((scale * generator.standard_normal(shape) + shift).astype(np.float32))[rank]
        flat.flags.writeable = False
        return flat

    return Columns(
        advantages=column(1.0),
        returns=column(1.0),
        values=column(0.5),
        old_logprobs=column(0.5, -4.0) if old else None,
        ref_logprobs=column(0.5, -4.0) if ref else None,
        loss_weights=batch.split_rows(weights)[rank],
        sequence_weights=batch.split_rows(per_sequence)[rank],
    )


def scale_weights(model: torch.nn.Module, factor: float) -> None:
    """Away from the reference, the same on all ranks."""
    for parameter in model.parameters():
        local_tensor(parameter.data).mul_(factor)


def record_gradients(worker: Any) -> list[dict[str, np.ndarray]]:
    """From now on an optimiser step only notes the gradients, gathered from all ranks."""
    noted: list[dict[str, np.ndarray]] = []

    def step() -> StepFigures:
        module = worker.state.module
        noted.append({name: full_tensor(p.grad).numpy() for name, p in module.named_parameters()})
        worker.state.optimizer.zero_grad()
        return StepFigures(0.0, 0.0)

    worker.state.step = step
    return noted


def gradients(rank: int, num_ranks: int, address: str, case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Of one optimiser step, with the update's figures."""
    worker = make_worker(case, rank, num_ranks, address)
    scale_weights(worker.policy, 1.1)
    noted = record_gradients(worker)
    batch = make_batch(case, num_ranks)
    worker.load_batch(batch.rank_batches[rank])
    needs_ref_column = worker.actor.use_kl_loss and worker.actor.kl_loss_type != "full"
    figures = worker.update(make_columns(case, batch, rank, ref=needs_ref_column))
    worker.close()
    return noted[0], figures


def gradients_of_cases(
    rank: int, num_ranks: int, address: str, cases: list[Case], more: list[str]
) -> list[tuple[dict[str, np.ndarray], dict[str, float]]]:
    """One after the other, each with a process group of its own."""
    return [gradients(rank, num_ranks, own, case) for case, own in zip(cases, [address, *more], strict=False)]
