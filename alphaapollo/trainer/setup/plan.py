"""Resolve the `auto` values of a training configuration and check all combinations of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss
from alphaapollo.batching.shared_prompts import decide_shared_prompts
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.keys import format_value, get_value, list_keys
from alphaapollo.config.load import NO_USER_SETTINGS, UserSettings
from alphaapollo.config.resolve import (
    count_engine_gpus,
    get_resolved,
    has_worker_processes,
    resolve_device,
    resolve_model,
    resolve_rollout,
)
from alphaapollo.config.schema import Actor, ActorRolloutRef, Config, Critic, CustomRewardFunction, Model, Rollout
from alphaapollo.controller.placement import Machine, Placement, make_placement
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.launch.input_checks import collect_environment_notices, find_environment_spec
from alphaapollo.launch.model_requirements import choose_kernels
from alphaapollo.planning.memory_fit import fit_to_memory_if_measurable, get_max_tokens
from alphaapollo.planning.memory_plan import MemoryPlan
from alphaapollo.planning.plan_table import (
    describe_checkpoint_schedule,
    describe_memory_peak,
    describe_sharding,
    summarize_memory,
)
from alphaapollo.rewards import zero_reward
from alphaapollo.rollout.worker import RolloutWorker, RolloutWorkerConfig
from alphaapollo.runs.resume import StartPoint
from alphaapollo.runs.run_history import RunPlan
from alphaapollo.trainer.setup.combinations import check_setting_combinations
from alphaapollo.trainer.step.reward_model_scorer import make_reward_model_settings
from alphaapollo.types import Sampling
from alphaapollo.utils.user_module import load_user_module
from alphaapollo.weight_sync.transport import Transport, choose_transport
from alphaapollo.workers.builders import build_policy_worker, make_critic_model_section, make_teacher_model_sections
from alphaapollo.workers.critic import CriticWorker, RewardModelWorker
from alphaapollo.workers.policy import PolicyWorkerConfig

if TYPE_CHECKING:
    from alphaapollo.trainer.setup.inputs import TrainingInputs

SHARING = "actor_rollout_ref.actor.use_prefix_grouper"


@dataclass(frozen=True)
class Plan:
    """Settings of a training run, after all `auto` values are resolved."""

    placement: Placement
    model: Model  # settings of all trained models, with dtype and attention resolved
    rollout: Rollout  # rollout section, with dtype and number of engines resolved
    actor: Actor  # actor section, with the ranks that share a copy of the model resolved
    critic: Critic  # likewise
    max_tokens: int  # token budget of a micro-batch, over the ranks that share its rows
    needs_old_logprobs: bool  # the driver needs old log-probs before the update
    uses_rollout_logprobs: bool  # the old log-probs are those of the rollout engine; the trainer computes none
    greedy_baseline: bool  # generate one additional greedy rollout per prompt
    uses_shared_prompts: bool  # prompts are computed once for all their samples, if the models pass a self-check
    skips_rows_without_advantage: bool  # rows with zero advantage have no gradient; the policy update skips them
    sampling: Sampling  # sampling parameters of training rollouts
    presets: tuple[str, ...]  # presets chosen on the command line, e.g. algorithm=dapo
    memory: MemoryPlan | None  # memory of one device; None until the model's configuration has been read
    notices: list[str]

    @property
    def padded(self) -> bool:
        """Whether micro-batches are padded to their longest row."""
        return self.model.attention == "padded"

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while the next iteration runs."""
        return self.memory is None or self.memory.saves_in_background


def make_plan(config: Config, machine: Machine, user_settings: UserSettings = NO_USER_SETTINGS) -> Plan:
    """Check the configuration and resolve its `auto` values. Raises ValueError for invalid settings."""
    notices = check_config_and_get_notices(config, machine.num_gpus, machine.num_cores, user_settings.keys)
    notices += user_settings.notices
    algorithm = config.algorithm
    if algorithm.custom_module:
        load_user_module(algorithm.custom_module, "algorithm.custom_module")
    estimator = get_estimator(algorithm.adv_estimator)
    policy_loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    notices += collect_environment_notices(config, find_environment_spec(config.env))
    notices += check_setting_combinations(config, estimator, policy_loss)
    return resolve_plan(config, machine, notices, user_settings.presets)


