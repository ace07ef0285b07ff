"""Checks of what an environment, which is user code, returns from `reset` and `step`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import TypeVar

from alphaapollo.data.chats import add_system_message
from alphaapollo.data.image_messages import convert_messages
from alphaapollo.environments.base import EnvironmentFailure, Observation, StepResult, wrap_environment_errors
from alphaapollo.rewards.base import MAX_REWARD
from alphaapollo.types import Message, Score

T = TypeVar("T")


def check_reset_reply(reply: object, system_prompt: str = "") -> list[Message] | str:
    """Return the prompt from the result of an environment's `reset`, with `system_prompt` if it is not empty and there
    is no system message. Raises EnvironmentFailure if the result is invalid."""
    if isinstance(reply, str):
        return add_system_message([Message(role="user", content=reply)], system_prompt) if system_prompt else reply
    observation = _check_type(reply, Observation, "the result of reset", "an Observation or a str")
    return add_system_message(check_messages(observation.messages, "reset"), system_prompt)


def check_step_reply(reply: object) -> StepResult:
    """Check and return the result of an environment's `step`. Raises EnvironmentFailure if it is invalid."""
    result = _check_type(reply, StepResult, "the result of step", "a StepResult")
    if not result.done and result.observation is None:
        raise EnvironmentFailure("step returned neither done=True nor an observation. Return one of them.")
    if result.observation is not None:
        _check_type(result.observation, Observation, "step: observation", "an Observation")
        result = replace(result, observation=Observation(check_messages(result.observation.messages, "step")))
    _check_number(result.reward, "reward")
    if result.score is not None:
        check_score(result.score, "step: score")
    if result.kept_chars is not None:
        _check_type(result.kept_chars, int, "step: kept_chars", "an int")
    if not isinstance(result.info, dict) or not all(isinstance(key, str) for key in result.info):
        raise EnvironmentFailure(f"step: info={str(result.info)[:80]} must be a dict with str keys.")
    calls = result.info.get("tool_calls", ())  # read by the metrics
    if not isinstance(calls, list | tuple):
        calls = [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("status"), str):
            raise EnvironmentFailure("step: info['tool_calls'] must be a list of dicts with status and seconds.")
        _check_number(call.get("seconds"), "info['tool_calls']: seconds")
    return result


def check_score(score: object, name: str) -> Score:
    """Check and return a score of an environment. Raises EnvironmentFailure if it is invalid."""
    checked = _check_type(score, Score, name, "a Score")
    if not checked.outcome.failed:
        _check_number(checked.reward, "score.reward")
        for component, value in checked.components.items():
            _check_number(value, f"score.components[{component!r}]")
    return checked


def check_messages(messages: object, method_name: str) -> list[Message]:
    """Check chat messages returned by an environment, and convert images to the form of Message. Raises
    EnvironmentFailure if they are invalid."""
    if not isinstance(messages, list) or not messages:
        raise EnvironmentFailure(f"{method_name}: messages must be a non-empty list, not {messages!r:.80}.")
    has_images = False
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        has_parts = isinstance(fields.get("content"), list)
        if not isinstance(fields.get("role"), str) or not (isinstance(fields.get("content"), str) or has_parts):
            raise EnvironmentFailure(f"{method_name}: invalid message {message!s:.80}. role and content must be str.")
        has_images |= has_parts or fields.get("images") is not None
    if not has_images:
        return messages
    with wrap_environment_errors(f"{method_name}: images"):
        return convert_messages(messages)


def _check_type(value: object, expected: type[T], field_name: str, expected_text: str) -> T:
    if not isinstance(value, expected):
        raise EnvironmentFailure(f"{field_name} must be {expected_text}, not {type(value).__name__}.")
    return value


def _check_number(value: object, field_name: str) -> None:
    if not isinstance(value, Real) or not abs(value) <= MAX_REWARD:  # type: ignore[operator]  # also rejects NaN
        shown = str(value)[:30] if isinstance(value, Real) else type(value).__name__
        raise EnvironmentFailure(
            f"step: {field_name} is {shown}. Return a number from -{MAX_REWARD:g} to {MAX_REWARD:g}."
        )
