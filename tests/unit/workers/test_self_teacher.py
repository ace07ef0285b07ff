"""Weights of a self-teacher. tests/loop/test_every_algorithm.py verifies its divergences and their gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alphaapollo.models.sharding import local_tensor
from tests.unit.workers.training import Case

JSD = {"divergence": "jsd", "beta": 0.3, "coef": 0.7}
SELF = {"context": "feedback"}


def case_of(folder: Path, top_k: int | None = None, **settings: object) -> Case:
    return Case(str(folder), teacher=JSD | {"top_k": top_k, "self_teacher": SELF | settings}, contexts=True)


def weights_of(model: torch.nn.Module) -> list[np.ndarray]:
    return [local_tensor(parameter).detach().numpy().copy() for parameter in model.parameters()]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_follows_the_policy(start, model_folder, lora_rank: int):
    case = replace(case_of(model_folder("qwen3"), ema_rate=0.25), lora_rank=lora_rank, actor={"optim": {"lr": 1e-2}})
    worker, columns = start(case)
    before = weights_of(worker.policy)
    worker.update(columns)
    teacher, policy = weights_of(worker.find_plugin("teacher").model), weights_of(worker.policy)
    for own, first, now in zip(teacher, before, policy, strict=True):
        np.testing.assert_allclose(own, 0.75 * first + 0.25 * now, rtol=1e-6, atol=1e-8)


def test_starts_from_the_policy_if_the_checkpoint_has_no_teacher(start, model_folder, tmp_path: Path):
    worker, columns = start(actor={"optim": {"lr": 1e-2}})
    worker.update(columns)
    worker.save(str(tmp_path))
    worker.get_save_future().result()
    worker, _ = start(case_of(model_folder("qwen3")))
    worker.load(str(tmp_path))
    for own, policy in zip(weights_of(worker.find_plugin("teacher").model), weights_of(worker.policy), strict=True):
        np.testing.assert_array_equal(own, policy)
