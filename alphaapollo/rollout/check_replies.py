"""Validate what environments return, which is user code, before it is used."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from alphaapollo.environments.base import EnvironmentFailure, Observation, StepResult
from alphaapollo.rewards.base import MAX_REWARD
from alphaapollo.types import Message, Score


def check_first(reply: object) -> list[Message] | str:
    """Validate the result of `reset`: a text or an Observation. Raises EnvironmentFailure."""
    if isinstance(reply, str):
        return reply
    if not isinstance(reply, Observation):
        raise EnvironmentFailure(f"reset returned {_kind(reply)}; return an Observation or a str")
    return check_messages(reply.messages, "reset")


def check_step(reply: object) -> StepResult:
    """Validate the result of `step`: a StepResult with fields of the right types. Raises EnvironmentFailure."""
    if not isinstance(reply, StepResult):
        raise EnvironmentFailure(f"step returned {_kind(reply)}; return a StepResult")
    if not reply.done and reply.observation is None:
        raise EnvironmentFailure("step returned neither done=True nor an observation; return one of them")
    if reply.observation is not None:
        if not isinstance(reply.observation, Observation):
            raise EnvironmentFailure(f"step: observation is {_kind(reply.observation)}; return an Observation")
        check_messages(reply.observation.messages, "step")
    _check_number(reply.reward, "reward")
    if reply.score is not None:
        _check_score(reply.score)
    if reply.kept_chars is not None and not isinstance(reply.kept_chars, int):
        raise EnvironmentFailure(f"step: kept_chars is {_kind(reply.kept_chars)}; return a number of characters")
    if not isinstance(reply.info, dict) or not all(isinstance(key, str) for key in reply.info):
        raise EnvironmentFailure("step: info must be a dict with str keys")
    _check_calls(reply.info.get("tool_calls", ()))
    return reply


def check_messages(messages: Any, method: str) -> list[Message]:
    """Validate a list of chat messages. Raises EnvironmentFailure."""
    if not isinstance(messages, list) or not messages:
        got = _kind(messages) if messages else "empty"
        raise EnvironmentFailure(f"{method}: messages is {got}; return a non-empty list")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise EnvironmentFailure(f"{method}: invalid message {str(message)[:80]}; role and content must be str")
    return messages


def _check_score(score: object) -> None:
    if not isinstance(score, Score):
        raise EnvironmentFailure(f"step: score is {_kind(score)}; return a Score")
    if not score.outcome.failed:
        _check_number(score.reward, "score.reward")
        for name, value in score.components.items():
            _check_number(value, f"score.components[{name!r}]")


def _check_calls(calls: Any) -> None:
    """Validate info['tool_calls'], which the metrics read."""
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        if not isinstance(call, dict) or not isinstance(call.get("status"), str):
            raise EnvironmentFailure("step: info['tool_calls'] must be a list of {status, seconds, ...}")
        _check_number(call.get("seconds"), "info['tool_calls']: seconds")


def _check_number(value: object, what: str) -> None:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_REWARD:  # nan, too
        got = f"{number:g}" if isinstance(value, Real) else _kind(value)
        raise EnvironmentFailure(f"step: {what} is {got}; return a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")


def _kind(value: object) -> str:
    return type(value).__name__
