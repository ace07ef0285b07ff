"""Requirements (config/requirements.py) about advantage estimators and policy losses, which declare their needs at
registration. A function that returns a true value has found a conflict; the value replaces {} in the texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from alphaapollo.algorithms.advantages import Estimator, estimator_names, get_estimator
from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss_names
from alphaapollo.config.check import describe_ineffective_keys
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import get_value, list_keys
from alphaapollo.config.load import UserSettings
from alphaapollo.config.requirements import CheckContext, Requirement, find_conflicts, requirement
from alphaapollo.config.schema import Config
from alphaapollo.rewards.components import TASK

ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR, CORRECTION = "algorithm.adv_estimator", "algorithm.rollout_correction"
METHOD = f"{CORRECTION}.method"
ONE_STEP = f"For one step set {ACTOR}.ppo_mini_batch_size={{1}} and {ACTOR}.ppo_epochs=1"
OPTIMIZER = f"{ACTOR}.optim.name"
LONG_ANSWER, LONG_ANSWER_KL = 8192, 0.001  # DAPO (arXiv 2503.14476): no KL; DeepSeek-R1 (Nature 645, 633): 0.001
COMBINATIONS: list[Requirement] = []
error = partial(requirement, Config, table=COMBINATIONS)
warning = partial(requirement, Config, table=COMBINATIONS, is_error=False)


def check_setting_combinations(
    config: Config, estimator: Estimator | None = None, policy_loss: PolicyLoss | None = None
) -> list[str]:
    """Return warnings about keys that neither estimator nor loss reads, and about risky combinations. Estimator and
    loss are by default those that the configuration names.

    Raises ConfigError for combinations that cannot work (all are listed), or if the estimator rejects its settings.
    """
    estimator = estimator or get_estimator(config.algorithm.adv_estimator)
    policy_loss = policy_loss or get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    case = CheckContext(config, estimator=estimator, loss=policy_loss)
    if errors := [*find_conflicts(case, table=COMBINATIONS)]:
        raise ConfigError(errors)
    if estimator.check is not None:
        estimator.check(config.algorithm, config.group_size)
    unread = describe_ineffective_keys(config, _list_unread_keys(config, estimator, policy_loss))
    return [*unread, *find_conflicts(case, is_error=False, table=COMBINATIONS)]


def describe_unusual_presets(config: Config, user_settings: UserSettings) -> list[str]:
    """Return notices about values of presets that are unusual for the lengths of the run."""
    presets, limit, usual = ", ".join(user_settings.presets), config.data.max_response_length, LONG_ANSWER_KL
    used = {f"{ACTOR}.use_kl_loss": f"{ACTOR}.kl_loss_coef", "algorithm.use_kl_in_reward": "algorithm.kl_ctrl.kl_coef"}
    values = {key: float(str(get_value(config, key))) for switch, key in used.items() if get_value(config, switch)}
    return [
        f"{presets} sets {key}={value:g}, unusual for answers of up to {limit} tokens: published runs with "
        f"{LONG_ANSWER} tokens or more use 0 to {usual:g}. Set {key}={usual:g}."
        for key, value in values.items()
        if presets and limit >= LONG_ANSWER and value > 10 * usual and key not in user_settings.keys
    ]


def _list_stale_settings(config: Config) -> str:
    """Return the settings with which a run trains on samples of older weights, e.g. `data.reuse.groups=8`."""
    ages = {"trainer.max_staleness": config.engine_staleness, "data.reuse.groups": config.data.reuse.groups}
    return " and ".join(f"{key}={value}" for key, value in ages.items() if value)


@error(
    f"{ESTIMATOR} env.rollout.n", "it compares samples, but the group size is 1", "Set env.rollout.n=8, or at least 2"
)
def group_of_one_sample(config: Config, case: CheckContext) -> object:
    return case.estimator.group and config.group_size == 1


@error(ESTIMATOR, "{0}", "Set {1}")
def unsupported_reward_shaping(config: Config, case: CheckContext) -> object:
    """Return why the estimator does not support changes of the reward, and how to turn off those that are enabled."""
    algorithm, reward, model = config.algorithm, config.reward, config.reward_model
    reads_components = "components" in case.estimator.needs
    is_weighted = any(weight != (1 if name == TASK else 0) for name, weight in reward.components.items())
    fixes = {
        f"algorithm.use_kl_in_reward=false ({ACTOR}.use_kl_loss has a KL in the loss)": algorithm.use_kl_in_reward,
        "algorithm.overlong_penalty.enable=false": algorithm.overlong_penalty.enable,
        "algorithm.length_budget.mode=null": algorithm.length_budget.mode,
        f"{ACTOR}.use_invalid_action_penalty=false": config.actor_rollout_ref.actor.use_invalid_action_penalty,
        "reward.required=[] (algorithm.gdpo_conditions has conditions)": reads_components and reward.required,
        "reward_model.weight=0": model.enable and model.weight and not reads_components,
        "the weights of reward.components to 0": is_weighted and not reads_components,
    }
    needed, reason = [fix for fix, is_needed in fixes.items() if is_needed], case.estimator.no_shaping_reason
    return reason and needed and (reason, "; ".join(needed))


@error(f"algorithm.filtration.baseline {ESTIMATOR}", "{}", "Set algorithm.filtration.baseline=selected")
def unsupported_filtration_baseline(config: Config, case: CheckContext) -> object:
    reasons = {
        "the KL in the reward is computed for selected samples only": config.algorithm.use_kl_in_reward,
        "the estimator needs the tokens of all samples": case.estimator.scope != "trajectories",
        "the other samples are in no mini-batch": "mini_batches" in case.estimator.needs,
    }
    filtration = config.algorithm.filtration
    reason = next((reason for reason, is_true in reasons.items() if is_true), "")
    return filtration.selects and filtration.baseline == "all" and reason


@error(f"trainer.critic_warmup {ESTIMATOR}", "the estimator has no critic", "Set trainer.critic_warmup=0")
def critic_warmup_without_critic(config: Config, case: CheckContext) -> object:
    return config.trainer.critic_warmup and "values" not in case.estimator.needs


@error(
    f"{ESTIMATOR} teacher.divergence", "there is no signal to learn", "Set teacher.divergence and teacher.model.path"
)
def nothing_to_learn_from(config: Config, case: CheckContext) -> object:
    return case.estimator.name == NO_ESTIMATOR and not config.teacher.divergence


@error(f"{OPTIMIZER} {LOSS}", "TRPO needs the loss `ratio times advantage`, but this one {}", f"Set {LOSS}=surrogate")
def trpo_with_unsuitable_loss(config: Config, case: CheckContext) -> object:
    loss = case.loss
    reasons = {
        "has no ratio to the old policy": loss.on_policy,
        "has a ratio per sequence": loss.needs_full_sequence,
        "has a ratio to the engine, not to the policy": loss.anchor != "old",
        "is not ratio times advantage": True,
    }
    return config.uses_trpo and not loss.is_surrogate and next(reason for reason, is_true in reasons.items() if is_true)


@error(f"{OPTIMIZER} {ESTIMATOR}", "TRPO needs advantages, but there are none", "Set another estimator, e.g. rloo")
def trpo_without_advantages(config: Config, case: CheckContext) -> object:
    return config.uses_trpo and case.estimator.name == NO_ESTIMATOR


@error(
    f"{OPTIMIZER} {ACTOR}.kl_loss_type teacher.divergence",
    "TRPO compares distributions with the old policy, and there can be only one such comparison",
    "Set kl_loss_type=low_var_kl+, and teacher.divergence to sampled or null",
)
def trpo_with_other_distributions(config: Config, case: CheckContext) -> object:
    return config.uses_trpo and (config.actor_rollout_ref.actor.uses_full_kl or config.teacher.uses_full_vocabulary)


@error(f"data.reuse.groups {ESTIMATOR}", "reuse needs comparisons of samples in groups", f"Set {ESTIMATOR}=grpo")
def reuse_without_groups(config: Config, case: CheckContext) -> object:
    return config.data.reuse.groups and not case.estimator.group


@error(LOSS, "it takes one advantage and ratio per row, but {} has one per token", f"Set {LOSS}=ppo or gspo_token")
def row_loss_with_values_per_token(config: Config, case: CheckContext) -> object:
    correction = config.algorithm.rollout_correction
    settings = {
        f"{ESTIMATOR}={case.estimator.name}": case.estimator.per_token,
        "teacher.divergence=sampled": config.teacher.uses_sampled_tokens,
        f"{CORRECTION}.level=token": correction.method and correction.level == "token",
    }
    return case.loss.level != "token" and " and ".join(name for name, is_per_token in settings.items() if is_per_token)


@error(f"{METHOD} {LOSS}", "the loss includes a correction", f"Set {METHOD}=null")
def second_correction(config: Config, case: CheckContext) -> object:
    return case.loss.anchor == "rollout" and config.algorithm.rollout_correction.method


@error(f"{METHOD} {LOSS}", "{} trains on older weights without a correction", f"Set {METHOD}=tis, with bypass=false")
def uncorrected_stale_samples(config: Config, case: CheckContext) -> object:
    is_corrected = case.loss.anchor == "rollout" or config.algorithm.rollout_correction.method
    return not is_corrected and _list_stale_settings(config)


@error(f"teacher.divergence {CORRECTION}.bypass {LOSS}", "{} needs the policy's log-probs", "Set divergence=reverse")
def stale_samples_with_teacher(config: Config, case: CheckContext) -> object:
    uses_engine = case.loss.anchor == "rollout" or config.algorithm.rollout_correction.bypass
    return config.teacher.uses_sampled_tokens and uses_engine and _list_stale_settings(config)


@warning(ESTIMATOR, "it is derived for samples of the current policy, but {0} uses older ones", "Set it to 0")
def stale_samples_for_on_policy_estimator(config: Config, case: CheckContext) -> object:
    return case.estimator.on_policy and _list_stale_settings(config)


@warning(f"{LOSS} {ESTIMATOR}", "{2} has no importance ratio, but an iteration has {0}", ONE_STEP)
def several_steps_without_ratio(config: Config, case: CheckContext) -> object:
    epochs = config.actor_rollout_ref.actor.ppo_epochs
    steps = f"{config.steps_per_iteration} optimizer steps ({config.num_mini_batches} mini-batches x {epochs} epochs)"
    names = " and ".join(part.name for part in (case.loss, case.estimator) if part.on_policy)
    return config.steps_per_iteration > 1 and names and (steps, config.trajectories_per_update, names)


def _list_unread_keys(config: Config, estimator: Estimator, loss: PolicyLoss) -> Iterator[tuple[str, str]]:
    """Yield (config key, reason) for each key that other estimators or losses read, but the given ones do not."""
    estimator_text, loss_text = f"{ESTIMATOR}={estimator.name}", f"{LOSS}={loss.name}"
    actor = config.actor_rollout_ref.actor
    declarations = (
        (estimator_text, "algorithm", estimator.reads, [get_estimator(name).reads for name in estimator_names()]),
        (loss_text, ACTOR, loss.reads, [get_policy_loss(name).reads for name in policy_loss_names()]),
    )
    for setting, section, reads, all_reads in declarations:
        if reads is not None:  # None: a user's own function, which may read any key
            unread = sorted({name for names in all_reads for name in names or ()}.difference(reads))
            yield from ((f"{section}.{name}", f"{setting} does not read it") for name in unread)
    if "components" in estimator.needs and estimator.reads is not None:
        yield "reward_model.weight", f"{estimator_text} reads reward components without weights"
    if "values" not in estimator.needs:
        yield from (
            (name, f"{estimator_text} needs no critic") for name in list_keys(Config) if name.startswith("critic.")
        )
    if loss.on_policy and not config.algorithm.use_kl_in_reward:
        yield f"{CORRECTION}.bypass", f"{loss_text} has no ratio"
    if loss.anchor == "rollout":
        yield f"{CORRECTION}.bypass", f"{loss_text} always uses the engine's log-probs"
    if loss.level != "token" and not actor.entropy_coeff and not actor.use_kl_loss:  # both are per token
        for name in ("loss_agg_mode", "loss_scale_factor"):
            yield f"{ACTOR}.{name}", f"{loss_text} has one value per row, and the loss is their mean"
