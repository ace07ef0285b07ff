"""Trial reset of the environment and trial call of the user's reward function, before the models are loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence

from alphaapollo.config.schema import CustomRewardFunction, Env, Reward
from alphaapollo.environments.base import (
    EnvironmentFailure,
    Services,
    get_environment_spec,
    wrap_environment_errors,
)
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rollout.check_replies import check_reset_reply
from alphaapollo.rollout.environment_calls import EnvironmentCaller
from alphaapollo.tools.tool_calls import ToolCall
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.time_limit import TimeLimit

PLACEHOLDER = re.compile(r"(?<![\w\\}])\{([a-z_]+)\}")  # excludes LaTeX such as \boxed{n}


async def try_resets(config: Env, prompts: Sequence[Prompt]) -> list[str]:
    """Create, reset and close the environment once for each prompt. Returns notices.

    Raises ValueError if the environment cannot be created or reset, returns an invalid first observation, or exceeds
    env.episode_timeout.
    """
    tools, shown = await open_toolbox(config), ""
    try:
        for prompt in prompts:
            first = await _try_reset(config, Services(_skip_grading, config, tools, _parse_nothing), prompt)
            shown += first if isinstance(first, str) else "".join(message["content"] for message in first)
    finally:
        if tools is not None:
            await tools.close()
    template = config.prompt
    return [
        f"env.prompt: {{{name}}} is not filled in, because the environment has no such value."
        for name in dict.fromkeys(PLACEHOLDER.findall(template))
        if f"{{{name}}}" in shown
    ]


async def try_reward(prompt: Prompt, reward: Reward, custom: CustomRewardFunction) -> list[Score]:
    """Grade two made-up answers to one row in a grader process. Returns both scores.

    Raises ValueError if both gradings fail.
    """
    scores = await try_grades(prompt, reward, custom)
    if not all(score.outcome.failed for score in scores):
        return scores
    function = f"{custom.path}: {custom.name}" if custom.path else f"{reward.custom_module}: a component"
    raise ValueError(
        f"{function} fails on row {prompt.id} with two made-up answers: {scores[-1].reason}. Return a number or a "
        "dict of numbers for any answer."
    )


async def try_grades(prompt: Prompt, reward: Reward, custom: CustomRewardFunction) -> list[Score]:
    """Grade the row's ground truth and an empty answer. Returns both scores."""
    client = RewardClient(reward.model_copy(update={"num_workers": 1}), custom)
    await client.start()
    try:
        return [await client.score(prompt, text) for text in (f"<answer>{prompt.ground_truth or ''}</answer>", "")]
    finally:
        await client.close()


async def _try_reset(config: Env, services: Services, prompt: Prompt) -> list[Message] | str:
    message = f"env.env_name={config.env_name}: the environment does not start on row {prompt.id}"
    caller, seconds = EnvironmentCaller(), config.episode_timeout
    try:
        with wrap_environment_errors("creation"):
            environment = get_environment_spec(config.env_name).factory(services)
        try:
            return check_reset_reply(await caller.call(TimeLimit(seconds), environment, "reset", prompt))
        finally:
            await caller.call(TimeLimit(seconds), environment, "close")
    except TimeoutError as error:
        raise ValueError(
            f"{message} within env.episode_timeout={seconds:g} s. Fix it, or raise env.episode_timeout."
        ) from error
    except EnvironmentFailure as failure:
        raise ValueError(f"{message}: {failure}. Fix the environment, its settings (env.*), or the row.") from failure


def _parse_nothing(text: str) -> list[ToolCall]:
    raise RuntimeError("an environment reads calls in step, not in reset")


async def _skip_grading(prompt: Prompt, text: str) -> Score:
    raise RuntimeError("an environment grades in step, not in reset")
