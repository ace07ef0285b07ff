"""`alphaapollo.evolve` with Python objects, and its missing plug-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import alphaapollo
from alphaapollo.config.errors import ConfigError
from alphaapollo.plugins.evolving.roles import ROLES, Aggregator, ModelReply, Verifier, VerifierReport
from alphaapollo.user_objects import load_objects
from tests.unit.cli.test_api import score
from tests.unit.cli.test_api import started as started


class Suspicious(Verifier):
    def read(self, reply: ModelReply) -> VerifierReport | None:
        return VerifierReport("7" in reply.text, reply.text)


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


def test_roles_are_registered_by_the_names_of_their_classes(
    started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROLES, "_entries", dict(ROLES._entries))
    where = {"trainer.output_dir": tmp_path}
    config = alphaapollo.evolve(where, roles={"verifier": Suspicious, "aggregator": Suspicious}).config
    assert config.roles.verifier.plugin == config.roles.aggregator.plugin == "Suspicious"
    load_objects(config.evolving.custom_module)
    assert ROLES.get("Suspicious")().read(ModelReply("a 7", seed=0)) == VerifierReport(True, "a 7")
