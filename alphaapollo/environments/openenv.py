"""Environments behind a server that speaks OpenEnv's protocol (package openenv-core): one session an episode.

What stands in <answer>...</answer> is the action: a JSON object as it is, any other text in env.openenv.action_field.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.read_tags import Unreadable, read_action
from alphaapollo.environments.text_game import fill, instance_seed
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.time_limit import queueing

logger = logging.getLogger(__name__)

CODE = re.compile(r"\(code: ([A-Z_]+)\)$")  # at the end of what the client raises for a server's error
FIRST_WAIT, LONGEST_WAIT = 0.2, 3.0  # seconds between two tries to get a session
_held: Counter[str] = Counter()  # sessions that episodes of this process have, by server
PROMPT = "{observation}\n\nAct with <answer>...</answer>."


def check(config: Env) -> None:
    """The package is there, and a server is named (ValueError)."""
    if find_spec("openenv") is None:
        raise ValueError("env.env_name=openenv needs its package: pip install -e '.[openenv]' in the clone.")
    if not config.openenv.url:
        raise ValueError("env.openenv.url is empty: give the server's address, e.g. http://localhost:8000.")


@register_environment("openenv", check=check, tools=None)
class OpenEnv:
    """The reward that comes with the end is the episode's score; those before it are rewards of their turns."""

    def __init__(self, services: Services):
        self._config, self._settings = services.config, services.config.openenv
        package = importlib.import_module("openenv.core.generic_client")
        self._connect = partial(
            package.GenericEnvClient, base_url=self._settings.url, message_timeout_s=self._config.episode_timeout
        )
        self._client = self._connect()
        self._holds = 0  # sessions

    async def reset(self, prompt: Prompt) -> Observation:
        result = await self._start_session(instance_seed(self._config, prompt) % 2**31)
        text = fill(self._settings.prompt or PROMPT, observation=self._show(result.observation))
        return Observation([Message(role="user", content=text)])

    async def step(self, action: str) -> StepResult:
        found = read_action(action)
        if isinstance(found, Unreadable):
            return StepResult(_say(f"invalid action: {found.problem}"), valid=False)
        fields = self._action(found.content)
        if not _is_unicode(fields):
            return StepResult(_say("invalid action: it holds half a Unicode character"), valid=False)
        try:
            result = await _call(self._client.step, fields)
        except RuntimeError as error:
            if _code(error) != "VALIDATION_ERROR":
                raise
            return StepResult(_say(f"invalid action: not one that this environment takes. {error}"), valid=False)
        reward = float(result.reward or 0.0)
        if result.done:
            return StepResult(done=True, score=Score(reward), kept_chars=found.kept_chars)
        return StepResult(_say(self._show(result.observation)), reward=reward, kept_chars=found.kept_chars)

    async def close(self) -> None:
        self._hold(0)
        await _call(self._client.close)

    def _hold(self, count: int) -> None:
        _held[self._settings.url] += count - self._holds
        self._holds = count

    async def _start_session(self, seed: int) -> Any:
        """The first result. A server that has no session left is asked again until it has; the wait is no time of this
        episode's as long as it is for others of this process."""
        wait = FIRST_WAIT
        while True:
            try:
                result = await _call(self._client.reset, seed=seed)
                self._hold(1)
                return result
            except Exception as error:
                if not _is_full(error):
                    raise
                _tell_once(self._settings.url, str(error))
            await _call(self._client.close)
            with queueing() if _held[self._settings.url] else nullcontext():
                await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
            self._client = self._connect()

    def _action(self, content: str) -> dict[str, Any]:
        try:
            action = json.loads(content)
        except (ValueError, RecursionError):  # the model's text is no JSON
            action = None
        return action if isinstance(action, dict) else {self._settings.action_field: content}

    def _show(self, observation: dict[str, Any]) -> str:
        field = self._settings.observation_field
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise KeyError(f"env.openenv.observation_field={field}: the observation has {', '.join(observation)}")
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_full(error: Exception) -> bool:
    """Has the server no session left? It says so and closes; who is still sending then may see the end alone."""
    return _code(error) == "CAPACITY_REACHED" or type(error).__name__ == "ConnectionClosedOK"


def _code(error: Exception) -> str:
    """The server's code of what went wrong, e.g. CAPACITY_REACHED; empty where there is none."""
    found = CODE.search(str(error))
    return found[1] if found else ""


@cache
def _tell_once(url: str, said: str) -> None:
    logger.warning(
        "env.openenv.url=%s has fewer sessions than there are episodes: they wait for each other. Let the server have "
        "more (max_concurrent_envs). %s",
        url,
        said,
    )


def _is_unicode(action: dict[str, Any]) -> bool:
    r"""Without half a surrogate pair, which JSON can spell (`"\ud83d"`) and which would break the connection."""
    try:
        json.dumps(action, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _say(text: str) -> Observation:
    return Observation([Message(role="user", content=text)])


async def _call(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The client is sync until version 0.2, and async since 0.3."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **named)
    return await asyncio.to_thread(method, *arguments, **named)
