"""Corrections for samples of other policies: errors, and notices about keys without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.controller.placement import Machine
from alphaapollo.trainer.setup.plan import make_plan
from tests.unit.trainer.setup.combining import CORRECTION, LOSS, config, notices, problem


@pytest.mark.parametrize(("method", "level", "warns"), [("mask", "geometric", True), ("tis", "sequence", False)])
def test_a_mask_of_whole_trajectories_over_several_versions_is_a_warning(method: str, level: str, warns: bool):
    correction = {f"{CORRECTION}.method": method, f"{CORRECTION}.level": level}
    stale = {"trainer.async_mode": "carry", "trainer.max_staleness": 1}
    found = [line for line in notices("grpo", **correction, **stale) if "removes mostly long trajectories" in line]
    assert len(found) == warns


@pytest.mark.parametrize("loss", [name for name in policy_loss_names() if get_policy_loss(name).level == "sequence"])
def test_sequence_losses_refuse_token_correction(loss: str):
    correction = "algorithm.rollout_correction"
    assert problem("grpo", loss, **{f"{correction}.method": "tis"}) == (
        f"{LOSS}={loss} takes one advantage per row, but {correction}.level=token weights tokens. "
        f"Set {correction}.level=sequence or geometric."
    )
    for level in ("sequence", "geometric"):
        bounds = {f"{correction}.level": level, f"{correction}.high": 1.05}
        assert notices("grpo", loss, **{f"{correction}.method": "tis"}, **bounds) == []
    assert notices("grpo", "ppo", **{f"{correction}.method": "tis"}) == []


def test_bypass_has_no_effect_without_a_ratio():
    bypass = {"algorithm.rollout_correction.bypass": True}
    assert notices("grpo", "ppo", **bypass) == []
    assert notices("grpo", "reinforce", **bypass) == [
        f"algorithm.rollout_correction.bypass=true has no effect: {LOSS}=reinforce has no ratio."
    ]


ANCHORED = ["dppo_kl", "dppo_tv", "vespo"]


@pytest.mark.parametrize("loss", ANCHORED)
def test_losses_with_the_engine_as_anchor_refuse_a_second_correction(loss: str):
    assert problem("dr_grpo", loss, **{f"{CORRECTION}.method": "tis"}) == (
        f"{CORRECTION}.method=tis corrects twice: the ratio of {LOSS}={loss} already includes it. "
        f"Set {CORRECTION}.method=null."
    )
    assert notices("dr_grpo", loss, **{f"{CORRECTION}.bypass": True}) == [
        f"{CORRECTION}.bypass=true has no effect: {LOSS}={loss} always uses the engine's log-probs."
    ]
    assert notices("dr_grpo", loss, **{f"{CORRECTION}.off_policy_mask_threshold": 0.1}) == []


def test_losses_that_use_the_engine_as_anchor():
    assert [name for name in policy_loss_names() if get_policy_loss(name).anchor == "rollout"] == ANCHORED


@pytest.mark.parametrize("mode", ["carry", "separate"])
def test_stale_samples_need_a_correction_or_a_loss_that_includes_one(mode: str):
    stale = {"trainer.async_mode": mode, "trainer.max_staleness": 1}
    assert problem("grpo", **stale) == (
        f"trainer.max_staleness=1 trains on tokens of older weights without a correction. Set {CORRECTION}.method=tis."
    )
    assert problem("grpo", **stale, **{f"{CORRECTION}.bypass": True}).endswith(
        f"{CORRECTION}.method=tis, bypass=false."
    )
    assert notices("grpo", **stale, **{f"{CORRECTION}.method": "tis"}) == []
    assert notices("grpo", trainer__async_mode=mode, trainer__max_staleness=0) == []
    for loss in ANCHORED:
        assert notices("dr_grpo", loss, **stale) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({f"{CORRECTION}.bypass": True}, True),
        ({LOSS: "dppo_tv"}, True),
        ({LOSS: "vespo"}, True),
    ],
)
def test_old_log_probs_of_a_plan(tmp_path: Path, values: dict[str, Any], expected: bool):
    (tmp_path / "train.jsonl").touch()
    needed = {"actor_rollout_ref.model.path": "some/model", "data.train_files": str(tmp_path / "train.jsonl")}
    settings = config(needed | {"algorithm.adv_estimator": "grpo"} | values)
    plan = make_plan(settings, Machine(num_cores=2, num_gpus=0))
    assert plan.uses_rollout_logprobs == expected
