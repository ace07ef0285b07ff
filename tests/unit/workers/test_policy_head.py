"""The output head in a policy worker: entropy only where it is used, and fused operations on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from alphaapollo.models import lm_head
from alphaapollo.models.policy import fuse_head_if_equal


def test_the_entropy_is_computed_only_if_it_is_used(start):
    for settings, measures, is_computed in (
        ({}, True, True),
        ({}, False, False),
        ({"entropy_coeff": 0.1}, False, True),
    ):
        worker, columns = start(actor=settings)
        metrics = worker.update(columns, measures_entropy=measures)
        assert ("actor/entropy" in metrics) is is_computed and "actor/pg_loss" in metrics


def test_the_head_is_fused_on_a_gpu_if_it_computes_the_same(start, monkeypatch: pytest.MonkeyPatch):
    worker, _ = start()
    assert fuse_head_if_equal(worker.policy, worker.builder) == [] and not worker.policy.fuses_head  # on a CPU
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), build=worker.builder.build)
    monkeypatch.setattr(lm_head, "_compile", lambda function: lambda *args: function(*args))
    assert fuse_head_if_equal(worker.policy, on_gpu) == [] and worker.policy.fuses_head
    monkeypatch.setattr(lm_head, "_compile", lambda function: lambda raw, *args: function(1.1 * raw, *args))
    (warning,) = fuse_head_if_equal(worker.policy, on_gpu)
    assert "output head differs by " in warning and not worker.policy.fuses_head
