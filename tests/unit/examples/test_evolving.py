import random
from pathlib import Path

import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import EvolvingConfig, SftConfig
from alphaapollo.evolving.roles import ModelReply, RoleView, VerifierReport
from examples.evolving import task
from examples.evolving.roles import Checker, Coin

HERE = Path(__file__).resolve().parents[3] / "examples" / "evolving"
FORGOT = "7+6=13\n5+8=13\n4+3+1=8\n<answer>833</answer>"


def test_checks_report_each_carry_and_whether_it_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "WRONG_VERDICTS", 0.0)
    assert task.write_check(FORGOT, random.Random(0)) == "10 11 no"
    assert task.write_check(FORGOT.replace("5+8=13", "5+8+1=14"), random.Random(0)) == "11 11 yes"
    monkeypatch.setattr(task, "WRONG_VERDICTS", 1.0)
    assert task.write_check(FORGOT, random.Random(0)) == "10 11 yes"


def test_verifiers_read_checks() -> None:
    assert Checker().read(ModelReply("10 11 no")) == VerifierReport(False, "10 11")
    assert Checker().read(ModelReply("10 11")) is None and Checker().read(ModelReply("")) is None
    (prompt,) = Checker().build(RoleView("457+386=?", solution=FORGOT))
    assert prompt["content"] == f"457+386=?\n{FORGOT}\nright?"
    votes = [Coin().read(ModelReply("yes", seed)).vote for seed in range(400)]  # type: ignore[union-attr]
    assert 160 < sum(votes) < 240


def test_configurations_load() -> None:
    config = load_config(EvolvingConfig, "evolve", ["--config-dir", str(HERE)])
    assert config.roles.verifier.plugin == "checker" and "policy" in config.models
    load_config(SftConfig, "sft", ["--config-dir", str(HERE)])
