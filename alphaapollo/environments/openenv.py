"""Environments behind an OpenEnv server (package openenv-core), one session per episode.

The content of <answer>...</answer> is the action: a JSON object as it is, any other text in env.openenv.action_field.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.tag_parser import read_action
from alphaapollo.environments.text_game import fill_template, instance_seed
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.time_limit import exclude_waiting

logger = logging.getLogger(__name__)

ERROR_CODE = re.compile(r"\(code: ([A-Z_]+)\)$")  # ends the client's message about an error of the server
FIRST_WAIT, LONGEST_WAIT = 0.2, 3.0  # seconds between two attempts to get a session
PROMPT = "{observation}\n\nAct with <answer>...</answer>."
_open_sessions: Counter[str] = Counter()  # of this process's episodes, by server


def check(config: Env) -> None:
    """Check that the package is installed and a server is configured (ValueError)."""
    if find_spec("openenv") is None:
        raise ValueError("env.env_name=openenv needs the package openenv-core. Install it: pip install -e '.[openenv]'")
    if not config.openenv.url:
        raise ValueError("env.openenv.url is empty. Set it to the server's address, e.g. http://localhost:8000.")


@register_environment("openenv", check=check, tools=None)
class OpenEnvEnvironment:
    """The reward of the last step is the episode's score; the rewards before it belong to their turns."""

    def __init__(self, services: Services):
        self._config, self._settings = services.config, services.config.openenv
        package = importlib.import_module("openenv.core.generic_client")
        self._connect = partial(
            package.GenericEnvClient, base_url=self._settings.url, message_timeout_s=self._config.episode_timeout
        )
        self._client = self._connect()
        self._has_session = False

    async def reset(self, prompt: Prompt) -> Observation:
        result = await self._start_session(instance_seed(self._config, prompt) % 2**31)
        text = fill_template(self._config.prompt or PROMPT, observation=self._format(result.observation))
        return _observation(text)

    async def step(self, action: str) -> StepResult:
        found = read_action(action)
        if found.problem:
            return _invalid(found.problem)
        fields = self._parse_action(found.content)
        if not _is_unicode(fields):
            return _invalid("it holds half a Unicode character")
        try:
            result = await self._client.step(fields)
        except RuntimeError as error:
            if _error_code(error) != "VALIDATION_ERROR":
                raise
            return _invalid(f"not one that this environment takes. {error}")
        reward = float(result.reward or 0.0)
        if result.done:
            return StepResult(done=True, score=Score(reward), kept_chars=found.kept_chars)
        return StepResult(_observation(self._format(result.observation)), reward=reward, kept_chars=found.kept_chars)

    async def close(self) -> None:
        _open_sessions[self._settings.url] -= self._has_session
        self._has_session = False
        await self._client.close()

    async def _start_session(self, seed: int) -> Any:
        """First result of a new session. Retries while the server has no free session.

        The wait does not count for env.episode_timeout while other episodes of this process have sessions there.
        """
        wait = FIRST_WAIT
        while True:
            try:
                result = await self._client.reset(seed=seed)
                _open_sessions[self._settings.url] += 1
                self._has_session = True
                return result
            except Exception as error:
                # A full server answers and closes; a client that is still sending may only notice the close.
                if _error_code(error) != "CAPACITY_REACHED" and type(error).__name__ != "ConnectionClosedOK":
                    raise
                _warn_once(self._settings.url, str(error))
            await self._client.close()
            with exclude_waiting() if _open_sessions[self._settings.url] else nullcontext():
                await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
            self._client = self._connect()

    def _parse_action(self, content: str) -> dict[str, Any]:
        try:
            action = json.loads(content)
        except (ValueError, RecursionError):  # not JSON
            action = None
        return action if isinstance(action, dict) else {self._settings.action_field: content}

    def _format(self, observation: dict[str, Any]) -> str:
        field = self._settings.observation_field
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise KeyError(f"env.openenv.observation_field={field} must be one of {', '.join(observation)}")
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _error_code(error: Exception) -> str:
    """The server's error code, e.g. CAPACITY_REACHED; empty if there is none."""
    found = ERROR_CODE.search(str(error))
    return found[1] if found else ""


@cache
def _warn_once(url: str, message: str) -> None:
    logger.warning(
        "env.openenv.url=%s has fewer sessions than there are episodes, so episodes wait for each other. Raise the "
        "server's max_concurrent_envs. %s",
        url,
        message,
    )


def _is_unicode(action: dict[str, Any]) -> bool:
    r"""Whether there is no lone surrogate, which JSON can spell (`"\ud83d"`) and which breaks the connection."""
    try:
        json.dumps(action, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _observation(text: str) -> Observation:
    return Observation([Message(role="user", content=text)])


def _invalid(problem: str) -> StepResult:
    return StepResult(_observation(f"invalid action: {problem}"), valid=False)
