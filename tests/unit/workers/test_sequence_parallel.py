"""Ulysses sequence parallelism gives the losses, gradients, columns and metrics of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.tiny import run_ranks, save_tokenizer
from tests.unit.workers import training
from tests.unit.workers.training import Case

RICH = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3+"}
FULL = RICH | {"kl_loss_type": "full", "loss_agg_mode": "seq-mean-token-mean"}
BY_ROW = RICH | {"policy_loss": {"loss_mode": "gspo"}}


def save_with_three_key_heads(model_folder, folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_folder("qwen3"), num_attention_heads=6, num_key_value_heads=3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_two_ranks_with_sequence_parallelism(model_folder, tmp_path: Path):
    """Losses of rows, layers gathered or not, capped scores and windows, experts, and heads that two does not divide.
    test_policy_gradients.py has the plain cases."""
    padded = Case(str(model_folder("qwen3")), FULL, needs_reference=True, max_tokens=60, sequence_parallel=2)
    packed = replace(padded, attention="sdpa")
    training.compare_ranks_with_one(
        [
            replace(packed, actor=BY_ROW, needs_reference=False, checkpointing=True),
            replace(padded, actor=RICH, needs_reference=False, min_unit=10**9, max_tokens=1),
            replace(packed, folder=str(model_folder("gemma2"))),
            replace(packed, folder=save_with_three_key_heads(model_folder, tmp_path)),
            replace(padded, folder=str(model_folder("qwen3_moe")), num_rows=1),
        ]
    )


def test_four_ranks_with_sequence_and_data_parallelism(model_folder):
    """Two groups of two ranks, one of which may have no rows and computes a dummy; copies of the model across the
    groups; and one group of four, more than the number of key heads."""
    both = Case(str(model_folder("qwen3")), FULL, "sdpa", needs_reference=True, max_tokens=40, sequence_parallel=2)
    training.compare_ranks_with_one(
        [
            both,
            replace(both, attention="padded", actor=RICH, needs_reference=False),
            replace(both, num_rows=1),
            replace(both, actor=FULL | {"fsdp_config": {"fsdp_size": 2, "sync_each_micro_batch": False}}),
            replace(both, sequence_parallel=4),
            replace(both, attention="padded", sequence_parallel=4),
        ],
        4,
    )


def columns_and_steps(rank: int, num_ranks: int, address: str, case: Case) -> tuple[list[np.ndarray], list[float]]:
    """Log-probs by policy and reference, old ones recorded by the update, and a probe, after optimizer steps."""
    worker = training.make_worker(case, rank, num_ranks, address)
    training.scale_weights(worker.policy, 1.1)
    own, shares = case.share(rank, num_ranks)
    batch = training.make_batch(case, shares)
    worker.load_batch(batch.rank_batches[own])
    found = [worker.compute_log_probs(), worker.compute_log_probs("reference")]
    worker.update(training.make_columns(case, batch, own, old=False))
    found += [worker.get_old_log_probs(), worker.compute_log_probs()]
    probe = worker.compute_probe_log_probs([5, 9, 3, 3, 40])
    worker.close()
    return found, probe


def test_columns_are_complete_on_every_rank(model_folder):
    actor = FULL | {"optim": {"lr": 1e-3}}
    case = Case(str(model_folder("llama")), actor, "sdpa", needs_reference=True, max_tokens=60, mini_batch_size=5)
    expected, probe = columns_and_steps(0, 1, "", case)
    np.testing.assert_allclose(expected[0], expected[2], atol=1e-6)
    assert np.abs(expected[0] - expected[3]).max() > 1e-3
    for columns, own_probe in run_ranks(columns_and_steps, 2, replace(case, sequence_parallel=2), timeout=300):
        for ours, column in zip(columns, expected, strict=True):
            np.testing.assert_allclose(ours, column, atol=1e-5)
        assert own_probe == pytest.approx(probe, abs=1e-5)
