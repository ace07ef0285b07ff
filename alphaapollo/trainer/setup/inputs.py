"""Read and check the data, tokenizers and reward function of a run before a worker starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.schema import Config
from alphaapollo.data.stream import choose_rows
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.input_checks import (
    check_rewards,
    explain_missing_cluster,
    make_renderer,
    read_prompts,
)
from alphaapollo.launch.model_requirements import ModelUse, check_models
from alphaapollo.models.load import list_template_notices
from alphaapollo.planning.try_data import describe_sources
from alphaapollo.planning.try_environment import grade_trial_answers, try_environment
from alphaapollo.rewards.components import TASK
from alphaapollo.trainer.progress import TrainingGoal
from alphaapollo.trainer.setup.teacher_checks import check_teachers
from alphaapollo.trainer.setup.worker_specs import make_probe
from alphaapollo.trainer.step.curriculum import assign_stages
from alphaapollo.trainer.step.reward_model_scorer import (
    COMPONENT,
    RewardModelTokenizer,
    make_reward_model_settings,
    make_reward_model_tokenizer,
    uses_reward_function,
)
from alphaapollo.trainer.step.training_batch import check_prompts_have_length_budgets
from alphaapollo.types import Prompt, Score
from alphaapollo.weight_sync.verification import Probe
from alphaapollo.workers.builders import make_critic_model_section, make_teacher_model_sections


@dataclass(frozen=True)
class TrainingInputs:
    """Checked inputs of a training run."""

    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: TrainingGoal
    probe: Probe  # weight syncs are verified by its log-probs
    reward_model_tokenizer: RewardModelTokenizer | None
    has_reward_function: bool  # whether a reward function or the environment computes a reward, besides a reward model
    notices: list[str]
    sources: dict[str, str]  # data source -> what is known about its training prompts
    stops: str  # tokens that end a turn


def read_training_inputs(config: Config) -> TrainingInputs:
    """Read the tokenizers and the data, then try the reward function and one environment reset.

    Raises ValueError if one of them cannot be used.
    """
    data, trainer = config.data, config.trainer
    check_models(list_model_uses(config))
    renderer = make_renderer(config.env, config.actor_rollout_ref.model, data.apply_chat_template_kwargs)

    def read_split(files: str | list[str], config_key: str, max_samples: int) -> tuple[list[Prompt], list[str]]:
        choose = partial(choose_rows, max_rows=max_samples, seed=data.seed, shuffle=data.shuffle)
        return read_prompts(files, config_key, renderer, data, choose)

    prompts, notices = read_split(data.train_files, "data.train_files", data.train_max_samples)
    if config.teacher.divergence:
        notices += check_teachers(config, renderer, prompts)
    notices += list_template_notices(config.actor_rollout_ref.model, renderer, data.apply_chat_template_kwargs)
    notices += filter(None, [explain_missing_cluster(config)])
    val_prompts: list[Prompt] = []
    if data.val_files:
        val_prompts, more = read_split(data.val_files, "data.val_files", data.val_max_samples)
        notices += more
    assign_stages(prompts, data)
    if config.algorithm.length_budget.mode:
        check_prompts_have_length_budgets(prompts)
    everything = [*prompts, *val_prompts]
    has_reward_function, more, truths = _try_reward_function(config, everything)
    notices += more
    reads_columns = bool(config.custom_reward_function.path or config.env.custom_module)
    notices += try_environment(
        config.env,
        [*prompts[:1], *val_prompts[:1]],
        config.actor_rollout_ref.model,
        data,
    )
    goal = TrainingGoal.from_schedule(
        trainer.total_training_steps, trainer.total_epochs, len(prompts), data.train_batch_size
    )
    notices += _list_data_size_notices(config, goal, len(prompts))
    uses_reward_model = config.reward_model.enable
    return TrainingInputs(
        prompts,
        val_prompts,
        goal=goal,
        probe=make_probe(renderer, prompts[0].content, data.max_length - 1),
        reward_model_tokenizer=make_reward_model_tokenizer(config, renderer, everything) if uses_reward_model else None,
        has_reward_function=has_reward_function,
        notices=notices,
        sources=describe_sources(prompts, renderer, truths, reads_columns),
        stops=renderer.describe_stops(),
    )


def list_model_uses(config: Config) -> Iterator[ModelUse]:
    """Yield the models of a training run, and the settings that each of them must support."""
    role, actor = config.actor_rollout_ref, "actor_rollout_ref.actor"
    policy = ModelUse(
        "actor_rollout_ref.model.path",
        role.model,
        engine=role.rollout,
        engine_section="actor_rollout_ref.rollout",
        lengths=config.data,
        fsdp=role.actor.fsdp_config,
        fsdp_section=f"{actor}.fsdp_config",
        num_ranks=config.trainer.num_ranks,
        ulysses_size=role.actor.ulysses_sequence_parallel_size,
        ulysses_section=f"{actor}.",
    )
    yield policy
    other = replace(policy, writes_text=False, engine=None, lengths=None, fsdp=None)
    if "values" in get_estimator(config.algorithm.adv_estimator).needs:
        model, fsdp = make_critic_model_section(role.model, config.critic), config.critic.fsdp_config
        critic = replace(other, key="critic.model.path", model=model, fsdp=fsdp, policy=role.model)
        yield replace(critic, fsdp_section="critic.fsdp_config")
    for key, model in make_teacher_model_sections(role.model, config.teacher).items():
        yield replace(other, key=f"{key}.path", model=model, policy=role.model)
    if config.reward_model.enable:
        scorer = make_reward_model_settings(config.reward_model, role.model)
        yield replace(other, key="reward_model.model.path", model=scorer)


def _list_data_size_notices(config: Config, goal: TrainingGoal, num_prompts: int) -> Iterator[str]:
    size, trainer = config.data.train_batch_size, config.trainer
    if size > num_prompts:
        yield f"data.train_batch_size={size}: the {num_prompts} prompts are used several times per iteration."
    if config.algorithm.filter_groups.enable and goal.max_prompts is not None:
        yield (
            "algorithm.filter_groups may use several batches of prompts per iteration, so trainer.total_epochs="
            f"{trainer.total_epochs} may end before the {goal.max_steps} iterations that learning rate schedules "
            "assume. For a fixed number, set trainer.total_training_steps."
        )


def _try_reward_function(config: Config, prompts: Sequence[Prompt]) -> tuple[bool, list[str], dict[str, str]]:
    """Try the reward function on some rows. Returns whether there is a reward function, notices, and how many rows of
    each data source score with their own ground truth."""
    graded = get_environment_spec(config.env.env_name).is_graded(config.env)
    has_function = uses_reward_function(config, graded, prompts)
    needs_grading = graded and has_function
    notices, tried, truths = check_rewards(prompts, config.reward, config.custom_reward_function, needs_grading)
    if not has_function and not config.reward_model.enable:
        notices = [
            *notices,
            "nothing gives a reward, so reward/* and val/* are 0. For rewards, add to each row a data_source "
            "with a built-in grader and its ground truth, or set custom_reward_function.path.",
        ]
    if needs_grading:
        asyncio.run(check_reward_components_exist(config, prompts[0], tried))
    return has_function, notices, truths


async def check_reward_components_exist(config: Config, prompt: Prompt, scores: Sequence[Score]) -> None:
    """Raise ValueError if a config key names a reward component that the reward function does not return.

    Components of a user's environment, or of a policy that judges itself, are not known before the run, so they are
    not checked.
    scores: scores of trial answers to the prompt; if empty, this function computes some.
    """
    named = dict(_list_reward_components_in_config(config))
    if not named or config.env.custom_module or config.reward.judge.backend == "policy":
        return
    if not scores:
        scores = [*(await grade_trial_answers(prompt, config.reward, config.custom_reward_function))[0].values()]
    scores = [score for score in scores if not score.outcome.failed]
    returned = {name for score in scores for name in score.components}
    if not returned and not any(score.reward for score in scores):
        return  # a reward of 0 without components is valid: each component is then 0
    if config.reward_model.enable:
        returned |= {COMPONENT, TASK, "accuracy"}
    for name, key in named.items():
        if name not in returned:
            raise ValueError(
                f"{key} names {name!r}, but the reward function, tried on row {prompt.id}, returns "
                f"{', '.join(sorted(returned)) or 'one number without components'}. Add {name!r} to the dict that the "
                f"function returns, or change {key}."
            )


def _list_reward_components_in_config(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (component name, config key) for each reward component that a config key names."""
    algorithm = config.algorithm
    if "components" in get_estimator(algorithm.adv_estimator).needs:
        yield from ((name, "algorithm.gdpo_rewards") for name in algorithm.gdpo_rewards)
        for name, (other, _) in algorithm.gdpo_conditions.items():
            yield from ((part, "algorithm.gdpo_conditions") for part in (name, other))
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in ("accuracy", "reward"):
        yield algorithm.filter_groups.metric, "algorithm.filter_groups.metric"
