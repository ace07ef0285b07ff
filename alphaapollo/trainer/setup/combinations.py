"""What goes together: estimator, policy loss and the keys about them, from what each declares at registration.

config/check.py knows the keys alone; here the registered names are at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from alphaapollo.algorithms.advantages import Estimator, estimator_names, get_estimator
from alphaapollo.algorithms.advantages.none import NO_ESTIMATOR
from alphaapollo.algorithms.correction import looks_at_sequences
from alphaapollo.algorithms.kl import ESTIMATORS
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss_names
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import accepted_keys
from alphaapollo.config.notices import ACTOR, void_lines
from alphaapollo.config.schema import Config
from alphaapollo.rewards.components import TASK

LOSS = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"


def check_combinations(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> list[str]:
    """Notices about keys that this estimator and this loss do not read, and about what will surprise.

    Raises ValueError naming what cannot go together, and what an estimator itself refuses.
    """
    problems = [
        *_check_group(config, estimator),
        *_check_shaping(config, estimator),
        *_check_critic(config, estimator),
        *_check_levels(config, estimator, policy_loss),
        *_check_signal(config, estimator),
    ]
    if problems:
        raise ConfigError(problems)
    if estimator.check is not None:
        estimator.check(config.algorithm, config.group_size)
    void = [
        *_unread_by_estimator(config, estimator),
        *_unread_by_loss(config, policy_loss),
        *_void_by_level(config, policy_loss),
        *_void_without_critic(estimator),
    ]
    return [
        *void_lines(config, void),
        *_stale_samples(config, estimator, policy_loss),
        *_of_memory(config, estimator, policy_loss),
        *_kl_gradient(config),
        *_idle_bounds(config),
    ]


def _check_group(config: Config, estimator: Estimator) -> Iterator[str]:
    if estimator.group and config.group_size == 1:
        yield (
            f"algorithm.adv_estimator={estimator.name} compares the samples of one prompt, but the group size is 1: "
            "there is nothing to compare with. Set env.rollout.n to 2 or more (8 is usual)."
        )


def _check_shaping(config: Config, estimator: Estimator) -> Iterator[str]:
    if not estimator.no_shaping:
        return
    algorithm, reward = config.algorithm, config.reward
    by_name = "components" in estimator.needs
    weighted = any(weight != (name == TASK) for name, weight in reward.components.items())
    shaping: dict[str, tuple[object, str]] = {
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, f"set {ACTOR}.use_kl_loss=true instead"),
        "algorithm.overlong_penalty.enable": (algorithm.overlong_penalty.enable, "set it false"),
        "algorithm.length_budget.mode": (algorithm.length_budget.mode, "set it null"),
        f"{ACTOR}.use_invalid_action_penalty": (
            config.actor_rollout_ref.actor.use_invalid_action_penalty,
            "set it false",
        ),
        "reward.required": (by_name and reward.required, "the key gdpo_conditions of algorithm says it by name"),
        "reward_model.enable": (
            config.reward_model.enable and config.reward_model.weight and not by_name,
            "set reward_model.weight=0, to see its scores in the metrics only",
        ),
        "reward.components": (weighted and not by_name, "give them weight 0, to see them in the metrics only"),
    }
    for key, (is_on, fix) in shaping.items():
        if is_on:
            yield (
                f"{key} changes the reward, but algorithm.adv_estimator={estimator.name} cannot take that: "
                f"{estimator.no_shaping}. Leave it out: {fix}."
            )


def _check_critic(config: Config, estimator: Estimator) -> Iterator[str]:
    if config.trainer.critic_warmup and not _needs_critic(estimator):
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup}: these iterations train the critic only, and "
            f"algorithm.adv_estimator={estimator.name} has none: nothing would be trained. Set trainer.critic_warmup=0."
        )


def _check_levels(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> Iterator[str]:
    if policy_loss.level == "token":
        return
    if config.teacher.sampled:
        yield (
            f"{LOSS}={policy_loss.name} takes one advantage a row, but teacher.divergence=sampled gives every token "
            f"its own. Set {LOSS}=ppo, or teacher.divergence=reverse."
        )
    if estimator.per_token:
        yield (
            f"{LOSS}={policy_loss.name} takes one advantage a row, but algorithm.adv_estimator={estimator.name} gives "
            f"every token its own. Set {LOSS}=gspo_token (GSPO with an advantage a token) or ppo."
        )
    correction = config.algorithm.rollout_correction
    if correction.method is not None and correction.level == "token":
        yield (
            f"{CORRECTION}.level=token: token weights cannot multiply {LOSS}={policy_loss.name}, which has one number "
            f"a row. Set {CORRECTION}.level=sequence or geometric."
        )


def _check_signal(config: Config, estimator: Estimator) -> Iterator[str]:
    if estimator.name == NO_ESTIMATOR and not config.teacher.divergence:
        yield (
            f"algorithm.adv_estimator={NO_ESTIMATOR}: the reward teaches nothing, and there is no teacher. Set "
            "teacher.divergence and teacher.model.path, or another estimator."
        )


def _unread_by_estimator(config: Config, estimator: Estimator) -> Iterator[tuple[str, str]]:
    """(key, reason) of what some estimator reads and this one does not, or not under its present settings."""
    if estimator.reads is None:
        return
    known = frozenset[str]().union(*(get_estimator(name).all_reads for name in estimator_names()))
    for name in sorted(known - estimator.all_reads):
        yield f"algorithm.{name}", f"algorithm.adv_estimator={estimator.name} does not read it"
    if "components" in estimator.needs:
        because = f"algorithm.adv_estimator={estimator.name} takes the named rewards as they are"
        yield "reward_model.weight", because
    for switch, fields in estimator.reads_if.items():
        if not getattr(config.algorithm, switch):
            yield from ((f"algorithm.{name}", f"algorithm.{switch} is false") for name in fields)


def _unread_by_loss(config: Config, policy_loss: PolicyLoss) -> Iterator[tuple[str, str]]:
    if policy_loss.on_policy and not config.algorithm.use_kl_in_reward:
        yield f"{CORRECTION}.bypass", f"{LOSS}={policy_loss.name} has no ratio that could correct"
    if policy_loss.reads is not None:
        known = {name for other in policy_loss_names() for name in get_policy_loss(other).reads or ()}
        for name in sorted(known.difference(policy_loss.reads)):
            yield f"{ACTOR}.{name}", f"{LOSS}={policy_loss.name} does not read it"


def _void_by_level(config: Config, policy_loss: PolicyLoss) -> Iterator[tuple[str, str]]:
    actor = config.actor_rollout_ref.actor
    if policy_loss.level == "token" and actor.loss_agg_mode in ("token-mean", "token-sum"):
        yield f"{ACTOR}.loss_agg_count", f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode} counts tokens"
    if policy_loss.level == "token" or actor.entropy_coeff > 0 or actor.use_kl_loss:
        return  # it weighs the tokens of entropy and KL, whatever the level of the policy loss
    because = f"{LOSS}={policy_loss.name} has one number a row, and the loss is their mean"
    yield f"{ACTOR}.loss_agg_mode", because
    yield f"{ACTOR}.loss_scale_factor", because


def _void_without_critic(estimator: Estimator) -> Iterator[tuple[str, str]]:
    if not _needs_critic(estimator):
        keys = [key for key in accepted_keys(Config) if key.startswith("critic.")]
        yield from ((key, f"algorithm.adv_estimator={estimator.name} needs no critic") for key in keys)


def _stale_samples(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> Iterator[str]:
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    if estimator.on_policy and trainer.async_mode and trainer.max_staleness:
        yield (
            f"algorithm.adv_estimator={estimator.name} is derived for samples of the present policy, and "
            f"trainer.max_staleness={trainer.max_staleness} trains on older ones. For none set it 0."
        )
    if config.optimizer_steps == 1:
        return
    what = (
        f"an iteration has {config.optimizer_steps} optimiser steps ({config.mini_batches} mini-batches x "
        f"{actor.ppo_epochs} epochs), all but the first on samples of an older policy"
    )
    fix = f"For one step set {ACTOR}.ppo_mini_batch_size={config.trajectories} and {ACTOR}.ppo_epochs=1"
    if policy_loss.on_policy:
        yield f"{LOSS}={policy_loss.name} has no importance ratio to correct for that: {what}. {fix}."
    if estimator.on_policy:
        yield f"algorithm.adv_estimator={estimator.name} is derived for samples of the present policy: {what}. {fix}."


def _of_memory(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> Iterator[str]:
    """Where a trajectory has a row a turn."""
    if config.env.context != "memory":
        return
    if policy_loss.whole or looks_at_sequences(config.algorithm.rollout_correction):
        what = f"{LOSS}={policy_loss.name}" if policy_loss.whole else f"{CORRECTION}.level"
        longest = config.env.max_steps * config.data.max_prompt_length + config.data.max_response_length
        yield (
            f"{what} weighs a trajectory as a whole: with env.context=memory its rows, one a turn, share a "
            f"micro-batch, also beyond {ACTOR}.ppo_max_token_len_per_gpu (at worst {longest} tokens)."
        )
    if "turns" in estimator.needs:
        yield (
            f"algorithm.adv_estimator={estimator.name} with env.context=memory: where the environment does not name "
            "its state (StepResult.info['state']), turns compare only if their whole prompts, with history, are equal."
        )


def _kl_gradient(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    formula = ESTIMATORS.get(actor.kl_loss_type)  # none for `full` and the forms with a +
    if not actor.use_kl_loss or formula not in ("k1", "k3"):
        return
    gradient = {
        "k1": "has an expected gradient of zero: in the loss it is noise",
        "k3": "has the value of KL(policy||reference) and the gradient of KL(reference||policy)",
    }[formula]
    yield (
        f"{ACTOR}.kl_loss_type={actor.kl_loss_type} {gradient}. {actor.kl_loss_type}+ and k2 have the gradient of "
        "KL(policy||reference)."
    )


def _idle_bounds(config: Config) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    low, high = correction.low or 0.0, correction.high or math.inf
    if correction.method is not None and correction.level == "geometric" and low < 0.9 and high > 1.1:
        yield (
            f"{CORRECTION}.level=geometric: a mean over all tokens of a trajectory hardly leaves 1, so bounds as wide "
            f"as {low:g} and {high:g} never act. Set {CORRECTION}.low=0.99 and {CORRECTION}.high=1.01, or nearer."
        )


def _needs_critic(estimator: Estimator) -> bool:
    return "values" in estimator.needs
