"""Environment classes of Gymnasium and SkyRL-Gym, and the base class for environment classes of other frameworks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from alphaapollo.environments.action_parser import Action, read_action
from alphaapollo.environments.base import Observation, Services, StepResult
from alphaapollo.environments.spaces import get_kind, read_space_action, show_observation, write_space_action
from alphaapollo.environments.text_game import derive_instance_seed
from alphaapollo.rewards.base import convert_to_float
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.json_types import JsonObject

OBSERVATION = "{observation}"  # placeholder in env.prompt
SEPARATOR = "\n\n"  # between the prompt and an observation


def choose_arguments(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """Return those of `arguments` that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


async def call(function: Callable[..., object], /, *arguments: object, **named: object) -> Any:
    """Call a function of a user's class. Sync functions run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


def list_columns(prompt: Prompt) -> JsonObject:
    """Return the columns of a row, as other frameworks pass them to environments."""
    source = {"data_source": prompt.data_source} if prompt.data_source else {}
    truth = {} if prompt.ground_truth is None else {"ground_truth": prompt.ground_truth}
    return {"prompt": prompt.content} | source | truth | prompt.extra_info | prompt.env_kwargs


class ForeignEnvironment:
    """Environment that wraps an object of a user's class. The object is made with env.settings as arguments."""

    def __init__(self, make: Callable[..., object], services: Services):
        self._make, self._config, self._turns = make, services.config, services.turns
        self._object: Any = None

    async def _create(self, **arguments: object) -> Any:
        settings = {**choose_arguments(self._make, arguments), **self._config.settings}
        self._object = await call(self._make, **settings)
        return self._object

    def _show_prompt(self, prompt: Prompt, *shown: str | list[JsonObject]) -> Observation:
        """Return the prompt with `shown`, texts or lists of parts of a message, at the end of its last message. If
        env.prompt is set, its text replaces the last message, with `shown` in place of {observation}."""
        messages = [Message(role="user", content=prompt.content)] if isinstance(prompt.content, str) else prompt.content
        pieces: list[Any] = [messages[-1]["content"], *shown]
        if self._config.prompt:
            before, place, after = self._config.prompt.partition(OBSERVATION)
            pieces = [before, *(piece for piece in shown if not place or piece != SEPARATOR), after]
        if all(isinstance(piece, str) for piece in pieces):
            content: str | list[JsonObject] = "".join(pieces)
        else:
            lists = [[{"type": "text", "text": piece}] if isinstance(piece, str) else piece for piece in pieces]
            content = [part for parts in lists for part in parts]
        return Observation([*messages[:-1], cast(Message, {**messages[-1], "content": content})])

    async def close(self) -> None:
        if callable(close := getattr(self._object, "close", None)):
            await call(close)


class _StepEnvironment(ForeignEnvironment):
    """Environment that wraps an object whose `step` returns a reward and whether the episode has ended."""

    _last_score = Score(0.0, accuracy=None)  # 0, because the turns already have the rewards of the steps

    async def score_at_limit(self) -> Score:
        return self._last_score

    def _read_success(self, info: object) -> Score:
        """Return the score that the last `info` gives: `accuracy`, `is_success` or `success` is the accuracy."""
        found = info if isinstance(info, Mapping) else {}
        names = [name for name in ("accuracy", "is_success", "success") if name in found]
        if names:
            value = found[names[0]] if names[0] == "accuracy" else bool(found[names[0]])
            self._last_score = Score(0.0, {"accuracy": convert_to_float(value, "the accuracy in info")})
        else:
            self._last_score = _StepEnvironment._last_score
        return self._last_score


class StepClass(_StepEnvironment):
    """Environment of Gymnasium (`step` with five results), or of the older gym (four).

    The action is the content of <answer>...</answer>, read by the action space (spaces.py). Without this tag, the first
    word is the action if the space is discrete, else the complete text."""

    async def reset(self, prompt: Prompt) -> Observation:
        env = await self._create()
        if hasattr(env, "num_envs"):
            raise ValueError(f"this is a vector of {env.num_envs} environments. Use one: each episode makes its own")
        self._space: Any = getattr(env, "action_space", None)
        seed = derive_instance_seed(self._config, prompt) % 2**31
        arguments = choose_arguments(env.reset, {"seed": seed, "options": prompt.env_kwargs or None})
        seed_targets: list[Any] = [self._space]
        seed_targets += [] if "seed" in arguments else [env]  # older gym, in which reset takes no seed
        for target in seed_targets:
            if callable(getattr(target, "seed", None)):
                await call(target.seed, seed)
        result = await call(env.reset, **arguments)
        shown = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        return self._show_prompt(prompt, SEPARATOR, show_observation(shown))

    def propose_action(self) -> str | None:
        """Return the text of a random action, with which the start of a run tries `step`; None if there is no space."""
        if not hasattr(self._space, "sample"):
            return None
        return f"<answer>{write_space_action(self._space, self._space.sample())}</answer>"

    async def step(self, action: str) -> StepResult:
        allows_bare_word = self._space is not None and get_kind(self._space) in ("", "Discrete")
        found = read_action(action, allow_bare_word=allows_bare_word, turns=self._turns)
        if not found.tag and not allows_bare_word:
            found = Action(content=action if self._space is None else action.strip())
        try:
            if found.error:
                raise ValueError(found.error)
            value = found.content if self._space is None else read_space_action(self._space, found.content)
        except ValueError as error:
            return StepResult(Observation([Message(role="user", content=f"invalid action: {error}")]), valid=False)
        result = await call(self._object.step, value)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise TypeError(
                "step must return (observation, reward, terminated, truncated, info), or (observation, reward, done, "
                f"info), not {result!r:.80}"
            )
        shown, reward, *ends, info = result
        done, score = any(map(bool, ends)), self._read_success(info)
        message = Message(role="user", content=show_observation(shown))
        return StepResult(
            observation=None if done else Observation([message]),
            done=done,
            reward=convert_to_float(reward, "the reward of step"),
            score=score if done else None,
            kept_chars=found.kept_chars,
        )


class ConversationClass(_StepEnvironment):
    """Environment of SkyRL-Gym: `step` takes the model's text and returns the next messages. The reward of the last
    step is the score of the episode."""

    async def reset(self, prompt: Prompt) -> Observation:
        extras = {
            **list_columns(prompt),
            "reward_spec": {"ground_truth": prompt.ground_truth},
            "max_turns": self._config.max_steps,
        }
        await self._create(env_config={}, extras=extras)
        first, _ = await call(self._object.init, self._show_prompt(prompt).messages)
        return Observation(first)

    async def step(self, action: str) -> StepResult:
        result = await call(self._object.step, action)
        reward, done = convert_to_float(result["reward"], "the reward of step"), bool(result["done"])
        parts, shown = self._read_success(result.get("metadata")).components, result.get("observations")
        if done:
            return StepResult(done=True, score=Score(reward, parts))
        return StepResult(Observation(shown) if shown else None, reward=reward)
