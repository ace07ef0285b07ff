"""Adapter for environments of the verifiers library (0.1.14).

A verifiers environment runs the episode itself and requests completions from an OpenAI client. The adapter acts as this
client. Each request of the environment becomes an observation, and the model's action becomes the reply:

    request: client.chat.completions.create(messages) -> Observation      reply: step(action) -> ChatCompletion
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from types import SimpleNamespace
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Message, Prompt, Score

_load_lock = Lock()


def check_settings(config: Env) -> None:
    """Raise ValueError if the library's version is wrong, or the environment does not load or is not supported."""
    module = importlib.import_module("verifiers") if find_spec("verifiers") is not None else None
    if not hasattr(getattr(module, "Environment", None), "requires_group_rollouts"):
        raise ValueError(
            "env.env_name=verifiers needs the library verifiers 0.1. Install it: pip install -e '.[verifiers]'"
        )
    name, arguments = config.verifiers.name, config.verifiers.args
    if not name:
        raise ValueError("env.verifiers.name is empty. Set it to a name for verifiers.load_environment, e.g. wordle.")
    try:
        environment = _load_environment(name, json.dumps(arguments))
    except Exception as error:  # environment code may raise anything
        raise ValueError(
            f"env.verifiers.name={name} cannot be loaded with env.verifiers.args={arguments} "
            f"({type(error).__name__}: {error}). Install that environment or correct the arguments."
        ) from error
    if reason := _explain_unsupported_feature(environment):
        raise ValueError(f"env.verifiers.name={name}: {reason}. Use another verifiers environment.")


@register_environment("verifiers", check=check_settings, tools=None)
class VerifiersEnvironment:
    """Episode of a verifiers environment. Prompt i uses example i (modulo the number of examples) of the training data
    if extra_info.split is `train`, else of the evaluation data."""

    def __init__(self, services: Services):
        self._settings = services.config.verifiers
        self._requests: asyncio.Queue[tuple[list[Message], asyncio.Future[Any]]] = asyncio.Queue()
        self._answer: asyncio.Future[Any] | None = None
        self._chat: list[Message] = []
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, prompt: Prompt) -> Observation:
        arguments = json.dumps(self._settings.args)
        self._environment = await asyncio.to_thread(_load_environment, self._settings.name, arguments)
        is_training = prompt.extra_info.get("split", "train") == "train"
        data = self._environment.get_dataset() if is_training else self._environment.get_eval_dataset()
        example = data[int(prompt.extra_info.get("index", prompt.id)) % len(data)]
        completions = SimpleNamespace(create=self._create_completion)
        openai_client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        client = importlib.import_module("verifiers.clients").OpenAIChatCompletionsClient(openai_client)
        self._rollout = asyncio.create_task(self._environment.rollout(example, client, "policy", {}))
        if not await self._wait_for_model_request():
            reason = _describe_rollout_error(self._rollout.result())
            raise RuntimeError(f"environment {self._settings.name} ended before its first model request ({reason})")
        return Observation(self._chat)

    async def step(self, action: str) -> StepResult:
        assert self._answer is not None and self._rollout is not None, "step before reset"
        content = action or " "  # verifiers treats an empty answer as a server failure
        before = [*self._chat, Message(role="assistant", content=content)]
        self._answer.set_result(_make_chat_completion(content))
        if not await self._wait_for_model_request():
            return StepResult(done=True, score=await self._score_rollout(self._rollout.result()))
        if self._chat[: len(before)] != before:
            raise RuntimeError(
                f"the verifiers environment {self._settings.name} changed earlier messages; it may only append messages"
            )
        return StepResult(Observation(self._chat[len(before) :]))

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _create_completion(self, messages: list[dict[str, Any]], tools: Any = None, **_: Any) -> Any:
        """Receive a request of the verifiers environment, and return the model's completion as soon as it is known."""
        if tools or not all(isinstance(message["content"], str) for message in messages):
            feature = "native tool calls" if tools else "messages that are not plain text"
            raise NotImplementedError(f"verifiers environments with {feature} are not supported")
        chat = [Message(role=message["role"], content=message["content"]) for message in messages]
        answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((chat, answer))
        return await answer

    async def _wait_for_model_request(self) -> bool:
        """Wait for the next request of the verifiers environment. Returns False if the episode ended instead."""
        assert self._rollout is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return False
        self._chat, self._answer = request.result()
        return True

    async def _score_rollout(self, state: Any) -> Score:
        if error := _describe_rollout_error(state):
            raise RuntimeError(f"{self._settings.name}: {error}")
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return Score(float(state["reward"]), {name: float(value) for name, value in (state["metrics"] or {}).items()})


def _load_environment(name: str, arguments: str) -> Any:
    """Load a verifiers environment, or return the one that is loaded already. `arguments`: JSON."""
    with _load_lock:
        return _load_cached_environment(name, arguments)


@lru_cache(maxsize=8)
def _load_cached_environment(name: str, arguments: str) -> Any:
    module = importlib.import_module("verifiers.envs.environment")
    # verifiers environments would replace the run's handlers of SIGINT and SIGTERM.
    module.__dict__["signal"] = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    return importlib.import_module("verifiers").load_environment(name, **json.loads(arguments))


def _explain_unsupported_feature(environment: Any) -> str:
    """Return why a verifiers environment is not supported; empty if it is supported."""
    if environment.message_type != "chat":
        return "it completes texts; only chat environments are supported"
    if environment.requires_group_rollouts:
        return "its rubric compares the episodes of a group; only rewards of single episodes are supported"
    if environment.tool_defs:
        names = ", ".join(tool.name for tool in environment.tool_defs)
        return f"it uses native tool calls ({names}), which are not supported"
    return ""


def _make_chat_completion(text: str) -> Any:
    from openai.types.chat import ChatCompletion

    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return ChatCompletion.model_validate(
        {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    )


def _describe_rollout_error(state: Any) -> str:
    """Return the error that ended a verifiers rollout, with its cause; empty if none. `state`: the rollout's result."""
    error = state["error"]
    return "" if error is None else f"{error!r} ({error.__cause__!r})"
