"""Environments behind an OpenEnv server, one session per episode.

The protocol is JSON over a WebSocket. The adapter does not import the package openenv, whose dependencies conflict with
vLLM's.

The content of <answer>...</answer> is the action. A JSON object is sent unchanged; any other text is sent in the field
env.openenv.action_field.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from contextlib import nullcontext, suppress
from functools import cache

import aiohttp

from alphaapollo.config.schema import Env
from alphaapollo.environments.action_parser import read_action
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.text_game import derive_instance_seed
from alphaapollo.plugins.adapters.settings import OpenEnv
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.types import JsonObject, Message, Prompt, Score
from alphaapollo.utils.redaction import map_texts, replace_surrogates
from alphaapollo.utils.text import fill_template

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.2, 3.0  # seconds between attempts to open a session
MAX_MESSAGE_BYTES = 100 * 2**20
PROMPT = "{observation}\n\nAct with <answer>...</answer>."
_open_sessions: Counter[str] = Counter()  # number of open sessions of this process, by server


class ServerError(RuntimeError):
    """Error that the server reported, e.g. with the code VALIDATION_ERROR."""

    def __init__(self, message: str, code: str):
        super().__init__(f"{message} (code: {code})")
        self.code = code


def check_settings(config: Env) -> None:
    """Raise ValueError if no server is configured."""
    if not config.find_plugin_section("openenv").url:
        raise ValueError("env.openenv.url is empty. Set it to the server's address, e.g. http://localhost:8000.")


@register_environment("openenv", check=check_settings, tools=None)
class OpenEnvEnvironment:
    """Environment on an OpenEnv server. The reward of the last step is the episode's score."""

    def __init__(self, services: Services):
        self._config, self._turns = services.config, services.turns
        self._settings: OpenEnv = services.config.find_plugin_section("openenv")
        self._client: aiohttp.ClientSession | None = None
        self._has_session = False

    async def reset(self, prompt: Prompt) -> Observation:
        result = await self._start_session(derive_instance_seed(self._config, prompt) % 2**31)
        text = fill_template(self._config.prompt or PROMPT, observation=self._format_observation(result["observation"]))
        return _make_observation(text)

    async def step(self, action: str) -> StepResult:
        found = read_action(action, turns=self._turns)
        fields, reason, kept = self._parse_action(found.content), found.error, found.kept_chars
        if map_texts(fields, replace_surrogates) != fields:  # would break the connection
            reason = "the action contains a lone surrogate, which is not valid Unicode"
        try:
            result = {} if reason else await self._request("step", fields)
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            reason = f"the environment rejects this action. {error}"
        if reason:
            return StepResult(_make_observation(f"invalid action: {reason}"), valid=False)
        reward = float(result.get("reward") or 0.0)
        if result.get("done"):
            return StepResult(done=True, score=Score(reward), kept_chars=kept)
        return StepResult(
            _make_observation(self._format_observation(result["observation"])), reward=reward, kept_chars=kept
        )

    async def close(self) -> None:
        _open_sessions[self._settings.url] -= self._has_session
        self._has_session = False
        if self._client is not None:
            await self._client.close()

    async def _request(self, request_type: str, data: JsonObject) -> JsonObject:
        """Send a request and return the data of the server's reply. Raises ServerError or ConnectionError."""
        with suppress(ConnectionError):  # a full server sends an error and closes the connection
            await self._socket.send_json({"type": request_type, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server env.openenv.url={self._settings.url} closed the connection")
        reply = message.json()
        if reply["type"] == "error":
            raise ServerError(reply["data"]["message"], reply["data"]["code"])
        return reply["data"]

    async def _start_session(self, seed: int) -> JsonObject:
        """Open a session on the server and return its first result. Retries while the server has no free session. The
        wait does not count towards env.episode_timeout while other episodes of this process use the server."""
        wait = FIRST_WAIT
        url = self._settings.url
        while True:
            self._client = aiohttp.ClientSession()
            self._socket = await self._client.ws_connect(f"{url.rstrip('/')}/ws", max_msg_size=MAX_MESSAGE_BYTES)
            try:
                result = await self._request("reset", {"seed": seed})
                _open_sessions[url] += 1
                self._has_session = True
                return result
            except ServerError as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                _warn_of_full_server(url, str(error))
            await self._client.close()
            with exclude_from_time_limit() if _open_sessions[url] else nullcontext():
                await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _parse_action(self, content: str) -> JsonObject:
        try:
            action = json.loads(content)
        except (ValueError, RecursionError):  # not JSON
            action = None
        return action if isinstance(action, dict) else {self._settings.action_field: content}

    def _format_observation(self, observation: JsonObject) -> str:
        field = self._settings.observation_field
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise KeyError(f"env.openenv.observation_field={field} is unknown. Use one of {', '.join(observation)}.")
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def _warn_of_full_server(url: str, server_message: str) -> None:
    logger.warning(
        "the server env.openenv.url=%s has too few sessions (%s), so some episodes wait until others end. Raise the "
        "server's max_concurrent_envs.",
        url,
        server_message,
    )


def _make_observation(text: str) -> Observation:
    return Observation([Message(role="user", content=text)])
