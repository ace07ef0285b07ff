"""Read and check the inputs of a run, data and tokenizers, before a worker starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.schema import Config, Model, Teacher
from alphaapollo.data.rendering import Renderer, load_tokenizer, make_template_argument_warnings
from alphaapollo.data.stream import choose_row_indices
from alphaapollo.engines.vllm.user_arguments import check_engine_kwargs
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.builders import make_critic_model, make_teacher_model
from alphaapollo.launch.input_checks import (
    check_engine_split,
    check_experts,
    check_lengths,
    check_rewards,
    check_sequence_parallel,
    explain_missing_cluster,
    make_renderer,
    read_prompts,
)
from alphaapollo.launch.try_environment import try_grades, try_resets
from alphaapollo.models.folder_check import check_weights
from alphaapollo.models.load import load_config
from alphaapollo.models.lora import check_target_modules
from alphaapollo.rewards.components import TASK
from alphaapollo.trainer.progress import Goal
from alphaapollo.trainer.step.reward_model_scorer import (
    COMPONENT,
    RewardModelTokenizer,
    has_reward_function,
    make_reward_model_settings,
    make_reward_model_tokenizer,
)
from alphaapollo.trainer.step.training_batch import check_length_budgets
from alphaapollo.types import Prompt, Score

PROBE_TOKENS = 64
TEACHER = "teacher.model.path"


@dataclass(frozen=True)
class Inputs:
    """Checked data, tokenizers and goal of a run."""

    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: Goal
    probe: list[int]  # token ids of the first prompt, to verify weight syncs
    reward_model_tokenizer: RewardModelTokenizer | None
    has_function: bool  # whether a reward function or the environment computes a reward, besides a reward model
    notices: list[str]


def read_inputs(config: Config) -> Inputs:
    """Read tokenizer and data, and try the reward function and one environment reset.

    Raises ValueError if one of them cannot be used.
    """
    data, trainer = config.data, config.trainer
    _check_models(config)
    renderer = make_renderer(config.env, config.actor_rollout_ref.model, data.apply_chat_template_kwargs)

    def read(files: str | list[str], key: str, count: int) -> tuple[list[Prompt], list[str]]:
        def choose(prompts: list[Prompt]) -> list[Prompt]:
            return [prompts[index] for index in choose_row_indices(len(prompts), count, data.seed, data.shuffle)]

        return read_prompts(files, key, renderer, data, choose)

    prompts, notices = read(data.train_files, "data.train_files", data.train_max_samples)
    if config.teacher.divergence:
        notices += check_teacher_tokens(config.teacher, config.actor_rollout_ref.model, renderer)
    notices += make_template_argument_warnings(data.apply_chat_template_kwargs, renderer.tokenizer)
    notices += filter(None, [explain_missing_cluster(trainer)])
    val_prompts: list[Prompt] = []
    if data.val_files:
        val_prompts, more = read(data.val_files, "data.val_files", data.val_max_samples)
        notices += more
    if config.algorithm.length_budget.mode:
        check_length_budgets(prompts)
    everything = [*prompts, *val_prompts]
    has_function, more = _check_rewards(config, everything)
    notices += more
    notices += asyncio.run(try_resets(config.env, [*prompts[:1], *val_prompts[:1]]))
    goal = Goal.from_schedule(trainer.total_training_steps, trainer.total_epochs, len(prompts), data.train_batch_size)
    notices += _list_length_notices(config, goal, len(prompts))
    uses_reward_model = config.reward_model.enable
    return Inputs(
        prompts,
        val_prompts,
        goal=goal,
        probe=renderer.encode_prompt(prompts[0].content)[:PROBE_TOKENS],
        reward_model_tokenizer=make_reward_model_tokenizer(config, renderer, everything) if uses_reward_model else None,
        has_function=has_function,
        notices=notices,
    )


def _check_models(config: Config) -> None:
    role = config.actor_rollout_ref
    models, model, rollout = _list_trained_models(config), role.model, role.rollout
    check_engine_kwargs(rollout, "actor_rollout_ref.rollout")
    check_target_modules(model, "actor_rollout_ref.model")
    check_experts(model, "actor_rollout_ref.model", rollout.router_replay)
    check_target_modules(make_critic_model(model, config.critic), "critic.model")
    for name, trained in models.items():
        check_weights(trained, name)
    check_lengths(model, rollout, config.data)
    check_engine_split(model, rollout, "actor_rollout_ref.rollout")
    size, key = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size, "ulysses_sequence_parallel_size"
    check_sequence_parallel(size, f"actor_rollout_ref.actor.{key}", models)


def _list_trained_models(config: Config) -> dict[str, Model]:
    """Return the models that the training ranks compute, by the config keys of their paths."""
    policy = config.actor_rollout_ref.model
    models = {"actor_rollout_ref.model.path": policy}
    if "values" in get_estimator(config.algorithm.adv_estimator).needs:
        models["critic.model.path"] = policy.model_copy(update={"path": config.critic.model.path})
    if config.teacher.divergence:
        models[TEACHER] = make_teacher_model(policy, config.teacher)
    if config.reward_model.enable:
        models["reward_model.model.path"] = make_reward_model_settings(config.reward_model, policy)
    return models


def _list_length_notices(config: Config, goal: Goal, num_prompts: int) -> Iterator[str]:
    size, trainer = config.data.train_batch_size, config.trainer
    if size > num_prompts:
        yield f"data.train_batch_size={size}: the {num_prompts} prompts are used several times per iteration."
    if config.algorithm.filter_groups.enable and goal.prompts is not None:
        yield (
            "algorithm.filter_groups may use several batches of prompts per iteration, so trainer.total_epochs="
            f"{trainer.total_epochs} may end before the {goal.steps} iterations that learning rate schedules assume. "
            "For a fixed number, set trainer.total_training_steps."
        )


def _check_rewards(config: Config, prompts: Sequence[Prompt]) -> tuple[bool, list[str]]:
    """Try the reward function. Returns whether there is a reward function, and notices."""
    graded = get_environment_spec(config.env.env_name).graded
    has_function = has_reward_function(config, graded, prompts)
    notices, tried = check_rewards(prompts, config.reward, config.custom_reward_function, graded and has_function)
    if not has_function and not config.reward_model.enable:
        notices = [
            *notices,
            "nothing gives a reward, so reward/* and val/* are 0. For rewards, add to the rows a data_source with a "
            "grader and what it needs, or set custom_reward_function.path.",
        ]
    if graded and has_function:
        asyncio.run(check_named_rewards(config, prompts[0], tried))
    return has_function, notices


async def check_named_rewards(config: Config, prompt: Prompt, tried: Sequence[Score]) -> None:
    """Raise ValueError if a key names a component that the reward function does not return.

    Components of a user's environment are not known before the run, so they are not checked.

    Args:
        tried: scores of answers to the prompt; if empty, this function computes some.
    """
    named = dict(_list_named_components(config))
    if not named or config.env.custom_module:
        return
    tried = tried or await try_grades(prompt, config.reward, config.custom_reward_function)
    scores = [score for score in tried if not score.outcome.failed]
    returned = {name for score in scores for name in score.components}
    if not returned and not any(score.reward for score in scores):
        return  # a reward of 0 without components is valid: each component is then 0
    if config.reward_model.enable:
        returned |= {COMPONENT, TASK, "accuracy"}
    for name, key in named.items():
        if name not in returned:
            raise ValueError(
                f"{key} names {name!r}, but the reward function, tried on row {prompt.id}, returns "
                f"{', '.join(sorted(returned)) or 'one number without components'}. Return the component in the "
                "function's dict, or change the key."
            )


def _list_named_components(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (name, key) for each reward component that a config key names."""
    algorithm = config.algorithm
    if "components" in get_estimator(algorithm.adv_estimator).needs:
        yield from ((name, "algorithm.gdpo_rewards") for name in algorithm.gdpo_rewards)
        for name, (other, _) in algorithm.gdpo_conditions.items():
            yield from ((part, "algorithm.gdpo_conditions") for part in (name, other))
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric not in ("accuracy", "reward"):
        yield algorithm.filter_groups.metric, "algorithm.filter_groups.metric"