def resolve_plan(config: Config, machine: Machine, notices: list[str], presets: tuple[str, ...] = ()) -> Plan:
    """Resolve the `auto` values of a configuration that is already checked and whose user modules are loaded."""
    actor, algorithm, rollout = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.rollout
    estimator = get_estimator(algorithm.adv_estimator)
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    trainer = config.trainer
    device = resolve_device(trainer.device, machine.num_gpus)
    model = resolve_model(config.actor_rollout_ref.model, device, config.data.max_length)
    at_a_time = config.trajectories_per_batch * (max(1, trainer.max_staleness) if trainer.async_mode else 1)
    rollout = resolve_rollout(rollout, model, device, count_engine_gpus(rollout, trainer), at_a_time)
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
            config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, trainer.seed
        ),
        presets=presets,
        memory=None,
        notices=notices,
    )


def can_skip_rows_without_advantage(config: Config, policy_loss: PolicyLoss) -> bool:
    """Whether sequences with zero advantage get no gradient from any loss term, so the policy update can skip them."""
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
    experts = {
        "model.router_aux_loss_coef": role.model.router_aux_loss_coef,
        "rollout.router_replay": role.rollout.router_replay,
        "teacher.self_teacher": config.teacher.uses_self_teacher,
    }
    problem = next(
        (f"{name} needs a copy of the prompt for each sample" for name, value in experts.items() if value), None
    )
    return decide_shared_prompts(SHARING, role.actor.use_prefix_grouper, problem, notices.append)


def _get_max_tokens(actor: Actor) -> int:
    return get_max_tokens(actor.ppo_max_token_len_per_gpu) * actor.ulysses_sequence_parallel_size


def add_memory_plan(plan: Plan, config: Config, machine: Machine) -> Plan:
    """Add the estimate of device memory. Choose kernels, gradient checkpointing, token budget, the ranks that share a
    model and the engines' share of a GPU. Reads the models' config.json. If the run cannot fit, `memory.problem` of the
    returned plan says why."""
    role = config.actor_rollout_ref
    plan = replace(plan, model=choose_kernels(plan.model, role.model))
    resolved = role.model_copy(update={"model": plan.model, "rollout": plan.rollout})
    config = config.model_copy(update={"actor_rollout_ref": resolved})
    may_choose = role.model.enable_gradient_checkpointing == "auto"
    fitted, memory, notices = fit_to_memory_if_measurable(config, plan.placement.device, machine, may_choose)
    chosen = fitted.actor_rollout_ref
    return replace(
        plan,
        model=chosen.model,
        rollout=chosen.rollout,
        actor=chosen.actor,
        critic=fitted.critic,
        max_tokens=_get_max_tokens(chosen.actor),
        memory=memory,
        notices=plan.notices + notices,
    )


def make_run_plan(plan: Plan, inputs: TrainingInputs, start: StartPoint, config: Config) -> RunPlan:
    """Describe model, data, sizes and schedules of a run, its memory, and all notices."""
    settings = (
        _describe_algorithm_and_data(plan, inputs, config)
        | _describe_iterations(plan, inputs, start, config)
        | plan.placement.describe_roles()
    )
    notices = [*plan.notices, *inputs.notices, *start.describe()]
    return RunPlan(settings, summarize_memory(plan.memory), notices, data=inputs.findings)


