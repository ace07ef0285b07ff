"""Environments of the verifiers library (0.1.14), by the name that its `load_environment` takes.

Such an environment plays an episode itself and asks an OpenAI client for the model's words. Here the client is us:

    its rollout --create(messages)--> our observation ... our step(action) --completion--> its rollout --> its rubric
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import signal
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from types import SimpleNamespace
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Message, Prompt, Score

_loading = Lock()


def check(config: Env) -> None:
    """The library is there in the version that we know, and the environment can be loaded and played (ValueError)."""
    module = importlib.import_module("verifiers") if find_spec("verifiers") is not None else None
    if not hasattr(getattr(module, "Environment", None), "requires_group_rollouts"):
        got = "it is not installed" if module is None else f"here is {getattr(module, '__version__', 'another')}"
        raise ValueError(
            f"env.env_name=verifiers needs the library in version 0.1.14 ({got}): "
            "pip install -e '.[verifiers]' in the clone."
        )
    name, settings = config.verifiers.name, config.verifiers
    if not name:
        raise ValueError("env.verifiers.name is empty: give what verifiers.load_environment takes, e.g. wordle.")
    try:
        environment = _load(name, json.dumps(settings.args))
    except Exception as error:  # the environment's own code
        raise ValueError(
            f"env.verifiers.name={name}: cannot be loaded with env.verifiers.args={settings.args} "
            f"({type(error).__name__}: {error}). Install that environment, or mend the arguments."
        ) from error
    if lack := _lacking(environment):
        raise ValueError(f"env.verifiers.name={name}: {lack}. Take an environment of single chats, without tools.")


@register_environment("verifiers", check=check, tools=None)
class Verifiers:
    """One example of the environment's own data: row i of ours plays its example i (counted around), from its training
    data where extra_info.split is `train`, else from its evaluation data."""

    def __init__(self, services: Services):
        self._settings = services.config.verifiers
        self._requests: asyncio.Queue[tuple[list[Message], asyncio.Future[Any]]] = asyncio.Queue()
        self._answer: asyncio.Future[Any] | None = None
        self._chat: list[Message] = []
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, prompt: Prompt) -> Observation:
        arguments = json.dumps(self._settings.args)
        self._environment = await asyncio.to_thread(_load, self._settings.name, arguments)
        training = prompt.extra_info.get("split", "train") == "train"
        data = self._environment.get_dataset() if training else self._environment.get_eval_dataset()
        example = data[int(prompt.extra_info.get("index", prompt.id)) % len(data)]
        ours = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))
        client = importlib.import_module("verifiers.clients").OpenAIChatCompletionsClient(ours)
        self._rollout = asyncio.create_task(self._environment.rollout(example, client, "policy", {}))
        if not await self._next_request():
            raise RuntimeError(
                f"{self._settings.name} ended before it asked the model: {_error(self._rollout.result())}"
            )
        return Observation(self._chat)

    async def step(self, action: str) -> StepResult:
        assert self._answer is not None and self._rollout is not None, "step before reset"
        said = action or " "  # to verifiers an empty answer is a server's failure
        before = [*self._chat, Message(role="assistant", content=said)]
        self._answer.set_result(_completion(said))
        if not await self._next_request():
            return StepResult(done=True, score=await self._score(self._rollout.result()))
        if self._chat[: len(before)] != before:
            raise RuntimeError(
                f"{self._settings.name} rewrites the chat between two turns; only what is added can be shown"
            )
        return StepResult(Observation(self._chat[len(before) :]))

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _create(self, messages: list[dict[str, Any]], tools: Any = None, **_: Any) -> Any:
        """`client.chat.completions.create`, called by the environment's rollout."""
        if tools:
            raise NotImplementedError("environments with native tool calls are not supported")
        chat = [Message(role=message["role"], content=_text(message["content"])) for message in messages]
        answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((chat, answer))
        return await answer

    async def _next_request(self) -> bool:
        """Wait until the environment asks for words (True) or has ended (False)."""
        assert self._rollout is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return False
        self._chat, self._answer = request.result()
        return True

    async def _score(self, state: Any) -> Score:
        if error := _error(state):
            raise RuntimeError(f"{self._settings.name}: {error}")
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        reward = float(state["reward"])
        if not math.isfinite(reward):
            raise ValueError(f"{self._settings.name} gave the reward {reward}")
        return Score(reward, {name: float(value) for name, value in (state["metrics"] or {}).items()})


@lru_cache(maxsize=8)
def _load_once(name: str, arguments: str) -> Any:
    module = importlib.import_module("verifiers.envs.environment")
    # Its environments take SIGINT and SIGTERM over, which are the run's, and can be taken in the main thread only.
    module.__dict__["signal"] = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    return importlib.import_module("verifiers").load_environment(name, **json.loads(arguments))


def _load(name: str, arguments: str) -> Any:
    with _loading:
        return _load_once(name, arguments)


def _lacking(environment: Any) -> str:
    """Why it cannot be played one episode at a time as a chat; empty where it can."""
    if environment.message_type != "chat":
        return "it completes texts; only environments that chat are supported"
    if environment.requires_group_rollouts:
        return "its rubric compares the episodes of a group; only rewards of one episode are supported"
    if environment.tool_defs:
        names = ", ".join(tool.name for tool in environment.tool_defs)
        return f"the model is to call tools natively ({names}), which is not supported"
    return ""


def _completion(text: str) -> Any:
    from openai.types.chat import ChatCompletion

    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return ChatCompletion.model_validate(
        {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    )


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise NotImplementedError(f"messages of text are supported, not of {type(content).__name__}")
    return content


def _error(state: Any) -> str:
    """The error that ended an environment's rollout, with its cause; empty without one."""
    error = state["error"]
    return "" if error is None else f"{error!r} ({error.__cause__!r})"
