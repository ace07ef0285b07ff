"""Over NCCL, Ulysses ranks and model replicas have the gradients of one rank on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.tiny import run_ranks, save_model
from tests.unit.workers.layouts import compute
from tests.unit.workers.training import Case

FULL = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "full"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one_rank(tmp_path: Path):
    alone = Case(str(save_model("qwen3", tmp_path)), FULL, "sdpa", needs_reference=True, max_tokens=60)
    gpus = replace(alone, device="cuda", dtype="float32")
    cases = [
        gpus,
        replace(gpus, sequence_parallel=2),
        replace(gpus, actor=FULL | {"fsdp_config": {"fsdp_size": 1}}),
        replace(gpus, actor=FULL | {"fsdp_config": {"sync_each_micro_batch": False}}),
    ]
    (expected,) = compute(0, 1, "", [alone])
    for rank in run_ranks(compute, 2, cases, timeout=200):
        for ours in rank:
            for name, gradient in expected.gradients.items():
                assert np.linalg.norm(ours.gradients[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name
            assert ours.metrics["actor/loss"] == pytest.approx(expected.metrics["actor/loss"], rel=1e-4)
