"""HSDP, and gradients reduced once per optimizer step, train the same as one copy of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from alphaapollo.models.export.hf_folder import gather_parameters
from alphaapollo.models.sharding import full_tensor, local_tensor
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers.training import Case, gradients, make_batch, make_columns, make_worker, scale_weights

Weights = dict[str, np.ndarray]
ACTOR = {"optim": {"lr": 1e-3}, "grad_clip": 0.05, "use_kl_loss": True, "kl_loss_type": "full"}
WAYS = {
    "plain": {},
    "copies of two": {"fsdp_size": 2},
    "copies of one": {"fsdp_size": 1},
    "reduced once": {"sync_each_micro_batch": False},
    "copies, reduced once": {"fsdp_size": 2, "sync_each_micro_batch": False},
}


@dataclass(frozen=True)
class RankResult:
    """Result of one rank."""

    gradients: Weights
    norms: list[float]  # of two updates, with a checkpoint of another way between
    weights: Weights  # after them
    published: Weights
    held: int  # parameters on this rank


def train(worker: PolicyWorker, case: Case, rank: int, num_ranks: int) -> float:
    batch = make_batch(case, num_ranks)
    assert all(len(step.micro_batches) > 1 for step in batch.rank_batches[rank].mini_batches)
    worker.load_batch(batch.rank_batches[rank])
    return worker.update(make_columns(case, batch, rank))["actor/grad_norm"]


def every_layout(
    rank: int, num_ranks: int, address: str, case: Case, addresses: list[str], folder: str
) -> dict[str, RankResult]:
    found, before, own = {}, "", iter(addresses)
    for name, fsdp in WAYS.items():
        one = replace(case, actor=ACTOR | {"fsdp_config": fsdp})
        recorded = gradients(rank, num_ranks, next(own), one)[0]
        worker = make_worker(one, rank, num_ranks, next(own))
        scale_weights(worker.policy, 1.1)
        norms = [train(worker, one, rank, num_ranks)]
        worker.save(f"{folder}/{name}")
        if before:
            worker.load(f"{folder}/{before}")
        norms.append(train(worker, one, rank, num_ranks))
        worker.export(f"{folder}/model of {name}")
        found[name] = RankResult(
            gradients=recorded,
            norms=norms,
            weights={key: full_tensor(p.detach()).numpy().copy() for key, p in worker.policy.named_parameters()},
            published={key: t.numpy().copy() for key, t in gather_parameters(worker.policy.model, worker.dtype)},
            held=sum(local_tensor(p).numel() for p in worker.policy.parameters()),
        )
        worker.close()
        before = name
    return found


@pytest.mark.timeout(400)
def test_hsdp_and_deferred_reduction_train_the_same_on_four_ranks(model_folder, tmp_path: Path):
    """Gradients, clipped steps, checkpoints read by another grouping, published and exported weights."""
    from safetensors.numpy import load_file

    case = Case(str(model_folder("qwen3")), num_rows=20, mini_batch_size=10, max_tokens=20, needs_reference=True)
    addresses = [free_address() for _ in range(2 * len(WAYS))]
    ranks = run_ranks(every_layout, 4, case, addresses, str(tmp_path), timeout=300)
    plain = ranks[0]["plain"]
    assert min(plain.norms) > ACTOR["grad_clip"], "clipped"
    total = sum(value.size for value in plain.weights.values())
    held = {name: [rank[name].held for rank in ranks] for name in WAYS}
    assert held["copies of one"] == [total] * 4
    assert max(held["plain"]) < min(held["copies of two"]) < total
    for rank in ranks:
        for name, seen in rank.items():
            for key, gradient in plain.gradients.items():
                gap = np.linalg.norm(seen.gradients[key] - gradient)
                assert gap <= 1e-6 * np.linalg.norm(gradient), (name, key)
            assert seen.norms == pytest.approx(plain.norms, rel=1e-5)
            for ours, expected in ((seen.weights, plain.weights), (seen.published, plain.published)):
                assert ours.keys() == expected.keys()
                for key, value in expected.items():
                    np.testing.assert_allclose(ours[key], value, atol=1e-5, err_msg=f"{name}: {key}")
    for name in WAYS:
        exported = load_file(tmp_path / f"model of {name}" / "model.safetensors")
        for key, value in ranks[0][name].published.items():
            np.testing.assert_array_equal(exported[key], value)
