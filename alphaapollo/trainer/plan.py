"""Everything that can be known and refused before a worker starts: the checks across rooms, and the plan they yield.

Config + Machine -> checks -> Inputs (prompts, read and measured) and Plan (sizes, layout) -> the table a run prints
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console as Terminal
from rich.table import Table

from alphaapollo.algorithms.advantages import Estimator, get_estimator
from alphaapollo.algorithms.custom import load_custom_module
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.check import check
from alphaapollo.config.schema import Config, Env
from alphaapollo.controller.placement import Layout, Machine, make_layout
from alphaapollo.data.prompts import load_prompts
from alphaapollo.data.rendering import Renderer, fit_prompts, load_tokenizer
from alphaapollo.environments import check_environment
from alphaapollo.environments.toolbox import make_toolbox
from alphaapollo.rewards.base import check_gradable, check_judge
from alphaapollo.rewards.components import check_components
from alphaapollo.rewards.custom import check_reward_function
from alphaapollo.trainer.combinations import check_combinations
from alphaapollo.trainer.shaping import check_length_budgets
from alphaapollo.types import Prompt, Sampling


@dataclass(frozen=True)
class Plan:
    """The resolved sizes of a run."""

    layout: Layout
    estimator: Estimator
    prompts: int  # an iteration
    group_size: int
    mini_batches: int  # of one full batch
    optimiser_steps: int  # an iteration
    dtype: str  # of the trainer's forward and backward: float32 | bfloat16
    padded: bool  # micro-batches are padded to their longest row
    needs_reference: bool
    kl_in_reward: bool
    greedy_baseline: bool  # each prompt is also played once greedily
    needs_ref_columns: bool  # the reference's log-probs (the full KL compares distributions inside the update instead)
    sampling: Sampling  # of training rollouts
    folder: Path  # of the run
    notices: list[str]

    @property
    def trajectories(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True)
class Inputs:
    """The data of a run, read, checked and held against the length limits."""

    prompts: list[Prompt]
    val_prompts: list[Prompt]
    total_steps: int  # iterations
    probe: list[int]  # token ids of the first prompt, for the proof of weight sync
    notices: list[str]


def make_plan(config: Config, machine: Machine) -> Plan:
    """Resolve every automatic choice. Raises ValueError for what cannot work, before anything starts."""
    notices = check(config, machine.num_gpus, machine.num_cores)
    actor, algorithm, rollout = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.rollout
    if algorithm.custom_module:
        load_custom_module(algorithm.custom_module)
    estimator = get_estimator(algorithm.adv_estimator)
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    if config.env.custom_module:
        load_custom_module(config.env.custom_module, "env.custom_module")
    check_environment(config.env)
    make_toolbox(config.env)  # a missing index, an unknown tool
    check_components(config.reward.components, config.reward.required)
    notices += check_combinations(config, estimator, policy_loss)
    critic = "values" in estimator.needs
    layout = make_layout(config, machine, critic)
    trajectories = config.data.train_batch_size * config.group_size
    mini_batches = math.ceil(trajectories / actor.ppo_mini_batch_size)
    dtype = config.actor_rollout_ref.model.dtype
    attention = config.actor_rollout_ref.model.attention
    kl_on_columns = actor.use_kl_loss and actor.kl_loss_type != "full"
    return Plan(
        layout=layout,
        estimator=estimator,
        prompts=config.data.train_batch_size,
        group_size=config.group_size,
        mini_batches=mini_batches,
        optimiser_steps=mini_batches * actor.ppo_epochs,
        dtype=dtype if dtype != "auto" else ("float32" if layout.device == "cpu" else "bfloat16"),
        padded=attention == "padded" or (attention == "auto" and layout.device == "cpu"),
        needs_reference=actor.use_kl_loss or algorithm.use_kl_in_reward,
        kl_in_reward=algorithm.use_kl_in_reward,
        greedy_baseline="greedy_rewards" in estimator.needs,
        needs_ref_columns=kl_on_columns or algorithm.use_kl_in_reward,
        sampling=Sampling(
            config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, config.trainer.seed
        ),
        folder=Path(config.trainer.output_dir) / config.trainer.project_name / config.trainer.experiment_name,
        notices=notices,
    )


def read_inputs(config: Config) -> Inputs:
    """Read tokenizer and data, and try the reward function's import: what is wrong with them shows now."""
    data, model = config.data, config.actor_rollout_ref.model
    renderer = Renderer(load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code))
    notices: list[str] = []
    check_template(config.env, renderer)

    def read(files: str | list[str], what: str) -> list[Prompt]:
        prompts, lengths = fit_prompts(
            load_prompts(files, data.prompt_key), renderer, data.max_prompt_length, data.truncation
        )
        if lengths.too_long:
            done = "left out" if data.truncation == "drop" else f"cut ({data.truncation})"
            notices.append(
                f"{what}: {lengths.too_long} of {lengths.total} prompts are over data.max_prompt_length: {done}."
            )
        return prompts

    prompts = read(data.train_files, "data.train_files")
    val_prompts = read(data.val_files, "data.val_files") if data.val_files else []
    if config.algorithm.length_budget.mode:
        check_length_budgets(prompts)
    custom = config.custom_reward_function
    if custom.path:
        check_reward_function(custom.path, custom.name)
    elif check_environment(config.env).graded:
        check_gradable([*prompts, *val_prompts])
        check_judge({prompt.data_source for prompt in [*prompts, *val_prompts]}, config.reward)
    return Inputs(
        prompts,
        val_prompts,
        total_steps=config.trainer.total_training_steps
        or max(1, len(prompts) * config.trainer.total_epochs // data.train_batch_size),
        probe=renderer.prompt_ids(prompts[0].content)[:64],
        notices=notices,
    )


def check_template(env: Env, renderer: Renderer) -> None:
    """ValueError: episodes of several turns would not be what the chat template makes of them."""
    if env.max_steps > 1 and env.context == "append" and renderer.tokenizer.chat_template and renderer.rewrites_history:
        raise ValueError(
            "the chat template shows earlier answers otherwise than they were given (it drops their thoughts, say), so "
            "the model would be trained on chats that it never meets. Set env.context=memory (a fresh prompt every "
            "turn), or give the tokenizer a chat_template that leaves earlier turns alone."
        )


def print_plan(plan: Plan, inputs: Inputs, config: Config, terminal: Terminal) -> None:
    """The numbers that people get wrong, before they cost anything."""
    actor = config.actor_rollout_ref.actor
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=str(plan.folder), title_justify="left")
    per_step = f"{plan.prompts} prompts x {plan.group_size} samples = {plan.trajectories} trajectories"
    steps = f"{plan.optimiser_steps} ({plan.mini_batches} mini-batches x {actor.ppo_epochs} epochs)"
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
        "iterations": f"{inputs.total_steps}",
        "an iteration": per_step,
        "mini-batch": f"{actor.ppo_mini_batch_size} trajectories over all ranks",
        "micro-batch": f"at most {actor.ppo_max_token_len_per_gpu} tokens a rank" + ", padding counted" * plan.padded,
        "optimiser steps an iteration": steps,
        "data-parallel degree": f"{plan.layout.num_ranks // actor.ulysses_sequence_parallel_size}",
        "lengths": f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length} tokens",
    } | plan.layout.role_lines()
    for name, value in rows.items():
        table.add_row(name, value)
    terminal.print(table)
    for notice in [*plan.notices, *inputs.notices]:
        terminal.print(f"[yellow]note[/yellow] {notice}", highlight=False)
