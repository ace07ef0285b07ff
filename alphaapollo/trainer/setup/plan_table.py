"""Describe the plan of a training run, which is printed before it starts."""

from __future__ import annotations

from alphaapollo.algorithms.policy_losses.base import CLIP
from alphaapollo.config.schema import Config, Env, Optimizer
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.planning.plan_table import describe_checkpoint_schedule, describe_memory_peak, summarize_memory
from alphaapollo.runs.resume import StartPoint
from alphaapollo.runs.run_history import RunPlan
from alphaapollo.trainer.setup.inputs import TrainingInputs
from alphaapollo.trainer.setup.plan import Plan


def make_run_plan(plan: Plan, inputs: TrainingInputs, start: StartPoint, config: Config) -> RunPlan:
    """Describe model, data, sizes and schedules of a run, its memory, and all notices."""
    settings = (
        _describe_algorithm_and_data(plan, inputs, config)
        | _describe_iterations(plan, inputs, start, config)
        | plan.placement.describe_roles()
    )
    return RunPlan(settings, summarize_memory(plan.memory), [*plan.notices, *inputs.notices, *start.describe()])


def _describe_algorithm_and_data(plan: Plan, inputs: TrainingInputs, config: Config) -> dict[str, str]:
    """Return the table rows (label -> text) about algorithm, model, data and reward."""
    actor, algorithm, teacher = config.actor_rollout_ref.actor, config.algorithm, config.teacher
    kl = [f"{actor.kl_loss_coef} x {actor.kl_loss_type} in the loss"] * actor.use_kl_loss
    kl += [f"{algorithm.kl_ctrl.kl_coef} x {algorithm.kl_penalty} in the reward"] * algorithm.use_kl_in_reward
    dtypes = f"{plan.model.dtype}{plan.dtype_explanation}" + ", Liger's kernels" * (plan.model.use_liger is True)
    dtypes += f", engines {plan.rollout.dtype}" if plan.rollout.dtype != plan.model.dtype else ""
    parts = [algorithm.adv_estimator, f"loss {actor.policy_loss.loss_mode}", actor.loss_agg_mode]
    parts += [f"{name} {value:g}" for name in CLIP if (value := getattr(actor, name)) is not None]
    parts += ["dynamic sampling"] * algorithm.filter_groups.enable
    parts += ["overlong penalty"] * algorithm.overlong_penalty.enable
    rows = {
        "preset": ", ".join(plan.presets) or "none",
        "algorithm": ", ".join(parts),
        "KL to the reference": " + ".join(kl) or "none",
        "model": f"{config.actor_rollout_ref.model.path}, {dtypes}{plan.model.lora_summary}",
        "data": f"{len(inputs.prompts)} training prompts, {len(inputs.val_prompts)} for validation",
        **{f"data: {name}": described for name, described in inputs.sources.items()},
        "stops": inputs.stops,
        "environment": _describe_environment(config.env),
        "reward": _describe_reward(config) if inputs.has_reward_function else "none",
    }
    if teacher.divergence:
        beta = f" (beta {teacher.beta:g})" if teacher.divergence == "jsd" else ""
        top = f" over the top {teacher.top_k} tokens" if teacher.top_k and teacher.uses_full_vocabulary else ""
        names = ", ".join(one.path or f"{one.name} ({one.base_url})" for one in teacher.models_by_key.values())
        names = f"the policy with {teacher.self_teacher.context}" if teacher.uses_self_teacher else names
        rows["teacher"] = f"{teacher.coef:g} x {teacher.divergence}{beta}{top}, from {names}"
    if inputs.reward_model_tokenizer:
        scores = inputs.reward_model_tokenizer.describe_reward(config.reward_model)
        rows["reward"] = f"{rows['reward']} + {scores}" if inputs.has_reward_function else scores
    return rows


def _describe_iterations(plan: Plan, inputs: TrainingInputs, start: StartPoint, config: Config) -> dict[str, str]:
    """Return the table rows (label -> text) about batch sizes, lengths and schedules."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    prompts, samples, steps = config.data.train_batch_size, config.group_size, config.steps_per_iteration
    rates = [_describe_learning_rate(actor.optim)]
    if plan.placement.has_critic:
        rates.append(f"critic {_describe_learning_rate(config.critic.optim)}")
    rows = {"ahead of an iteration": _describe_async_mode(config)} if trainer.async_mode else {}
    validation = ["before training"] * trainer.val_before_train
    validation += [f"every {trainer.test_freq} iterations", "at the end"] if trainer.test_freq > 0 else []
    return rows | {
        "iterations": f"{inputs.goal.max_steps}" + f", {start.step} of them done" * bool(start.step),
        "an iteration": f"{prompts} prompts x {samples} samples = {config.trajectories_per_batch} trajectories",
        "mini-batch": f"{min(actor.ppo_mini_batch_size, config.trajectories_per_batch)} trajectories over all ranks",
        "micro-batch": f"at most {plan.max_tokens} tokens" + ", padding counted" * plan.padded,
        "prompts": "computed once for all their samples" if plan.uses_shared_prompts else "computed for each sample",
        "optimizer steps an iteration": f"{steps} ({config.num_mini_batches} mini-batches x {actor.ppo_epochs} epochs)",
        "learning rate": "; ".join(rates),
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
        "validation": (inputs.val_prompts and ", ".join(validation)) or "none",
        "checkpoints": describe_checkpoint_schedule(trainer.save_freq, "iterations", plan.memory),
        "memory": describe_memory_peak(plan.memory),
        "gradient checkpointing": "on" if plan.model.enable_gradient_checkpointing else "off",
        "data-parallel degree": f"{plan.placement.data_parallel_size}",
    }


def _describe_async_mode(config: Config) -> str:
    trainer, correction = config.trainer, config.algorithm.rollout_correction
    groups = config.data.train_batch_size * trainer.max_staleness
    return (
        f"up to {groups} groups, {trainer.max_staleness} publishes old at most; async_mode {trainer.async_mode}, "
        f"correction {correction.method} by {correction.level}"
    )


def _describe_environment(env: Env) -> str:
    if env.env_name == "agent":
        return f"agent, {env.agent.path or env.agent.command}"
    list_tools = get_environment_spec(env.env_name).tools
    tools = [*(list_tools(env) if list_tools else []), *(f"tools of the MCP server {name}" for name in env.mcp_servers)]
    turns = "one turn" if env.max_steps == 1 or env.env_name == "single_turn" else f"at most {env.max_steps} turns"
    return f"{env.env_name}, {turns}" + (f", tools {', '.join(tools)}" if tools else "")


def _describe_reward(config: Config) -> str:
    environment, custom = get_environment_spec(config.env.env_name), config.custom_reward_function
    if custom.path:
        task = f"{', '.join(custom.names)} in {custom.path}"
    elif environment.is_graded(config.env):
        task = "the functions of the rows' data sources"
    else:
        task = "the environment's reward"
    parts = [f"{weight:g} x {name}" for name, weight in config.reward.components.items() if name != "task"]
    return " + ".join([f"{config.reward.components.get('task', 1.0):g} x {task}" if parts else task, *parts])


def _describe_learning_rate(optim: Optimizer) -> str:
    if optim.lr_warmup_steps > 0:
        warmup = f", {optim.lr_warmup_steps} steps of warm-up"
    elif optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0:
        warmup = f", the first {optim.lr_warmup_steps_ratio:.0%} of the steps warm-up"
    else:
        warmup = ""
    return f"{optim.lr:g}, {optim.warmup_style}{warmup}"
