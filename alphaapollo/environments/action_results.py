"""What a turn comes to, in any format: the calls were carried out or refused, nothing could be read, a tool broke."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from alphaapollo.environments.base import Observation, StepResult
from alphaapollo.tools.base import ToolFailedError, ToolResult, ToolStatus
from alphaapollo.types import Message, Outcome, Score

Called = tuple[str, ToolResult]  # the tool's name as the model wrote it, and what came of the call


def called(messages: Sequence[Message], results: Sequence[Called], kept_chars: int | None) -> StepResult:
    """The turn after calls (name, result) that were carried out or refused."""
    return StepResult(
        Observation(list(messages)),
        valid=all(result.status is not ToolStatus.REFUSED for _, result in results),
        kept_chars=kept_chars,
        info={"tool_calls": [_noted(name, result) for name, result in results]},
    )


def unreadable(message: Message) -> StepResult:
    """A turn in which no action could be read; `message` tells the model so. The text stays whole, so that what a
    penalty is for stays in it."""
    return StepResult(Observation([message]), valid=False, info={"tool_status": "unreadable"})


def broken(error: ToolFailedError, name: str, before: Sequence[Called] = ()) -> StepResult:
    """The tool `name` broke after the calls `before`."""
    failed = {"tool": name, "status": "failed", "seconds": 0.0}
    return StepResult(
        done=True,
        score=Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=str(error)),
        info={"tool_calls": [*(_noted(*call) for call in before), failed]},
    )


def _noted(name: str, result: ToolResult) -> dict[str, Any]:
    note = {"tool": name[:100], "status": str(result.status), "seconds": result.seconds}
    return note if result.score is None else note | {"score": result.score}
