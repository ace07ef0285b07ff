"""Adapter for environments of the verifiers library 0.4.

A verifiers environment runs the episode itself and requests completions from a model. It runs in a process of its own
(verifiers_server.py). Each of its requests becomes an observation, and the model's action becomes the reply.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Lock

import aiohttp

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.plugins.adapters.settings import Verifiers
from alphaapollo.rewards.base import convert_to_score
from alphaapollo.types import Message, Prompt, Score

SERVER = Path(__file__).with_name("verifiers_server.py")
_start_lock = Lock()
_servers: dict[tuple[str, ...], tuple[subprocess.Popen[str], int]] = {}  # process and port of each environment


def check_settings(config: Env) -> None:
    """Raise ValueError if the library is missing, or the environment does not load or is not supported."""
    settings = config.find_plugin_section("verifiers")
    if not settings.name:
        raise ValueError("env.verifiers.name is empty. Set it to the name of an installed taskset, e.g. gsm8k-v1.")
    find_server_port(settings)


def find_server_port(settings: Verifiers) -> int:
    """Return the port of this process's server of the environment, and start the server if it does not run. It ends
    with this process. Raises ValueError if it cannot start."""
    python = settings.python or sys.executable
    key = (python, "-P", str(SERVER), settings.name, json.dumps(settings.args))
    with _start_lock:
        process, port = _servers.get(key, (None, 0))
        if process is not None and process.poll() is None:
            return port
        if shutil.which(python) is None:
            raise ValueError(f"env.verifiers.python={python} is not a program. Correct it.")
        process = subprocess.Popen(key, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline() or '{"error": "it ended without a message"}')
        if "error" in ready:
            raise ValueError(
                f"env.verifiers.name={settings.name} cannot be used with env.verifiers.args={settings.args}: "
                f"{ready['error']} (env.verifiers.python={python} needs verifiers 0.4, docs/environments.md)"
            )
        _servers[key] = process, ready["port"]
        return ready["port"]


@register_environment("verifiers", check=check_settings, tools=None)
class VerifiersEnvironment:
    """Episode of a verifiers environment. Prompt i uses task i, modulo the number of tasks."""

    def __init__(self, services: Services):
        self._settings: Verifiers = services.config.find_plugin_section("verifiers")
        self._client: aiohttp.ClientSession | None = None
        self._chat: list[Message] = []

    async def reset(self, prompt: Prompt) -> Observation:
        port = await asyncio.to_thread(find_server_port, self._settings)
        index = int(prompt.extra_info.get("index", prompt.id))
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(f"http://127.0.0.1:{port}/episode/{index}", max_msg_size=0)
        if await self._receive() is not None:
            raise RuntimeError(f"environment {self._settings.name} ended before its first model request")
        return Observation(self._chat)

    async def step(self, action: str) -> StepResult:
        text = action.encode("utf-8", "replace").decode()  # verifiers rejects lone surrogates
        before = [*self._chat, Message(role="assistant", content=text)]
        await self._socket.send_json({"answer": text})
        if (score := await self._receive()) is not None:
            return StepResult(done=True, score=score)
        if self._chat[: len(before)] != before:
            raise RuntimeError(
                f"the verifiers environment {self._settings.name} changed earlier messages; it may only append messages"
            )
        return StepResult(Observation(self._chat[len(before) :]))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _receive(self) -> Score | None:
        """Wait for the next model request and keep its messages. Returns the score if the episode ended instead."""
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the process of the verifiers environment {self._settings.name} ended")
        found = message.json()
        if "messages" not in found:
            if found["error"]:
                raise RuntimeError(f"{self._settings.name}: {found['error']}")
            return convert_to_score({**found["metrics"], "reward": found["reward"]})
        if not all(isinstance(one["content"], str) for one in found["messages"]):
            raise NotImplementedError("verifiers environments with messages that are not plain text are not supported")
        self._chat = [Message(role=one["role"], content=one["content"]) for one in found["messages"]]
        return None
