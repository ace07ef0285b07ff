"""The same cases with the real PolicyWorker and a tiny model in float32: padded or packed, one rank or two."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Actor, Model, Reference, Teacher
from alphaapollo.models.sharding import full_tensor
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
from alphaapollo.workers.process_group import RankPlacement
from tests.invariance.case import Case
from tests.invariance.views import View, prepare
from tests.matrices import join
from tests.unit.workers.training import record_gradients, scale_weights

Steps = list[dict[str, np.ndarray]]
"""The gradients of each optimizer step, by the parameter's name."""

PACKED = View("packed", max_tokens=70)
VIEWS = [  # compared with append context, padded, in one micro-batch
    View("memory, padded", "memory", padded=True),
    View("memory, packed, small micro-batches", "memory", max_tokens=70),
    PACKED,
    View("shared, packed", shared=True, max_tokens=70),
    View("shared, padded", padded=True, shared=True),
    View("memory, shared, padded, without zero advantages", "memory", True, shared=True, skips=True, max_tokens=70),
    View("packed, without rows of zero advantage", skips=True, max_tokens=70),
]
ON_TWO_RANKS = [
    View("memory, packed, two ranks, small micro-batches", "memory", num_ranks=2, max_tokens=70),
    View("memory, packed, two ranks share sequences", "memory", sequence_parallel=2, max_tokens=35),
    View("padded, two ranks share sequences", padded=True, sequence_parallel=2),
    View("shared, two ranks, without rows of zero advantage", num_ranks=2, shared=True, skips=True, max_tokens=70),
    View("shared, padded, two ranks share sequences", padded=True, sequence_parallel=2, shared=True),
]
PADDED = View("padded", padded=True)


def make_worker(
    folder: str, packed: bool, rank: int, num_ranks: int, address: str, sequence_parallel: int = 1
) -> PolicyWorker:
    setup = PolicyWorkerConfig(
        model=Model(path=folder, attention="sdpa" if packed else "padded", dtype="float32"),
        actor=Actor(optim={"lr": 1e-2}),
        ref=Reference(),
        needs_reference=True,
        optimizer_steps=10,
        temperature=0.9,
        teacher=Teacher(divergence="sampled", model={"path": folder}),
        teacher_models={"teacher.model": Model(path=folder, attention="sdpa" if packed else "padded", dtype="float32")},
    )
    worker = PolicyWorker(setup, RankPlacement(rank, num_ranks, address, "cpu", 1, sequence_parallel))
    scale_weights(worker.policy, 1.1)  # different from the reference
    return worker


def load(worker: PolicyWorker, case: Case, view: View):
    """Load the rows and settings into the worker and return its columns."""
    prepared = prepare(view, case.episodes, case.logprobs, case.config, get_estimator(case.estimator))
    rank = worker.placement.rank // view.sequence_parallel
    worker.actor, worker.policy_loss = case.config.actor_rollout_ref.actor, get_policy_loss(case.loss)
    worker.correction, worker.find_plugin("teacher").teacher = (
        case.config.algorithm.rollout_correction,
        case.config.teacher,
    )
    worker.load_batch(prepared.batch.layout.rank_batches[rank])
    return prepared, prepared.columns[rank]


def with_model_logprobs(worker: PolicyWorker, case: Case) -> Case:
    """The case with old log-probs close to those of the worker's model."""
    prepared, _ = load(worker, case, PADDED)
    own = join(prepared.batch.layout, [worker.compute_log_probs()])
    by_token = np.zeros(case.episodes.num_tokens, dtype=np.float32)
    inside = prepared.tokens >= 0
    by_token[prepared.tokens[inside]] = own[inside]
    return case.on_policy(by_token)


def gradients(worker: PolicyWorker, case: Case, view: View) -> Steps:
    gradients_of_steps = record_gradients(worker)
    prepared, columns = load(worker, case, view)
    worker.update(columns, prepared.steps[worker.placement.rank // view.sequence_parallel])
    return gradients_of_steps


def of_rank(rank: int, num_ranks: int, address: str, folder: str, cases: list[Case]) -> list[list[Steps]]:
    """Run on each of two ranks (gloo processes) for every view of ON_TWO_RANKS and every case."""
    workers = [
        make_worker(folder, not view.padded, rank, num_ranks, address, view.sequence_parallel) for view in ON_TWO_RANKS
    ]
    found = [
        [gradients(worker, case, view) for case in cases] for worker, view in zip(workers, ON_TWO_RANKS, strict=True)
    ]
    workers[0].close()
    return found


def resumed_weights(folder: str, address: str, cases: list[Case]) -> dict[str, list[np.ndarray]]:
    """Weights after one iteration per case: without checkpoints, with one before each, and resumed from the last."""

    def learn(worker: PolicyWorker, case: Case) -> None:
        _, columns = load(worker, case, PACKED)
        worker.update(columns)

    def weights(worker: PolicyWorker) -> list[np.ndarray]:
        return [full_tensor(parameter.detach()).numpy().copy() for parameter in worker.policy.parameters()]

    straight, saving, resumed = (make_worker(folder, True, 0, 1, address) for _ in range(3))
    with tempfile.TemporaryDirectory() as checkpoints:
        for number, case in enumerate(cases):
            learn(straight, case)
            saving.save(str(Path(checkpoints, str(number))))
            learn(saving, case)
        resumed.load(str(Path(checkpoints, str(len(cases) - 1))))
        learn(resumed, cases[-1])
    return {"straight": weights(straight), "saving": weights(saving), "resumed": weights(resumed)}