def _describe_algorithm_and_data(plan: Plan, inputs: TrainingInputs, config: Config) -> dict[str, str]:
    """Return the table rows (label -> text) about algorithm, model, data and reward."""
    actor = config.actor_rollout_ref.actor
    dtypes = plan.model.dtype + ", Liger's kernels" * (plan.model.use_liger is True)
    dtypes += f", engines {plan.rollout.dtype}" if plan.rollout.dtype != plan.model.dtype else ""
    graded = "the functions of the rows' data sources" if inputs.has_reward_function else "none"
    rows = {
        "preset": ", ".join(plan.presets) or "none",
        "algorithm": f"{config.algorithm.adv_estimator}, loss {actor.policy_loss.loss_mode}, {actor.loss_agg_mode}",
        "model": f"{config.actor_rollout_ref.model.path}, {dtypes}{plan.model.lora_summary}",
        "data": f"{len(inputs.prompts)} training prompts, {len(inputs.val_prompts)} for validation",
        "files": format_value(config.data.train_files),
        "sampler": (config.data.sampler if config.data.shuffle else "none: the order of the files")
        + f", {len(config.data.curriculum.stages)} stages" * bool(config.data.curriculum.stages),
        **{f"data: {name}": described for name, described in inputs.sources.items()},
        "stops": inputs.stops,
        "env": config.env.env_name,
        "reward": config.custom_reward_function.path or graded,
    }
    if inputs.reward_model_tokenizer:
        rows["reward"] += f" + {inputs.reward_model_tokenizer.describe_reward(config.reward_model)}"
    for section in ("algorithm", "actor_rollout_ref.actor", "teacher", "env", "reward"):
        keys = (key for name, key in list_keys(Config).items() if name.startswith(f"{section}."))
        values = {key.name: get_value(config, key.name) for key in keys if get_value(config, key.name) != key.default}
        changed = [f"{key[len(section) + 1 :]}={format_value(value)[:80]}" for key, value in values.items()]
        rows[section] = ", ".join([*filter(None, [rows.get(section)]), *changed])
    return {label: text for label, text in rows.items() if text}


