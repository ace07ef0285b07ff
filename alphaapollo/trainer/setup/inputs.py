"""The data of a run: read, checked and held against the length limits before a worker starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.schema import Config, Data, Model
from alphaapollo.data.rendering import unread_arguments
from alphaapollo.data.stream import choose_rows
from alphaapollo.engines.vllm.user_arguments import check_engine_kwargs
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.builders import critic_model, teacher_model
from alphaapollo.launch.input_checks import (
    check_adapters,
    check_engine_split,
    check_experts,
    check_lengths,
    check_rewards,
    check_sequence_parallel,
    make_renderer,
    missing_cluster,
    read_prompts,
)
from alphaapollo.launch.try_environment import try_resets
from alphaapollo.models.folder_check import check_weights
from alphaapollo.trainer.progress import Goal
from alphaapollo.trainer.setup.named_rewards import check_named_rewards
from alphaapollo.trainer.setup.teacher_tokens import check_teacher_tokens
from alphaapollo.trainer.step.trained_reward import Reader, find_function, make_reader, scorer_model
from alphaapollo.trainer.step.trajectory_rewards import check_length_budgets
from alphaapollo.types import Prompt


@dataclass(frozen=True)
class Inputs:
    """The data of a run, read, checked and held against the length limits."""

    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: Goal
    probe: list[int]  # token ids of the first prompt, for the proof of weight sync
    reader: Reader | None  # of the reward model, where there is one
    has_function: bool  # a reward function, or the environment itself, gives a reward (else the reward model alone)
    notices: list[str]

    @property
    def total_steps(self) -> int:
        """Iterations, at most."""
        return self.goal.steps


def read_inputs(config: Config) -> Inputs:
    """Read tokenizer and data, and try the reward function's import and one reset: what is wrong shows now."""
    data, model = config.data, config.actor_rollout_ref.model
    check_engine_kwargs(config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout")
    check_adapters(model, "actor_rollout_ref.model")
    check_experts(model, "actor_rollout_ref.model", config.actor_rollout_ref.rollout.router_replay)
    check_adapters(critic_model(model, config.critic), "critic.model")
    for name, trained in _trained_models(config).items():
        check_weights(trained, name)
    check_lengths(model, config.actor_rollout_ref.rollout, data)
    check_engine_split(model, config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout")
    size, key = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size, "ulysses_sequence_parallel_size"
    check_sequence_parallel(size, config.trainer.num_ranks, f"actor_rollout_ref.actor.{key}", _trained_models(config))
    renderer = make_renderer(config.env, model, data.apply_chat_template_kwargs)
    told = check_teacher_tokens(config.teacher, model, renderer) if config.teacher.divergence else []
    prompts, notices = read_prompts(
        data.train_files, "data.train_files", renderer, data, partial(_chosen, data, data.train_max_samples)
    )
    notices += told
    notices += unread_arguments(data.apply_chat_template_kwargs, renderer.tokenizer)
    notices += filter(None, [missing_cluster(config.trainer)])
    val_prompts: list[Prompt] = []
    if data.val_files:
        val_prompts, more = read_prompts(
            data.val_files, "data.val_files", renderer, data, partial(_chosen, data, data.val_max_samples)
        )
        notices += more
    if config.algorithm.length_budget.mode:
        check_length_budgets(prompts)
    graded, everything = get_environment_spec(config.env.env_name).graded, [*prompts, *val_prompts]
    has_function = find_function(config, graded, everything)
    more, tried = check_rewards(everything, config.reward, config.custom_reward_function, graded and has_function)
    notices += more if has_function else [*more, *_unrewarded(config)]
    if graded and has_function:
        asyncio.run(check_named_rewards(config, everything[0], tried))
    notices += asyncio.run(try_resets(config.env, [*prompts[:1], *val_prompts[:1]]))
    trainer, size = config.trainer, data.train_batch_size
    if size > len(prompts):
        notices.append(f"data.train_batch_size={size}: the {len(prompts)} prompts come several times an iteration.")
    goal = Goal.of(trainer.total_training_steps, trainer.total_epochs, len(prompts), size)
    if config.algorithm.filter_groups.enable and goal.prompts is not None:
        notices.append(
            f"algorithm.filter_groups may consume several batches of prompts an iteration, so trainer.total_epochs="
            f"{trainer.total_epochs} may end before the {goal.steps} iterations that schedules of learning rates count "
            "on. For a certain number, set trainer.total_training_steps."
        )
    return Inputs(
        prompts,
        val_prompts,
        goal=goal,
        probe=renderer.prompt_ids(prompts[0].content)[:64],
        reader=make_reader(config, renderer, everything) if config.reward_model.enable else None,
        has_function=has_function,
        notices=notices,
    )


def _unrewarded(config: Config) -> Iterator[str]:
    """What to say where there is no reward function."""
    if not config.reward_model.enable:
        yield (
            "nothing gives a reward: reward/* and val/* are of zeros. To see them give rows a data_source with a "
            "grader and what it needs, or custom_reward_function.path."
        )


def _trained_models(config: Config) -> dict[str, Model]:
    """By the keys of their paths: those that the training ranks compute."""
    policy = config.actor_rollout_ref.model
    models = {"actor_rollout_ref.model.path": policy}
    if "values" in get_estimator(config.algorithm.adv_estimator).needs:
        models["critic.model.path"] = policy.model_copy(update={"path": config.critic.model.path})
    if config.teacher.divergence:
        models["teacher.model.path"] = teacher_model(policy, config.teacher)
    if config.reward_model.enable:
        models["reward_model.model.path"] = scorer_model(config.reward_model, policy)
    return models


def _chosen(data: Data, count: int, prompts: list[Prompt]) -> list[Prompt]:
    return [prompts[index] for index in choose_rows(len(prompts), count, data.seed, data.shuffle)]
