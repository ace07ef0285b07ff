"""The sizes of a run, every automatic choice resolved and every combination checked, and the table that it prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console as Terminal
from rich.markup import escape
from rich.table import Table

from alphaapollo.algorithms.advantages import Estimator, get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.check import check
from alphaapollo.config.schema import Config
from alphaapollo.controller.placement import Layout, Machine, make_layout
from alphaapollo.startup.inputs import (
    environment_notices,
    find_environment,
)
from alphaapollo.startup.resume import Start
from alphaapollo.trainer.combinations import check_combinations
from alphaapollo.trainer.inputs import Inputs
from alphaapollo.types import Sampling
from alphaapollo.user_module import load_user_module


@dataclass(frozen=True)
class Plan:
    """The resolved sizes of a run."""

    layout: Layout
    estimator: Estimator
    dtype: str  # of the trainer's forward and backward: float32 | bfloat16
    padded: bool  # micro-batches are padded to their longest row
    needs_reference: bool
    kl_in_reward: bool
    needs_old_logprobs: bool  # before the update: the driver computes with them
    greedy_baseline: bool  # each prompt is also played once greedily
    needs_ref_columns: bool  # the reference's log-probs (the full KL compares distributions inside the update instead)
    sampling: Sampling  # of training rollouts
    folder: Path  # of the run
    notices: list[str]


def make_plan(config: Config, machine: Machine) -> Plan:
    """Resolve every automatic choice. Raises ValueError for what cannot work, before anything starts."""
    notices = check(config, machine.num_gpus, machine.num_cores)
    actor, algorithm, rollout = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.rollout
    if algorithm.custom_module:
        load_user_module(algorithm.custom_module, "algorithm.custom_module")
    estimator = get_estimator(algorithm.adv_estimator)
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    notices += environment_notices(config, find_environment(config.env))
    notices += check_combinations(config, estimator, policy_loss)
    critic = "values" in estimator.needs
    layout = make_layout(config, machine, critic)
    dtype = config.actor_rollout_ref.model.dtype
    attention = config.actor_rollout_ref.model.attention
    kl_on_columns = actor.use_kl_loss and actor.kl_loss_type != "full"
    return Plan(
        layout=layout,
        estimator=estimator,
        dtype=dtype if dtype != "auto" else ("float32" if layout.device == "cpu" else "bfloat16"),
        padded=attention == "padded" or (attention == "auto" and layout.device == "cpu"),
        needs_reference=actor.use_kl_loss or algorithm.use_kl_in_reward,
        kl_in_reward=algorithm.use_kl_in_reward,
        needs_old_logprobs=algorithm.use_kl_in_reward or policy_loss.choose is not None,
        greedy_baseline="greedy_rewards" in estimator.needs,
        needs_ref_columns=kl_on_columns or algorithm.use_kl_in_reward,
        sampling=Sampling(
            config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, config.trainer.seed
        ),
        folder=config.trainer.folder,
        notices=notices,
    )


def print_plan(plan: Plan, inputs: Inputs, start: Start, config: Config, terminal: Terminal) -> None:
    """The numbers that people get wrong, before they cost anything."""
    actor = config.actor_rollout_ref.actor
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=str(plan.folder), title_justify="left")
    prompts, samples = config.data.train_batch_size, config.group_size
    per_step = f"{prompts} prompts x {samples} samples = {config.trajectories} trajectories"
    steps = f"{config.optimiser_steps} ({config.mini_batches} mini-batches x {actor.ppo_epochs} epochs)"
    kl = " + ".join(
        text
        for on, text in (
            (actor.use_kl_loss, f"{actor.kl_loss_coef} x {actor.kl_loss_type} in the loss"),
            (plan.kl_in_reward, f"{config.algorithm.kl_ctrl.kl_coef} x {config.algorithm.kl_penalty} in the reward"),
        )
        if on
    )
    rows = {
        "algorithm": f"{plan.estimator.name}, loss {actor.policy_loss.loss_mode}, {actor.loss_agg_mode}",
        "KL to the reference": kl or "none",
        "model": f"{config.actor_rollout_ref.model.path}, {plan.dtype}",
        "data": f"{len(inputs.prompts)} training prompts, {len(inputs.val_prompts)} for validation",
        "iterations": f"{inputs.total_steps}" + f", {start.step} of them done" * bool(start.step),
        "an iteration": per_step,
        "mini-batch": f"{actor.ppo_mini_batch_size} trajectories over all ranks",
        "micro-batch": f"at most {actor.ppo_max_token_len_per_gpu} tokens a rank" + ", padding counted" * plan.padded,
        "optimiser steps an iteration": steps,
        "data-parallel degree": f"{plan.layout.num_ranks // actor.ulysses_sequence_parallel_size}",
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
    } | plan.layout.role_lines()
    if inputs.reader:
        rows["reward"] = inputs.reader.describe(config.reward_model, inputs.has_function)
    for name, value in rows.items():
        table.add_row(name, value)
    terminal.print(table)
    for notice in [*plan.notices, *inputs.notices, *start.lines()]:
        terminal.print(f"[yellow]note[/yellow] {escape(notice)}", highlight=False)
