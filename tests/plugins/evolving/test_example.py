"""Task and roles of the example evolving."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import SftConfig
from alphaapollo.plugins.evolving.roles import ModelReply, RoleView, VerifierReport
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from examples.evolving import task as evolving
from examples.evolving.roles import Checker, Coin

FORGOT = "7+6=13\n5+8=13\n4+3+1=8\n<answer>833</answer>"


def test_checks_report_each_carry_and_whether_it_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    added = FORGOT.replace("5+8=13", "5+8+1=14")
    for wrong_verdicts, solution, check in (
        (0.0, FORGOT, "10 11 no"),
        (0.0, added, "11 11 yes"),
        (1.0, FORGOT, "10 11 yes"),
    ):
        monkeypatch.setattr(evolving, "WRONG_VERDICTS", wrong_verdicts)
        assert evolving.write_check(solution, random.Random(0)) == check


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
