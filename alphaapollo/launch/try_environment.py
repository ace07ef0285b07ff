"""One reset of an environment and one call of the user's reward function before anything starts: a server that is not
there, a puzzle that cannot be made, or a function that raises shows now, not after the models are loaded."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Sequence

from alphaapollo.config.schema import CustomRewardFunction, Env, Reward
from alphaapollo.environments.base import (
    Environment,
    EnvironmentFailure,
    Services,
    get_environment,
    wrap_environment_errors,
)
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.rewards.grader_processes.client import RewardClient
from alphaapollo.rollout.check_replies import check_first
from alphaapollo.rollout.sync_method_threads import SyncMethodThreads
from alphaapollo.tools.tool_calls import ToolCall
from alphaapollo.types import Message, Prompt, Score

PLACE = re.compile(r"(?<![\w\\}])\{([a-z_]+)\}")  # not what LaTeX has: \boxed{n}


async def try_resets(config: Env, prompts: Sequence[Prompt]) -> list[str]:
    """Make the environment, reset it and close it, once for each prompt; nothing is graded and no model asked. Returns
    what to tell.

    ValueError: it cannot be made or reset, its first observation is none, or it takes longer than env.episode_timeout.
    """
    tools, shown = await open_toolbox(config), ""
    try:
        for prompt in prompts:
            first = await _try_reset(config, Services(_no_grader, config, tools, _no_reader), prompt)
            shown += first if isinstance(first, str) else "".join(message["content"] for message in first)
    finally:
        if tools is not None:
            await tools.close()
    template = config.prompt
    return [
        f"env.prompt: {{{name}}} is shown as it is, for nothing fills it."
        for name in dict.fromkeys(PLACE.findall(template))
        if f"{{{name}}}" in shown
    ]


async def try_reward(prompt: Prompt, reward: Reward, custom: CustomRewardFunction) -> list[Score]:
    """Grade one row with two answers made up for it: one of them must pass, in a process as in a run. The scores of
    both.

    ValueError: both fail.
    """
    scores = await try_grades(prompt, reward, custom)
    if not all(score.outcome.failed for score in scores):
        return scores
    what = f"{custom.path}: {custom.name}" if custom.path else f"{reward.custom_module}: a component"
    raise ValueError(
        f"{what}, called on row {prompt.id} with two answers made up for a try, fails: {scores[-1].reason}. Mend it: a "
        "number or a dict of numbers must come back, whatever the answer."
    )


async def try_grades(prompt: Prompt, reward: Reward, custom: CustomRewardFunction) -> list[Score]:
    """The scores of the row's own ground truth as the answer, and of an empty answer."""
    client = RewardClient(reward.model_copy(update={"num_workers": 1}), custom)
    await client.start()
    try:
        return [await client.score(prompt, text) for text in (f"<answer>{prompt.ground_truth or ''}</answer>", "")]
    finally:
        await client.close()


async def _try_reset(config: Env, services: Services, prompt: Prompt) -> list[Message] | str:
    what = f"env.env_name={config.env_name}: the environment does not start on row {prompt.id}"
    try:
        async with asyncio.timeout(config.episode_timeout):
            with wrap_environment_errors("making it"):
                environment = get_environment(config.env_name)(services)
            try:
                with wrap_environment_errors("reset"):
                    reply = await _call(environment, "reset", prompt)
                first = check_first(reply)
            finally:
                with wrap_environment_errors("close"):
                    await _call(environment, "close")
            return first
    except TimeoutError as error:
        raise ValueError(
            f"{what} within env.episode_timeout={config.episode_timeout:g} s. Mend it, or raise the limit."
        ) from error
    except EnvironmentFailure as failure:
        raise ValueError(f"{what}: {failure}. Mend the environment, its settings (env.*), or the row.") from failure


async def _call(environment: Environment, name: str, *arguments: Prompt) -> object:
    """Made in a thread: a sync method may take long."""
    try:
        result = await SyncMethodThreads().run(getattr(environment, name), *arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"it wants to exit ({error})") from error


def _no_reader(text: str) -> list[ToolCall]:
    raise RuntimeError("an environment reads calls in step, not in reset")


async def _no_grader(prompt: Prompt, text: str) -> Score:
    raise RuntimeError("an environment grades in step, not in reset")
