"""The output head in a policy worker: entropy only where it is used, and fused operations on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.models import lm_head
from alphaapollo.models.policy import fuse_head_if_equal
from tests.unit.tiny import free_address
from tests.unit.workers.training import Case, make_batch, make_columns, make_worker


def test_the_entropy_is_computed_only_if_it_is_used(model_folder):
    for settings, measures, is_computed in (
        ({}, True, True),
        ({}, False, False),
        ({"entropy_coeff": 0.1}, False, True),
    ):
        case = Case(str(model_folder("qwen3")), actor=settings)
        worker = make_worker(case, 0, 1, free_address())
        batch = make_batch(case, 1)
        worker.load_batch(batch.rank_batches[0])
        metrics = worker.update(make_columns(case, batch, 0), measures_entropy=measures)
        worker.close()
        assert ("actor/entropy" in metrics) is is_computed and "actor/pg_loss" in metrics


def test_the_head_is_fused_on_a_gpu_if_it_computes_the_same(model_folder: Any, monkeypatch: pytest.MonkeyPatch):
    worker = make_worker(Case(str(model_folder("qwen3"))), 0, 1, free_address())
    assert fuse_head_if_equal(worker.policy, worker.builder) == [] and not worker.policy.fuses_head  # on a CPU
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), build=worker.builder.build)
    monkeypatch.setattr(lm_head, "_compile", lambda function: lambda *args: function(*args))
    assert fuse_head_if_equal(worker.policy, on_gpu) == [] and worker.policy.fuses_head
    monkeypatch.setattr(lm_head, "_compile", lambda function: lambda raw, *args: function(1.1 * raw, *args))
    (warning,) = fuse_head_if_equal(worker.policy, on_gpu)
    assert "the fused output head differs by " in warning and not worker.policy.fuses_head
    worker.close()