def check_teacher_tokens(teacher: Teacher, policy: Model, renderer: Renderer) -> list[str]:
    """Check that the teacher can read the policy's token ids. Returns notices. Raises ValueError if it cannot.

    Every token id must stand for the same token in both models. To compare full distributions (all divergences except
    `sampled`), the teacher must also have no extra tokens, and its head at least as many rows as the policy's.
    """
    tokenizer = load_tokenizer(teacher.model.path, teacher.model.trust_remote_code)
    known, written = tokenizer.get_vocab(), renderer.tokenizer.get_vocab()
    path = f"{TEACHER}={teacher.model.path}"
    if other := [token for token, number in written.items() if known.get(token) != number]:
        raise ValueError(
            f"{path} has another tokenizer than the policy: {_list_tokens(other)} have other token ids or none. "
            "Use a teacher with the policy's tokenizer (e.g. a larger model of its family), or train on the "
            "teacher's texts (docs/expert_iteration.md)."
        )
    if teacher.full_vocabulary:
        compares = f"teacher.divergence={teacher.divergence} compares full distributions, but {path}"
        fix = "Set teacher.divergence=sampled, which needs only the policy's tokens, or use another teacher."
        if more := [token for token in known if token not in written]:
            raise ValueError(f"{compares} has tokens that the policy lacks: {_list_tokens(more)}. {fix}")
        reader = Model(path=teacher.model.path, trust_remote_code=teacher.model.trust_remote_code)
        rows, needed = (int(load_config(model).get_text_config().vocab_size) for model in (reader, policy))
        if rows < needed:
            raise ValueError(f"{compares} has a head of {rows} rows, and the policy one of {needed}. {fix}")
    if tokenizer.chat_template == renderer.tokenizer.chat_template:
        return []
    return [f"{path} has another chat template than the policy. The teacher reads chats in the policy's template."]


def _list_tokens(tokens: list[str]) -> str:
    """Format the first tokens and their number: `'a', 'b', 'c', ... (23)`."""
    return ", ".join(map(repr, sorted(tokens)[:3])) + (f", ... ({len(tokens)})" if len(tokens) > 3 else "")
