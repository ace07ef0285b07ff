"""The verdict of a replay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alphaapollo.plugins.verify.replay import print_and_check_comparison
from alphaapollo.trainer.replay.__main__ import main
from alphaapollo.trainer.replay.recording import Outcome
from tests.unit.trainer.replay.test_recording import INPUTS_OF_RUN, OUTCOME


def test_a_folder_without_a_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is not a complete recording")


def prepared(outcome: Outcome = OUTCOME, **values: Any) -> Any:
    plan = SimpleNamespace(model=SimpleNamespace(dtype="float32"))
    given = {"changes": [], "causes": []} | values
    return SimpleNamespace(folder=Path("rec"), inputs=INPUTS_OF_RUN, recorded=outcome, plan=plan, **given)


def with_loss(change: float) -> Outcome:
    loss = OUTCOME["actor/loss"] * (1 + change)
    return OUTCOME | {"actor/loss": loss, "policy weights": ("00fe", 3.0 * (1 + change / 10))}


TWO_RANKS = {"causes": ["the run had 2 training ranks"]}
CHANGED = {"changes": ["in float64", "with algorithm.gamma=0.9"]}
OTHER_ADVANTAGES = OUTCOME | {"advantages": np.array([0.5, -1.5], np.float32)}
NO_ADVANTAGES = {name: value for name, value in OUTCOME.items() if name != "advantages"}


@pytest.mark.parametrize(
    ("outcome", "values", "is_equal", "facts"),
    [
        # an exact replay must be bit equal
        (OUTCOME, {}, True, ["bit for bit equal: 6 of 6"]),
        (with_loss(1e-6), {}, False, ["first difference is in actor/loss", "1.0e-06, in actor/loss"]),
        (OTHER_ADVANTAGES, {}, False, ["first difference is in advantages"]),
        (NO_ADVANTAGES, {}, False, ["inf, in advantages"]),
        # others have a tolerance
        (with_loss(1e-6), TWO_RANKS, True, ["equal within 0.001", "the run had 2 training ranks\n"]),
        (with_loss(1e-2), TWO_RANKS, False, []),
        (OUTCOME | {"batch/padding": 0.9}, TWO_RANKS, True, ["bit for bit equal: 5 of 5"]),
        (with_loss(1.0), CHANGED, True, ["float64", "algorithm.gamma=0.9", "5.0e-01, in actor/loss"]),
    ],
)
def test_verdict_of_a_replay(
    outcome: Outcome, values: Any, is_equal: bool, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_and_check_comparison(prepared(**values), outcome) == is_equal
    shown = capsys.readouterr().out
    assert all(fact in shown for fact in facts), shown


def test_a_run_that_ended_during_the_update_has_no_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_and_check_comparison(prepared({}), OUTCOME)
    assert "ended before there was an outcome" in capsys.readouterr().out
