"""Results of workers of every role in different layouts of rows, sequences and models over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import RankBatch
from alphaapollo.config.schema import Actor
from tests.matrices import join, split
from tests.unit.tiny import run_ranks
from tests.unit.workers.preferences import assign_reference, distribute, make_examples
from tests.unit.workers.training import (
    FINETUNING,
    Case,
    Recorder,
    assert_close,
    make_batch,
    make_columns,
    make_worker,
    record_gradients,
    scale_weights,
    train_by_hand,
)

Arrays = dict[str, np.ndarray]


@dataclass
class Result:
    """What a rank computes for a case."""

    gradients: Arrays = field(default_factory=dict)  # of one optimizer step, gathered from all ranks
    metrics: dict[str, float] = field(default_factory=dict)
    columns: Arrays = field(default_factory=dict)  # of this rank's rows
    shared: Arrays = field(default_factory=dict)  # the same on all ranks: weights as the engines get them, and a probe


def compute(rank: int, num_ranks: int, address: str, cases: Sequence[Case]) -> list[Result]:
    """Compute cases. Those that differ only in the loss and in rows and micro-batches share one worker."""
    groups: list[tuple[Case, list[int]]] = []
    for index, case in enumerate(cases):
        needed = select_worker_fields(case)
        members = next((members for fields, members in groups if fields == needed), None)
        if members is None:
            groups.append((needed, [index]))
        else:
            members.append(index)
    results: dict[int, Result] = {}
    for number, (_, members) in enumerate(groups):
        worker = start_worker(cases[members[0]], rank, num_ranks, address and f"{address}_{number}")
        for index in members:
            results[index] = compute_case(worker, cases[index], rank, num_ranks)
        worker.close()
    return [results[index] for index in range(len(cases))]


def select_worker_fields(case: Case) -> Case:
    """The case with defaults in all fields that a running worker can change."""
    if case.contexts:
        return case  # each step moves the teacher
    fixed = {"fsdp_config": case.actor.get("fsdp_config")}
    rows: dict[str, Any] = {"max_tokens": 0, "mini_batch_size": 0, "order": None, "rough": False}
    if case.role != "preference":  # whose reference is computed before the first step
        rows["num_rows"] = 0
    return replace(case, actor=fixed, no_advantages=False, shares_prompts=False, **rows)


def start_worker(case: Case, rank: int, num_ranks: int, address: str) -> Any:
    """Start a worker that differs from its reference."""
    sends = {"sender": Recorder()} if case.role == "policy" else {}
    worker = make_worker(case, rank, num_ranks, address, **sends)
    if case.role == "preference":
        worker.examples = make_examples(case)
        if worker.preference_loss.needs_reference:
            assign_reference(worker, case, worker.examples)
    if case.lora_rank:
        train_by_hand(worker.state.module)
    elif case.role != "reward_model":
        scale_weights(worker.state.module, 3.0 if case.role == "reward" else 1.1)  # scores away from zero
    return worker


def compute_case(worker: Any, case: Case, rank: int, num_ranks: int) -> Result:
    own, shares = case.share(rank, num_ranks)
    if case.role in ("preference", "reward"):
        examples = worker.examples if case.role == "preference" else make_examples(case)
        return finetune(worker, distribute(case, examples, shares)[own])
    layout = make_batch(case, shares)
    batch = layout.rank_batches[own]
    if case.role in FINETUNING:
        return finetune(worker, batch)
    if case.role == "reward_model":
        return Result(columns={"scores": worker.compute_scores(batch)})
    worker.load_batch(batch)
    columns = compute_columns(worker, case)
    if case.role == "policy":
        worker.actor = Actor(**case.actor)
        worker.policy_loss = get_policy_loss(worker.actor.policy_loss.loss_mode)
        if case.lora_rank:
            worker.send_weights(1)
    recorded = record_gradients(worker)
    metrics = worker.update(make_columns(case, layout, own, old=not case.records_old))
    shared = {name: tensor.float().numpy() for name, tensor in worker.sender.sent.items()} if case.lora_rank else {}
    if case.role == "policy":
        columns["old"] = worker.get_old_log_probs()
        shared["probe"] = np.array(worker.compute_probe_log_probs([5, 9, 3, 3, 40]))
    return Result(recorded[0], metrics, columns, shared)


def finetune(worker: Any, batch: RankBatch) -> Result:
    recorded = record_gradients(worker)
    sums = worker.step(batch).metric_sums
    assert worker.evaluate(batch) == pytest.approx(sums, rel=1e-6)
    return Result(recorded[0], sums)


def compute_columns(worker: Any, case: Case) -> Arrays:
    if case.role == "critic":
        return {"values": worker.compute_values()}
    roles = ["policy"] + ["reference"] * case.needs_reference
    roles += ["teacher"] * bool(case.teacher_folder or case.teacher_shares)
    return {role: worker.compute_log_probs(role) for role in roles}


def describe_alone(case: Case) -> Case:
    """The case on one rank: all rows padded in one micro-batch, without recomputation."""
    actor = {key: value for key, value in case.actor.items() if key != "fsdp_config"}
    plain = {"attention": "padded", "max_tokens": 10_000, "order": None, "min_unit": 0, "shares_prompts": False}
    return replace(case, actor=actor, sequence_parallel=1, checkpointing=False, offloads=False, **plain)


def compute_alone(case: Case) -> Result:
    """On one rank in this process."""
    return compute(0, 1, "", [describe_alone(case)])[0]


def check_results(found: Sequence[Result], expected: Result, case: Case) -> None:
    """Compare the results of all ranks with those of one."""
    layout, alone = (
        make_batch(case, len(found) // case.sequence_parallel),
        make_batch(replace(case, order=None, shares_prompts=False)),
    )
    columns = {name: join(alone, [column])[case.row_order] for name, column in expected.columns.items()}
    for rank, result in enumerate(found):
        for name, column in columns.items():
            own = split(layout, column)[case.share(rank, len(found))[0]]
            np.testing.assert_allclose(result.columns[name], own, atol=1e-5, err_msg=name)
        assert_gradients_close(result.gradients, expected.gradients)
        metrics = {name: value for name, value in result.metrics.items() if name != "actor/sharing_gap"}
        assert metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
        assert_close(result.shared, expected.shared, atol=1e-5, rtol=1e-7)


def assert_gradients_close(found: Arrays, expected: Arrays) -> None:
    """Compare gradients, relative to the largest of each parameter."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, atol=2e-4 * scale + 1e-7, rtol=0, err_msg=name)


def check_layouts(case: Case, layouts: dict[int, list[dict[str, Any]]]) -> Result:
    """Compare layouts, by the number of ranks, with one rank. Returns the result of one rank for all rows."""
    cases = {num_ranks: [replace(case, **fields) for fields in of_ranks] for num_ranks, of_ranks in layouts.items()}
    alone = {one.num_rows: describe_alone(one) for of_ranks in cases.values() for one in of_ranks}
    expected = dict(zip(alone, compute(0, 1, "", list(alone.values())), strict=True))
    for num_ranks, of_ranks in cases.items():
        for one, *found in zip(of_ranks, *run_on_ranks(compute, num_ranks, of_ranks), strict=True):
            check_results(found, expected[one.num_rows], one)
    return expected[case.num_rows]


def run_on_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """Results by rank. One rank runs in this process."""
    if num_ranks == 1:
        return [function(0, 1, "", *arguments)]
    return run_ranks(function, num_ranks, *arguments, timeout=300)
