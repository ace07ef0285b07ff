"""Check that config keys fit the advantage estimator and the policy loss, which declare their needs at registration."""

from __future__ import annotations

from collections.abc import Iterator

from alphaapollo.algorithms.advantages import Estimator, estimator_names, get_estimator
from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR
from alphaapollo.algorithms.mismatch import needs_full_sequence
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss_names
from alphaapollo.config.effects import describe_ineffective_keys
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import format_value, list_keys
from alphaapollo.config.schema import Config
from alphaapollo.rewards.components import TASK

ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR, CORRECTION = "algorithm.adv_estimator", "algorithm.rollout_correction"


def check_setting_combinations(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> list[str]:
    """Return warnings about keys that neither estimator nor loss reads, and about risky combinations.

    Raises ValueError for combinations that cannot work (all are listed), or if the estimator rejects its settings.
    """
    errors = list(_list_errors(config, estimator, policy_loss))
    if errors:
        raise ConfigError(errors)
    if estimator.check is not None:
        estimator.check(config.algorithm, config.group_size)
    unread = [*_list_keys_unread_by_estimator(estimator), *_list_keys_unread_by_loss(config, policy_loss)]
    return [
        *describe_ineffective_keys(config, unread),
        *_list_off_policy_warnings(config, estimator, policy_loss),
        *_list_warnings_on_separate_turns(config, estimator, policy_loss),
    ]


def _list_errors(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> Iterator[str]:
    """Yield an error for each combination that cannot work."""
    by, loss, warmup = f"{ESTIMATOR}={estimator.name}", f"{LOSS}={policy_loss.name}", config.trainer.critic_warmup
    correction, teacher, stale = config.algorithm.rollout_correction, config.teacher, _list_stale_settings(config)
    if estimator.group and config.group_size == 1:
        yield f"{by} compares the samples of a prompt, but the group size is 1. Set env.rollout.n=8, or at least 2."
    fixes = [*_list_reward_shaping_fixes(config, reads_components="components" in estimator.needs)]
    if estimator.no_shaping_reason and fixes:
        yield f"{by} does not support changes of the reward: {estimator.no_shaping_reason}. Set {'; '.join(fixes)}."
    if warmup and "values" not in estimator.needs:
        yield f"trainer.critic_warmup={warmup} needs a critic, but {by} has none. Set trainer.critic_warmup=0."
    if estimator.name == NO_ESTIMATOR and not teacher.divergence:
        yield f"{by} ignores the reward, and there is no teacher. Set teacher.divergence and teacher.model.path."
    if (groups := config.data.reuse.groups) and not estimator.group:
        yield f"data.reuse.groups={groups}: {by} does not compare the samples of a prompt. Set {ESTIMATOR}=grpo."
    if policy_loss.level != "token":
        per_token = {
            "teacher.divergence=sampled": teacher.uses_sampled_tokens and f"{LOSS}=ppo, or divergence=reverse",
            by: estimator.per_token and f"{LOSS}=gspo_token or ppo",
            f"{CORRECTION}.level=token": correction.method
            and correction.level == "token"
            and f"{CORRECTION}.level=sequence or geometric",
        }
        for setting, fix in per_token.items():
            if fix:
                yield f"{loss} takes one advantage per row, but {setting} has one per token. Set {fix}."
    corrects = policy_loss.anchor == "rollout"
    if corrects and correction.method:
        twice = f"{CORRECTION}.method={correction.method} corrects twice"
        yield f"{twice}: {loss} includes a correction. Set {CORRECTION}.method=null."
    for setting in stale:
        if not corrects and not correction.method:
            fix = f"{CORRECTION}.method=tis" + (", bypass=false" if correction.bypass else "")
            yield f"{setting} trains on tokens of older weights without a correction. Set {fix}."
        if teacher.uses_sampled_tokens and (corrects or correction.bypass):
            yield (
                f"{setting} with {loss} and {CORRECTION}.bypass={format_value(correction.bypass)}: teacher.divergence="
                "sampled needs the log-probs of the trained policy. Set teacher.divergence=reverse."
            )


def _list_stale_settings(config: Config) -> list[str]:
    """Return the settings with which a run trains on samples of older weights, e.g. `data.reuse.groups=8`."""
    ages = {"trainer.max_staleness": config.engine_staleness, "data.reuse.groups": config.data.reuse.groups}
    return [f"{key}={value}" for key, value in ages.items() if value]


def _list_reward_shaping_fixes(config: Config, reads_components: bool) -> Iterator[str]:
    """Yield how to disable each setting that changes the reward, e.g. `algorithm.use_kl_in_reward=false`.

    reads_components: the estimator reads the named reward components instead of their weighted sum.
    """
    algorithm, reward, model = config.algorithm, config.reward, config.reward_model
    weights = reward.components.items()
    fixes = {
        f"algorithm.use_kl_in_reward=false ({ACTOR}.use_kl_loss has a KL in the loss)": algorithm.use_kl_in_reward,
        "algorithm.overlong_penalty.enable=false": algorithm.overlong_penalty.enable,
        "algorithm.length_budget.mode=null": algorithm.length_budget.mode,
        f"{ACTOR}.use_invalid_action_penalty=false": config.actor_rollout_ref.actor.use_invalid_action_penalty,
        "reward.required=[] (algorithm.gdpo_conditions has conditions)": reads_components and reward.required,
        "reward_model.weight=0": model.enable and model.weight and not reads_components,
        "the weights of reward.components to 0": not reads_components
        and any(weight != (name == TASK) for name, weight in weights),
    }
    yield from (fix for fix, is_needed in fixes.items() if is_needed)


def _list_keys_unread_by_estimator(estimator: Estimator) -> Iterator[tuple[str, str]]:
    """Yield (config key, reason) for each key that another estimator reads, but this one does not."""
    key = f"{ESTIMATOR}={estimator.name}"
    if estimator.reads is not None:
        known = {name for other in estimator_names() for name in get_estimator(other).reads or ()}
        unread = sorted(known.difference(estimator.reads))
        yield from ((f"algorithm.{name}", f"{key} does not read it") for name in unread)
        if "components" in estimator.needs:
            yield "reward_model.weight", f"{key} reads reward components without weights"
    if "values" not in estimator.needs:
        yield from ((name, f"{key} needs no critic") for name in list_keys(Config) if name.startswith("critic."))


def _list_keys_unread_by_loss(config: Config, policy_loss: PolicyLoss) -> Iterator[tuple[str, str]]:
    """Yield (config key, reason) for each key that another policy loss reads, but this one does not."""
    key, actor = f"{LOSS}={policy_loss.name}", config.actor_rollout_ref.actor
    if policy_loss.on_policy and not config.algorithm.use_kl_in_reward:
        yield f"{CORRECTION}.bypass", f"{key} has no ratio"
    if policy_loss.anchor == "rollout":
        yield f"{CORRECTION}.bypass", f"{key} always uses the engine's log-probs"
    if policy_loss.reads is not None:
        known = {name for other in policy_loss_names() for name in get_policy_loss(other).reads or ()}
        unread = sorted(known.difference(policy_loss.reads))
        yield from ((f"{ACTOR}.{name}", f"{key} does not read it") for name in unread)
    if policy_loss.level != "token" and not actor.entropy_coeff and not actor.use_kl_loss:  # both are per token
        for name in ("loss_agg_mode", "loss_scale_factor"):
            yield f"{ACTOR}.{name}", f"{key} has one value per row, and the loss is their mean"


def _list_off_policy_warnings(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> Iterator[str]:
    """Yield warnings if an on-policy estimator or loss trains on samples of an older policy."""
    actor, stale = config.actor_rollout_ref.actor, _list_stale_settings(config)
    derived = f"{ESTIMATOR}={estimator.name} is derived for samples of the current policy"
    if estimator.on_policy:
        yield from (f"{derived}, but {one} uses older samples. Set {one.partition('=')[0]}=0." for one in stale)
    correction = config.algorithm.rollout_correction
    is_sequence_mask = correction.method == "mask" and correction.level != "token"
    if is_sequence_mask and stale:
        yield (
            f"{CORRECTION}.method=mask with level={correction.level} removes mostly long and old trajectories, with "
            f"{stale[0]}. Set {CORRECTION}.method=tis, or {stale[0].partition('=')[0]}=0."
        )
    if config.steps_per_iteration == 1:
        return
    stale_steps = (
        f"an iteration has {config.steps_per_iteration} optimizer steps ({config.num_mini_batches} "
        f"mini-batches x {actor.ppo_epochs} epochs), all but the first on samples of an older policy. For one step set "
        f"{ACTOR}.ppo_mini_batch_size={config.trajectories_per_update} and {ACTOR}.ppo_epochs=1."
    )
    if policy_loss.on_policy:
        yield f"{LOSS}={policy_loss.name} has no importance ratio, but {stale_steps}"
    if estimator.on_policy:
        yield f"{derived}, but {stale_steps}"


def _list_warnings_on_separate_turns(config: Config, estimator: Estimator, policy_loss: PolicyLoss) -> Iterator[str]:
    """Yield warnings for memory context and agents, where a trajectory can have several training sequences."""
    is_agent = config.env.env_name == "agent"
    if config.env.context != "memory" and not is_agent:
        return
    setting = "env.env_name=agent" if is_agent else "env.context=memory"
    if policy_loss.needs_full_sequence or needs_full_sequence(config.algorithm.rollout_correction):
        key = f"{LOSS}={policy_loss.name}" if policy_loss.needs_full_sequence else CORRECTION
        longest = config.env.max_steps * config.data.max_prompt_length + config.data.max_response_length
        limit = "" if is_agent else f" (at most {longest} tokens)"
        yield (
            f"{key} has one ratio per trajectory: with {setting} all its rows share a micro-batch, also beyond "
            f"{ACTOR}.ppo_max_token_len_per_gpu{limit}."
        )
    if estimator.compares_states:
        yield (
            f"{ESTIMATOR}={estimator.name} with {setting}: unless the environment identifies its state "
            "(StepResult.info['state']), turns are compared only if their full prompts are equal."
        )