def _describe_iterations(plan: Plan, inputs: TrainingInputs, start: StartPoint, config: Config) -> dict[str, str]:
    """Return the table rows (label -> text) about batch sizes, lengths and schedules."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    prompts, samples, steps = config.data.train_batch_size, config.group_size, config.steps_per_iteration
    staleness = f"at most {trainer.max_staleness} publishes old, async_mode {trainer.async_mode}"
    rows = {"samples": staleness} if trainer.async_mode else {}
    validation = ["before training"] * trainer.val_before_train
    validation += [f"every {trainer.test_freq} iterations", "at the end"] if trainer.test_freq > 0 else []
    return rows | {
        "iterations": f"{inputs.goal.max_steps}" + f", {start.step} of them done" * bool(start.step),
        "an iteration": f"{prompts} prompts x {samples} samples = {config.trajectories_per_batch} trajectories",
        "mini-batch": f"{min(actor.ppo_mini_batch_size, config.trajectories_per_batch)} trajectories over all ranks",
        "micro-batch": f"at most {plan.max_tokens} tokens" + ", padding counted" * plan.padded,
        "prompts": "computed once for all their samples" if plan.uses_shared_prompts else "computed for each sample",
        "optimizer steps an iteration": f"{steps} ({config.num_mini_batches} mini-batches x {actor.ppo_epochs} epochs)",
        "learning rate": f"{actor.optim.lr:g}, {actor.optim.warmup_style}"
        + f"; critic {config.critic.optim.lr:g}, {config.critic.optim.warmup_style}" * plan.placement.has_critic,
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
        "validation": (inputs.val_prompts and ", ".join(validation)) or "none",
        "checkpoints": describe_checkpoint_schedule(trainer.save_freq, "iterations", plan.memory, trainer.keep_best),
        "trackers": ", ".join(trainer.logger),
        "memory": describe_memory_peak(plan.memory),
        "gradient checkpointing": "on" if plan.model.enable_gradient_checkpointing else "off",
        "data-parallel degree": f"{plan.placement.data_parallel_size}",
        **describe_sharding(plan.memory, plan.placement.num_ranks),
    }


def make_worker_specs(
    config: Config,
    plan: Plan,
    run_id: str,
    total_iterations: int,
    has_reward_function: bool,
    policy_steps: int | None = None,
) -> WorkerSpecs:
    """Describe how to build the training ranks and the rollout workers of a run.

    total_iterations: for learning rate schedules. has_reward_function: also True if the environment gives the reward.
    policy_steps: optimizer steps of the policy; None: those of the iterations.
    """
    placement = plan.placement
    chosen = {"model": plan.model, "rollout": plan.rollout, "actor": plan.actor}
    role = config.actor_rollout_ref.model_copy(update=chosen)
    has_processes = has_worker_processes(config.trainer, placement.num_engines)
    receives_buckets = role.rollout.name == "vllm" and has_processes
    serves_adapters = role.rollout.lora == "adapter"
    transport = Transport(
        kind=choose_transport(placement.device, placement.colocate, receives_buckets, serves_adapters),
        dtype=role.rollout.dtype,
        shared_folder=f"/dev/shm/alphaapollo-{run_id}",
        num_engine_ranks=placement.num_engines * placement.tensor_parallel,
    )
    custom_reward = config.custom_reward_function
    if not has_reward_function:
        custom_reward = CustomRewardFunction(path=zero_reward.__file__, name=zero_reward.zero_reward.__name__)
    groups = config.algorithm.filter_groups
    engines = RolloutWorkerConfig(
        model=role.model,
        rollout=role.rollout,
        env=config.env,
        data=config.data,
        reward=config.reward,
        custom_reward=custom_reward,
        device=placement.device,
        self_teacher=config.teacher.self_teacher if config.teacher.uses_self_teacher else None,
        run_dir=str(config.trainer.folder.resolve()),
        transport=transport.kind,
        shared_memory=transport.shared_folder,
        serves_suites=bool(config.trainer.val_suites),
        max_steps=total_iterations,
        needs_components="components" in get_estimator(config.algorithm.adv_estimator).needs
        or (groups.enable and groups.metric not in ("accuracy", "reward")),
    )
    return WorkerSpecs(
        placement=placement,
        run_id=run_id,
        rank_builders=_make_rank_builders(config, plan, role, transport, total_iterations, policy_steps),
        engine_builder=partial(RolloutWorker, engines),
        samples_in_flight=2 * get_resolved(role.rollout.max_num_seqs),
        cleanup_folders=[transport.shared_folder],
    )


def _make_rank_builders(
    config: Config,
    plan: Plan,
    section: ActorRolloutRef,
    transport: Transport,
    total_iterations: int,
    policy_steps: int | None,
) -> dict[str, Callable[..., object]]:
    """Return the functions that build the workers of one training rank: policy, and critic and reward model if used."""
    policy = PolicyWorkerConfig(
        model=section.model,
        actor=section.actor,
        ref=section.ref,
        needs_reference=config.needs_reference,
        optimizer_steps=policy_steps or config.count_policy_optimizer_steps(total_iterations),
        temperature=section.rollout.temperature,
        correction=config.algorithm.rollout_correction,
        seed=config.trainer.seed,
        engine_lora_form=section.rollout.lora,
        saves_in_background=plan.saves_in_background,
        teacher=config.teacher,
        teacher_models=make_teacher_model_sections(section.model, config.teacher),
    )
    build = partial(build_policy_worker, policy, transport, config.algorithm.custom_module)
    builders: dict[str, Callable[..., object]] = {"policy": build}
    if plan.placement.has_critic:
        builders["critic"] = partial(
            CriticWorker,
            make_critic_model_section(section.model, plan.critic),
            plan.critic,
            optimizer_steps=config.count_critic_optimizer_steps(total_iterations),
            seed=config.trainer.seed,
            saves_in_background=plan.saves_in_background,
        )
    if plan.placement.has_reward_model:
        scorer = make_reward_model_settings(config.reward_model, plan.model)
        builders["reward model"] = partial(RewardModelWorker, scorer, config.reward_model.model.fsdp_config)
    return builders
