"""Train, save, load, publish and export with different layouts of a policy over ranks, and compare the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.models.export import gather_parameters
from alphaapollo.models.sharding import local_tensor
from alphaapollo.weight_sync.digest import compute_joint_digest
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import run_ranks
from tests.unit.workers.training import (
    Case,
    assert_close,
    make_batch,
    make_columns,
    make_worker,
    parameters,
    record_gradients,
    scale_weights,
)

Weights = dict[str, np.ndarray]
ACTOR = {"optim": {"lr": 1e-3}, "grad_clip": 0.05, "use_kl_loss": True, "kl_loss_type": "full"}


@dataclass(frozen=True)
class Layout:
    """Settings that change the layout of the model and of sequences over ranks."""

    fsdp: dict[str, Any]
    sequence_parallel: int = 1
    checkpointing: bool = False

    def apply_to(self, case: Case) -> Case:
        return replace(
            case,
            actor=case.actor | {"fsdp_config": self.fsdp},
            sequence_parallel=self.sequence_parallel,
            checkpointing=self.checkpointing,
        )


@dataclass(frozen=True)
class RankResult:
    """Result of one rank."""

    gradients: Weights
    logprobs: np.ndarray  # of this rank's rows before the first update
    norms: list[float]  # of two updates, with a checkpoint of another layout between
    weights: Weights  # after them
    published: Weights
    digest: int  # of the weights that are published before the first update
    held: int  # parameters on this rank


def train(worker: PolicyWorker, case: Case, rank: int, num_ranks: int) -> float:
    own, shares = case.share(rank, num_ranks)
    batch = make_batch(case, shares)
    assert all(len(step.micro_batches) > 1 for step in batch.rank_batches[own].mini_batches)
    worker.load_batch(batch.rank_batches[own])
    return worker.update(make_columns(case, batch, own))["actor/grad_norm"]


def run_layout(rank: int, num_ranks: int, address: str, case: Case, folder: str, name: str, before: str) -> RankResult:
    worker = make_worker(case, rank, num_ranks, address)
    scale_weights(worker.policy, 1.1)
    recorded = record_gradients(worker)
    train(worker, case, rank, num_ranks)
    del worker.state.step  # the one that only records
    logprobs = worker.compute_log_probs()
    digest = compute_joint_digest(tensor for _, tensor in gather_parameters(worker.policy.model, worker.dtype))
    norms = [train(worker, case, rank, num_ranks)]
    worker.save(f"{folder}/{name}")
    if before:
        worker.load(f"{folder}/{before}")
    norms.append(train(worker, case, rank, num_ranks))
    worker.export(f"{folder}/model of {name}")
    published = dict(gather_parameters(worker.policy.model, worker.dtype))
    weights = parameters(worker)
    worker.close()
    arrays = {key: tensor.numpy().copy() for key, tensor in published.items()}
    held = sum(local_tensor(parameter).numel() for parameter in worker.policy.parameters())
    return RankResult(recorded[0], logprobs, norms, weights, arrays, digest, held)


def check_layouts_train_the_same(
    case: Case, num_ranks: int, layouts: dict[str, Layout], folder: Path
) -> dict[str, list[RankResult]]:
    """Compare each layout with the first one, and return the results of all ranks: log-probs, gradients, norms of
    clipped steps with a checkpoint of the previous layout between them, and published and exported weights."""
    from safetensors.numpy import load_file

    found: dict[str, list[RankResult]] = {}
    first, before = next(iter(layouts)), ""
    for name, layout in layouts.items():
        found[name] = run_ranks(run_layout, num_ranks, layout.apply_to(case), str(folder), name, before)
        before = name
    plain = found[first][0]
    assert min(plain.norms) > case.actor["grad_clip"], "clipped"
    for name, ranks in found.items():
        for seen, rank in zip(ranks, found[first], strict=True):
            if layouts[name].sequence_parallel == layouts[first].sequence_parallel:
                np.testing.assert_allclose(seen.logprobs, rank.logprobs, atol=1e-6, rtol=1e-6, err_msg=name)
            for key, gradient in plain.gradients.items():
                gap = np.linalg.norm(seen.gradients[key] - gradient)
                assert gap <= 1e-6 * np.linalg.norm(gradient), (name, key)
            assert seen.digest == plain.digest
            # steps after the first: Adam amplifies rounding differences, which depend on the processor
            assert seen.norms == pytest.approx(plain.norms, rel=1e-4), name
            assert_close(seen.weights, plain.weights, atol=1e-5, rtol=1e-7)
            assert_close(seen.published, plain.published, atol=1e-5, rtol=1e-7)
        exported = load_file(folder / f"model of {name}" / "model.safetensors")
        assert_close({key: exported[key] for key in ranks[0].published}, ranks[0].published, atol=0, rtol=0)
    return found
