"""Declarations of estimators and losses at registration are correct: the keys they read, and their advantages."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import BaseModel

import alphaapollo
from alphaapollo.algorithms.advantages import AdvantageInputs, Turns, estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss, policy_loss_names
from alphaapollo.config.schema import Actor, Algorithm
from tests.unit.algorithms.batches import make_advantage_inputs, with_choice

# Each switch in both positions.
ALGORITHMS = [
    Algorithm(passk_k=2),
    Algorithm(passk_k=2, norm_adv_by_std_in_grpo=False),
    Algorithm(passk_k=2, norm_adv_by_std_in_grpo=True, whiten_advantages=False),
]
OTHER: dict[str, Any] = {  # another value of each field, one that shows in the batch below
    "gamma": 0.5,
    "lam": 0.5,
    "whiten_advantages": False,
    "baseline_decay": 0.9,
    "norm_adv_by_std_in_grpo": False,
    "gigpo_step_weight": 3.0,
    "turn_baseline": "return_alive",
    "gdpo_rewards": ["accuracy"],
    "gdpo_weights": [1.0, 3.0],
    "gdpo_conditions": {"speed": ("accuracy", 1.0)},
    "passk_k": 3,
}
ACTORS = [Actor(), Actor(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)]


class Recording:
    """Replacement of a config section that records which fields are read."""

    def __init__(self, section: BaseModel, seen: set[str], prefix: str = ""):
        self._section, self._seen, self._prefix = section, seen, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        if isinstance(value, BaseModel):
            return Recording(value, self._seen, f"{self._prefix}{name}.")
        self._seen.add(self._prefix + name)
        return value


def group_batch() -> AdvantageInputs:
    """Groups of three, three and one trajectory, of one to three tokens; one reward on a middle token. The first
    two trajectories have two turns, the others one."""
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]] * 2 + [[1, 1, 1]], dtype=torch.float64)
    token_rewards = torch.zeros(7, 3, dtype=torch.float64)
    token_rewards[:, 0] = scores
    token_rewards[0] = torch.tensor([0.0, 0.5, 0.5])
    return make_advantage_inputs(
        scores,
        [0, 0, 0, 1, 1, 1, 2],
        mask,
        token_rewards=token_rewards,
        values=torch.arange(21, dtype=torch.float64).reshape(7, 3) % 5 / 5,
        greedy_rewards=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        components={"accuracy": scores, "speed": torch.tensor([0.1, 0.9, 0.4, 0.2, 0.8, 0.3, 0.5]).double()},
        mini_batches=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        baseline=0.25,
        turns=Turns(
            turn_of_token=torch.tensor([[0, 0, 1], [2, 3, -1], [4, -1, -1], [5] * 3, [6, 6, -1], [7, -1, -1], [8] * 3]),
            trajectory_ids=torch.tensor([0, 0, 1, 1, 2, 3, 4, 5, 6]),
            anchor_ids=torch.tensor([0, 1, 0, 4, 0, 2, 2, 2, 3]),
        ),
    )


def advantages(name: str, algorithm: Algorithm) -> torch.Tensor:
    return get_estimator(name)(group_batch(), algorithm).advantages


@pytest.mark.parametrize("name", estimator_names())
def test_estimator_reads_its_declared_keys_and_each_has_an_effect(name: str):
    estimator, seen = get_estimator(name), set[str]()
    for algorithm in ALGORITHMS:
        estimator(group_batch(), cast(Algorithm, Recording(algorithm, seen)))
    assert estimator.reads is not None and seen == {*estimator.reads}
    for field in estimator.reads:
        pairs = [(one, one.model_copy(update={field: OTHER[field]})) for one in ALGORITHMS]
        assert any((advantages(name, one) != advantages(name, other)).any() for one, other in pairs), field


@pytest.mark.parametrize("name", estimator_names())
def test_per_token_estimators_and_no_others_differ_within_a_row(name: str):
    """For other estimators, all tokens of a row have one value, so a sequence-level loss may use its mean."""
    estimator, batch = get_estimator(name), group_batch()
    found = [zip(advantages(name, algorithm), batch.mask.bool(), strict=True) for algorithm in ALGORITHMS]
    assert any(len(row[mask].unique()) > 1 for rows in found for row, mask in rows) == estimator.per_token


@pytest.mark.parametrize("name", [name for name in estimator_names() if not get_estimator(name).group])
def test_estimators_without_groups_give_one_sample_an_advantage(name: str):
    batch = group_batch()
    alone = replace(batch, group_ids=torch.arange(7), components=None)
    assert get_estimator(name)(alone, Algorithm()).advantages.any() == (name != "none")


def loss_batch() -> PolicyLossInputs:
    logp = torch.log(torch.tensor([[0.9, 0.5, 0.2, 0.6], [0.3, 0.05, 0.9, 0.4]], dtype=torch.float64))
    old = torch.log(torch.tensor([[0.3, 0.45, 0.5, 0.6], [0.1, 0.4, 0.8, 0.39]], dtype=torch.float64))
    signs = torch.tensor([[3.0, 3.0, 3.0, 3.0], [-2.0, -2.0, -2.0, -2.0]], dtype=torch.float64)
    return PolicyLossInputs(logp, old, signs, torch.ones(2, 4, dtype=torch.float64), rollout_logp=old)


OTHER_ACTOR: dict[str, Any] = {
    "clip_ratio": 5.0,
    "clip_ratio_low": 0.6,
    "clip_ratio_high": 5.0,
    "clip_ratio_c": 1.1,
    "tau_pos": 3.0,
    "tau_neg": 3.0,
    "policy_loss.cispo_mask_low": 0.1,
    "policy_loss.cispo_mask_high": 0.1,
    "policy_loss.clip_cov_ratio": 0.5,
    "policy_loss.clip_cov_lb": -10.0,
    "policy_loss.clip_cov_ub": 0.0,
    "policy_loss.kl_cov_ratio": 0.9,
    "policy_loss.ppo_kl_coef": 7.0,
    "policy_loss.vespo_positive": (1.0, 1.0),
    "policy_loss.vespo_negative": (1.0, 1.0),
}


def with_field(actor: Actor, name: str, value: Any) -> Actor:
    section, _, field = name.rpartition(".")
    if not section:
        return actor.model_copy(update={field: value})
    return actor.model_copy(update={section: getattr(actor, section).model_copy(update={field: value})})


@pytest.mark.parametrize("name", policy_loss_names())
def test_loss_reads_its_declared_keys_and_each_has_an_effect(name: str):
    loss, seen = get_policy_loss(name), set[str]()
    for actor in ACTORS:
        recording = cast(Actor, Recording(actor, seen))
        loss(with_choice(loss_batch(), loss, recording), recording)
    assert loss.reads is not None
    assert seen == set(loss.reads)
    wide = Actor(policy_loss={"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0})

    def losses(actor: Actor) -> torch.Tensor:
        output = loss(with_choice(loss_batch(), loss, actor), actor)
        return output.loss + output.penalty

    for field in loss.reads:
        pairs = [(actor, with_field(actor, field, OTHER_ACTOR[field])) for actor in (Actor(), wide)]
        assert any((losses(a) != losses(b)).any() for a, b in pairs), field


@pytest.mark.parametrize("name", policy_loss_names())
def test_losses_without_a_ratio_and_no_others_ignore_the_old_log_probs(name: str):
    loss = get_policy_loss(name)
    batch = with_choice(loss_batch(), loss, Actor())
    other = replace(batch, old_logp=batch.old_logp - 0.5)
    assert torch.equal(loss(batch, Actor()).loss, loss(other, Actor()).loss) == loss.on_policy


def test_only_the_owner_reads_these_fields():
    """Otherwise a used key would be reported as without effect. trainer/setup/preparation.py reads adv_estimator."""
    estimators, losses = map(get_estimator, estimator_names()), map(get_policy_loss, policy_loss_names())
    fields = {name for one in estimators for name in one.reads or ()}
    fields |= {name.rpartition(".")[2] for one in losses for name in one.reads or ()}
    package = Path(alphaapollo.__file__).parent
    for path in package.rglob("*.py"):
        owners = ("algorithms", "config", "plugins")
        if path.relative_to(package).parts[0] not in owners and path.name != "inputs.py":
            code = re.sub(r'"[^"\n]*"', "", path.read_text(encoding="utf-8"))  # messages may name fields
            read = set(re.findall(r"\.(\w+)", code)) & fields
            assert not read, f"{path.name} reads {', '.join(sorted(read))}"
