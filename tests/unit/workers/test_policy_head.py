"""The output head in a policy worker: entropy only where it is used."""

from __future__ import annotations


def test_the_entropy_is_computed_only_if_it_is_used(start):
    for settings, measures, is_computed in (
        ({}, True, True),
        ({}, False, False),
        ({"entropy_coeff": 0.1}, False, True),
    ):
        worker, columns = start(actor=settings)
        metrics = worker.update(columns, measures_entropy=measures)
        assert ("actor/entropy" in metrics) is is_computed and "actor/pg_loss" in metrics
