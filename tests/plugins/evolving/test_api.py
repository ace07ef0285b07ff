"""`alphaapollo.evolve` with Python objects, and its missing plug-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import alphaapollo
from alphaapollo.config.errors import ConfigError
from alphaapollo.plugins.evolving.roles import Aggregator, Verifier
from tests.unit.cli.test_api import score
from tests.unit.cli.test_api import started as started


def test_roles_of_an_evolution(started: list[Any], tmp_path: Path) -> None:
    settings = {"models": {"policy": {"path": "m"}}, "trainer.output_dir": tmp_path}
    run = alphaapollo.evolve(settings, reward=score, roles={"verifier": Verifier, "aggregator": Aggregator})
    assert (run.config.roles.verifier.plugin, run.config.roles.aggregator.plugin) == ("Verifier", "Aggregator")
    assert run.config.models["policy"].path == "m" and run.folder.name == "evolving"
    assert started[0][0] == "alphaapollo.evolving.main"
    with pytest.raises(ConfigError, match=r"roles\.verifier\.plugin=mine is set"):
        alphaapollo.evolve(settings, "roles.verifier.plugin=mine", roles={"verifier": Verifier})
    with pytest.raises(ConfigError, match=r"Did you mean 'roles\.verifier"):
        alphaapollo.evolve(settings, roles={"verifer": Verifier})
