"""Validate the return values of environments, which are user code."""

from __future__ import annotations

from numbers import Real
from typing import Any

from alphaapollo.environments.base import EnvironmentFailure, Observation, StepResult
from alphaapollo.rewards.base import MAX_REWARD
from alphaapollo.types import Message, Score


def check_reset_reply(reply: Any) -> list[Message] | str:
    """Return the prompt from the result of `reset`. Raises EnvironmentFailure unless it is a str or an Observation."""
    if isinstance(reply, str):
        return reply
    _check_type(reply, Observation, "reset returned", "an Observation or a str")
    return check_messages(reply.messages, "reset")


def check_step_reply(reply: Any) -> StepResult:
    """Return the result of `step`. Raises EnvironmentFailure unless it is a StepResult with valid fields."""
    _check_type(reply, StepResult, "step returned", "a StepResult")
    result: StepResult = reply
    if not result.done and result.observation is None:
        raise EnvironmentFailure("step returned neither done=True nor an observation. Return one of them.")
    if result.observation is not None:
        _check_type(result.observation, Observation, "step: observation is", "an Observation")
        check_messages(result.observation.messages, "step")
    _check_number(result.reward, "reward")
    if result.score is not None:
        _check_type(result.score, Score, "step: score is", "a Score")
        if not result.score.outcome.failed:
            _check_number(result.score.reward, "score.reward")
            for name, value in result.score.components.items():
                _check_number(value, f"score.components[{name!r}]")
    if result.kept_chars is not None:
        _check_type(result.kept_chars, int, "step: kept_chars is", "a number of characters")
    if not isinstance(result.info, dict) or not all(isinstance(key, str) for key in result.info):
        raise EnvironmentFailure("step: info must be a dict with str keys.")
    calls = result.info.get("tool_calls", ())  # read by the metrics
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        if not isinstance(call, dict) or not isinstance(call.get("status"), str):
            raise EnvironmentFailure("step: info['tool_calls'] must be a list of dicts with status and seconds.")
        _check_number(call.get("seconds"), "info['tool_calls']: seconds")
    return result


def check_messages(messages: Any, method: str) -> list[Message]:
    """Return chat messages. Raises EnvironmentFailure unless they are a non-empty list with role and content."""
    if not isinstance(messages, list) or not messages:
        got = type(messages).__name__ if messages else "empty"
        raise EnvironmentFailure(f"{method}: messages is {got}. Return a non-empty list.")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise EnvironmentFailure(f"{method}: invalid message {str(message)[:80]}. role and content must be str.")
    return messages


def _check_type(value: Any, expected: type, subject: str, hint: str) -> None:
    if not isinstance(value, expected):
        raise EnvironmentFailure(f"{subject} {type(value).__name__}. Return {hint}.")


def _check_number(value: Any, subject: str) -> None:
    if not isinstance(value, Real) or not abs(value) <= MAX_REWARD:  # type: ignore[operator]  # also rejects NaN
        got = str(value)[:30] if isinstance(value, Real) else type(value).__name__
        raise EnvironmentFailure(f"step: {subject} is {got}. Return a number from -{MAX_REWARD:g} to {MAX_REWARD:g}.")
