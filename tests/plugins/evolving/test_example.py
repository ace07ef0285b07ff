"""Task and roles of the example evolving."""

from __future__ import annotations

from pathlib import Path

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import SftConfig
from alphaapollo.plugins.evolving.roles import ModelReply, RoleView, VerifierReport
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from examples.evolving import task as evolving
from examples.evolving.roles import Checker, Coin

FORGOT = "7+6=13\n5+8=13\n4+3+1=8\n<answer>833</answer>"


def test_verifiers_read_checks() -> None:
    assert Checker().read(ModelReply("10 11 no")) == VerifierReport(False, "10 11")
    assert Checker().read(ModelReply("10 11")) is None and Checker().read(ModelReply("")) is None
    (prompt,) = Checker().build(RoleView("457+386=?", solution=FORGOT))
    assert prompt["content"] == f"457+386=?\n{FORGOT}\nright?"
    votes = [Coin().read(ModelReply("yes", seed)).vote for seed in range(400)]  # type: ignore[union-attr]
    assert 160 < sum(votes) < 240


def test_configurations_of_evolving_load() -> None:
    folder = ["--config-dir", str(Path(evolving.__file__).parent)]
    config = load_config(EvolvingConfig, "evolve", folder)
    assert config.roles.verifier.plugin == "checker" and "policy" in config.models
    load_config(SftConfig, "sft", folder)
