"""Settings of the workers of main_ppo and of loops of one's own, with all `auto` values resolved."""

from __future__ import annotations

from dataclasses import dataclass, replace

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss
from alphaapollo.batching.shared_prompts import decide_shared_prompts
from alphaapollo.config.resolve import count_engine_gpus, resolve_device, resolve_model, resolve_rollout
from alphaapollo.config.schema import Actor, Config, Critic, Model, Rollout
from alphaapollo.controller.placement import Machine, Placement, make_placement
from alphaapollo.planning.memory_fit import Settings, fit_to_memory_if_measurable, get_max_tokens, replace_values
from alphaapollo.planning.memory_plan import MemoryPlan
from alphaapollo.planning.model_requirements import choose_kernels
from alphaapollo.types import Sampling

SHARING = "actor_rollout_ref.actor.use_prefix_grouper"


@dataclass(frozen=True)
class Plan:
    """Settings of a training run, after all `auto` values are resolved."""

    placement: Placement
    model: Model  # settings of all trained models, with dtype and attention resolved
    rollout: Rollout  # rollout section, with dtype and number of engines resolved
    actor: Actor  # actor section, with the ranks that share a copy of the model resolved
    critic: Critic  # critic section, likewise
    max_tokens: int  # token budget of a micro-batch, over the ranks that share its rows
    needs_old_logprobs: bool  # the driver needs old log-probs before the update
    uses_rollout_logprobs: bool  # the old log-probs are those of the rollout engine; the trainer computes none
    greedy_baseline: bool  # generate one additional greedy rollout per prompt
    uses_shared_prompts: bool  # prompts are computed once for all their samples, if the models pass a self-check
    skips_rows_without_advantage: bool  # rows with zero advantage have no gradient; the policy update skips them
    sampling: Sampling  # sampling parameters of training rollouts
    memory: MemoryPlan | None = None  # of one device; None until the model's configuration has been read

    @property
    def padded(self) -> bool:
        """Whether micro-batches are padded to their longest row."""
        return self.model.attention == "padded"

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while the next iteration runs."""
        return self.memory is None or self.memory.saves_in_background


def resolve_plan(config: Config, machine: Machine, notices: list[str]) -> Plan:
    """Resolve the `auto` values of a configuration that is checked and whose user modules are loaded. Appends to
    `notices`."""
    actor, algorithm, rollout = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.rollout
    estimator, trainer = get_estimator(algorithm.adv_estimator), config.trainer
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    device = resolve_device(trainer.device, machine.num_gpus)
    model = resolve_model(config.actor_rollout_ref.model, device, config.data.max_length)
    num_trajectories = config.trajectories_per_batch * (max(1, trainer.max_staleness) if trainer.async_mode else 1)
    rollout = resolve_rollout(rollout, model, device, count_engine_gpus(rollout, trainer), num_trajectories)
    placement = make_placement(config, rollout, device, machine, has_critic="values" in estimator.needs)
    return Plan(
        placement=placement,
        model=model,
        rollout=rollout,
        actor=actor,
        critic=config.critic,
        max_tokens=_get_max_tokens(actor),
        needs_old_logprobs=algorithm.use_kl_in_reward
        or policy_loss.select_tokens is not None
        or config.teacher.uses_sampled_tokens,
        uses_rollout_logprobs=algorithm.rollout_correction.bypass or policy_loss.anchor == "rollout",
        greedy_baseline="greedy_rewards" in estimator.needs,
        uses_shared_prompts=_decide_shared_prompts(config, notices),
        skips_rows_without_advantage=can_skip_rows_without_advantage(config, policy_loss),
        sampling=Sampling(
            *(config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, trainer.seed),
            min_p=rollout.min_p,
            returns_kept_tokens=rollout.returns_kept_tokens,
        ),
    )


def can_skip_rows_without_advantage(config: Config, policy_loss: PolicyLoss) -> bool:
    """Return whether no loss term gives a gradient to rows with zero advantage, so that the update can skip them."""
    role = config.actor_rollout_ref
    other_terms = role.actor.use_kl_loss or role.actor.entropy_coeff or role.model.router_aux_loss_coef
    other_terms = other_terms or config.uses_trpo  # its KL is over all action tokens
    other_terms = other_terms or (config.teacher.uses_full_vocabulary and not config.teacher.uses_self_teacher)
    return not other_terms and policy_loss.zero_without_advantage


def _decide_shared_prompts(config: Config, notices: list[str]) -> bool:
    """Decide whether each prompt is computed once for all its samples (docs/parallelism.md).

    Router losses and router replay of mixture-of-experts models, and self-teachers do not support this.
    """
    role = config.actor_rollout_ref
    unsupported = {
        "model.router_aux_loss_coef": role.model.router_aux_loss_coef,
        "rollout.router_replay": role.rollout.router_replay,
        "teacher.self_teacher": config.teacher.uses_self_teacher,
    }
    used = next((name for name, value in unsupported.items() if value), None)
    problem = f"{used} needs a copy of the prompt for each sample" if used else None
    return decide_shared_prompts(SHARING, role.actor.use_prefix_grouper, problem, notices.append)


def _get_max_tokens(actor: Actor) -> int:
    return get_max_tokens(actor.ppo_max_token_len_per_gpu) * actor.ulysses_sequence_parallel_size


def add_memory_plan(plan: Plan, config: Config, machine: Machine, notices: list[str]) -> Plan:
    """Add the estimate of device memory. Choose kernels, gradient checkpointing, token budget, the ranks that share a
    model and the engines' share of a GPU. Reads the models' config.json. If the run cannot fit, `memory.problem` of the
    returned plan says why. Appends to `notices`."""

    def resolve(settings: Settings) -> Config:
        changed = replace_values(config, settings)
        resolved, model = resolve_plan(changed, machine, []), changed.actor_rollout_ref.model
        chosen = {"model": choose_kernels(resolved.model, model), "rollout": resolved.rollout}
        return replace_values(changed, {f"actor_rollout_ref.{name}": section for name, section in chosen.items()})

    device, is_auto = plan.placement.device, config.actor_rollout_ref.model.enable_gradient_checkpointing == "auto"
    fitted, memory, more = fit_to_memory_if_measurable(resolve({}), device, machine, is_auto, resolve=resolve)
    notices += more
    chosen = fitted.actor_rollout_ref
    return replace(
        plan,
        model=chosen.model,
        rollout=chosen.rollout,
        actor=chosen.actor,
        critic=fitted.critic,
        max_tokens=_get_max_tokens(chosen.actor),
        memory=memory,
    )
