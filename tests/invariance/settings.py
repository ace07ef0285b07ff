"""Random valid configurations for a pair of estimator and loss."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from alphaapollo.algorithms.advantages import Estimator, estimator_names, get_estimator
from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss_names
from alphaapollo.config.build import build_config
from alphaapollo.config.schema import AggregationMode, Config
from alphaapollo.trainer.setup.combinations import check_setting_combinations
from tests.invariance.episodes import Episodes

KL_IN_LOSS = ["k1", "abs", "k2", "k3", "k3+", "full", "unbiased"]


def pairs() -> list[tuple[str, str]]:
    """Pairs of every estimator with every loss, except those that a run refuses."""
    estimators = [name for name in estimator_names() if _is_ours(get_estimator(name))]
    losses = [name for name in policy_loss_names() if _is_ours(get_policy_loss(name))]
    per_token = {name for name in estimators if get_estimator(name).per_token}
    per_row = {name for name in losses if get_policy_loss(name).level == "sequence"}
    return [(one, loss) for one in estimators for loss in losses if not (one in per_token and loss in per_row)]


def _is_ours(one: Estimator | PolicyLoss) -> bool:
    return one.fn.__module__.startswith("alphaapollo.algorithms.")


def draw_config(
    generator: np.random.Generator, estimator: Estimator, loss: PolicyLoss, episodes: Episodes, one_step: bool
) -> Config:
    """`one_step`: all trajectories in one mini-batch; otherwise up to three mini-batches."""

    def chance(probability: float) -> bool:
        return bool(generator.random() < probability)

    def one_of(values: list[Any]) -> Any:
        return values[int(generator.integers(len(values)))]

    actor: dict[str, Any] = {
        "ppo_mini_batch_size": 1000 if one_step else int(generator.integers(4, 12)),
        "ppo_epochs": 2 if chance(0.2) else 1,
        "shuffle": chance(0.7),
        "loss_agg_mode": one_of([*get_args(AggregationMode)]),
        "entropy_coeff": 0.01 if chance(0.3) else 0.0,
        "clip_ratio_c": 3.0 if chance(0.2) else None,
        "policy_loss": {
            "loss_mode": loss.name,
            "clip_cov_ratio": 0.2,
            "clip_cov_lb": -0.5,
            "clip_cov_ub": 5.0,
            "kl_cov_ratio": 0.2,
        },
    }
    algorithm: dict[str, Any] = {
        "adv_estimator": estimator.name,
        "gamma": one_of([1.0, 0.9]),
        "lam": one_of([1.0, 0.9]),
        "whiten_advantages": chance(0.5),
        "passk_k": min(2, episodes.largest_group),
        "overlong_filter": chance(0.4),
        "filtration": {"method": one_of(["best", "best_random", "best_worst"]) if chance(0.15) else None},
        "rollout_correction": _correction(generator, loss) if chance(0.3) else {},
    }
    algorithm["norm_adv_by_std_in_grpo"] = chance(0.5)
    if not estimator.no_shaping_reason:
        actor["use_invalid_action_penalty"] = chance(0.5)
        algorithm["use_kl_in_reward"] = chance(0.3)
        algorithm["length_budget"] = {"mode": one_of(["exact", "max"]) if chance(0.3) else None, "coef": 0.05}
    alone = estimator.name == NO_ESTIMATOR and loss.level == "sequence"  # with a teacher that compares distributions
    if not algorithm.get("use_kl_in_reward") and chance(0.4) and not alone:
        actor |= {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": one_of(KL_IN_LOSS)}
    teacher = _teacher(generator, estimator, loss, may_be_whole=actor.get("kl_loss_type") != "full")
    if "turn_baseline" in (estimator.reads or ()):
        algorithm["turn_baseline"] = one_of(["return_all", "return_alive"])
    size = actor["ppo_mini_batch_size"]
    batch = size if size < 1000 else 32  # divisible by the mini-batches
    sections = {"actor_rollout_ref": {"actor": actor}, "algorithm": algorithm, "teacher": teacher}
    config = build_config(Config, sections | {"env": {"rollout": {"n": 4}}, "data": {"train_batch_size": batch}})
    check_setting_combinations(config, estimator, loss)  # raises if a run would refuse it
    return config


def _teacher(
    generator: np.random.Generator, estimator: Estimator, loss: PolicyLoss, may_be_whole: bool
) -> dict[str, Any]:
    """One in four cases, and always if there is no other training signal."""
    kinds = ["sampled"] * (loss.level == "token") + ["reverse", "forward", "jsd"] * may_be_whole
    if not kinds or (generator.random() > 0.25 and estimator.name != NO_ESTIMATOR):
        return {}
    return {"divergence": kinds[int(generator.integers(len(kinds)))], "coef": 0.5, "beta": 0.3}


def _correction(generator: np.random.Generator, loss: PolicyLoss) -> dict[str, Any]:
    threshold = {"off_policy_mask_threshold": 0.1} if generator.random() < 0.3 else {}
    if loss.anchor == "rollout":
        return threshold
    levels = ["sequence", "geometric"] if loss.level == "sequence" else ["token", "sequence", "geometric"]
    method = ["tis", "mask"][int(generator.integers(2))]
    bounds = {"level": levels[int(generator.integers(len(levels)))], "low": 0.3, "high": 3.0}
    return {"method": method, **bounds, **threshold}
