"""Rows of the plan that main_ppo prints before it starts: label -> text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphaapollo.config.keys import format_value, get_value, list_keys
from alphaapollo.config.schema import Config
from alphaapollo.planning.plan_table import describe_checkpoint_schedule, describe_memory_peak, describe_sharding

if TYPE_CHECKING:
    from alphaapollo.trainer.setup.preparation import RlPreparation


def describe_algorithm_and_data(run: RlPreparation) -> dict[str, str]:
    """Return the table rows (label -> text) about algorithm, model, data and reward."""
    config, plan, actor = run.config, run.plan, run.config.actor_rollout_ref.actor
    dtypes = plan.model.dtype + ", Liger's kernels" * (plan.model.use_liger is True)
    dtypes += f", engines {plan.rollout.dtype}" if plan.rollout.dtype != plan.model.dtype else ""
    graded = "the functions of the rows' data sources" if run.has_reward_function else "none"
    rows = {
        "preset": ", ".join(run.user_settings.presets) or "none",
        "algorithm": f"{config.algorithm.adv_estimator}, loss {actor.policy_loss.loss_mode}, {actor.loss_agg_mode}",
        "model": f"{config.actor_rollout_ref.model.path}, {dtypes}{plan.model.lora_summary}",
        "data": f"{len(run.prompts)} training prompts, {len(run.val_prompts)} for validation",
        "files": format_value(config.data.train_files),
        "sampler": (config.data.sampler if config.data.shuffle else "none: the order of the files")
        + f", {len(config.data.curriculum.stages)} stages" * bool(config.data.curriculum.stages),
        **{f"data: {name}": described for name, described in run.sources.items()},
        "stops": run.renderer.describe_stops(),
        "env": config.env.env_name,
        "reward": config.custom_reward_function.path or graded,
    }
    if run.reward_model_tokenizer:
        rows["reward"] += f" + {run.reward_model_tokenizer.describe_reward(config.reward_model)}"
    for section in ("algorithm", "actor_rollout_ref.actor", "teacher", "env", "reward"):
        keys = (key for name, key in list_keys(Config).items() if name.startswith(f"{section}."))
        values = {key.name: get_value(config, key.name) for key in keys if get_value(config, key.name) != key.default}
        changed = [f"{key[len(section) + 1 :]}={format_value(value)[:80]}" for key, value in values.items()]
        rows[section] = ", ".join([*filter(None, [rows.get(section)]), *changed])
    return {label: text for label, text in rows.items() if text}


def describe_iterations(run: RlPreparation) -> dict[str, str]:
    """Return the table rows (label -> text) about batch sizes, lengths and schedules."""
    config, plan = run.config, run.plan
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    prompts, samples, steps = config.data.train_batch_size, config.group_size, config.steps_per_iteration
    staleness = f"at most {trainer.max_staleness} publishes old, async_mode {trainer.async_mode}"
    rows = {"samples": staleness} if trainer.async_mode else {}
    validation = ["before training"] * trainer.val_before_train
    validation += [f"every {trainer.test_freq} iterations", "at the end"] if trainer.test_freq > 0 else []
    return rows | {
        "iterations": f"{run.goal.max_steps}" + f", {run.start.step} of them done" * bool(run.start.step),
        "an iteration": f"{prompts} prompts x {samples} samples = {config.trajectories_per_batch} trajectories",
        "mini-batch": f"{min(actor.ppo_mini_batch_size, config.trajectories_per_batch)} trajectories over all ranks",
        "micro-batch": f"at most {plan.max_tokens} tokens" + ", padding counted" * plan.padded,
        "prompts": "computed once for all their samples" if plan.uses_shared_prompts else "computed for each sample",
        "optimizer steps an iteration": f"{steps} ({config.num_mini_batches} mini-batches x {actor.ppo_epochs} epochs)",
        "learning rate": f"{actor.optim.lr:g}, {actor.optim.warmup_style}"
        + f"; critic {config.critic.optim.lr:g}, {config.critic.optim.warmup_style}" * plan.placement.has_critic,
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
        "validation": (run.val_prompts and ", ".join(validation)) or "none",
        "checkpoints": describe_checkpoint_schedule(trainer.save_freq, "iterations", plan.memory, trainer.keep_best),
        "trackers": ", ".join(trainer.logger),
        "memory": describe_memory_peak(plan.memory),
        "gradient checkpointing": "on" if plan.model.enable_gradient_checkpointing else "off",
        "data-parallel degree": f"{plan.placement.data_parallel_size}",
        **describe_sharding(plan.memory, plan.placement.num_ranks),
    }
