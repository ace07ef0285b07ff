"""Action handlers: read a model's text and make its tool calls, or return its final answer.

env.action_format=tags           one action a turn, `<tool>...</tool> or <answer>...</answer>`; the rest is cut off
                  chat_template  calls in the model's own format, several a turn, read by a parser; nothing is cut off,
                                 and a turn without a call is the answer
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence

from alphaapollo.environments.base import FinalAnswer, Observation, Services, StepResult
from alphaapollo.environments.tag_parser import read_action
from alphaapollo.tools.base import Session, ToolFailedError, ToolResult, ToolStatus
from alphaapollo.tools.tool_calls import ToolCallParseError, ToolCallParser
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Message, Outcome, Score

ANSWER = "answer"
UNKNOWN_TOOL = "unknown"  # the tool's name in the reply to a call that names no known tool


class TagActionHandler:
    """Reads one action in a tag. Without tools the only action is an answer. The session has the episode's state."""

    def __init__(self, tools: ToolBox | None):
        self._tools = tools
        self._tags = [*(tools.names if tools else []), ANSWER]

    async def handle(self, text: str, session: Session) -> StepResult | FinalAnswer:
        """Execute the action in a model's text.

        A StepResult is complete: return it from `step`. Unreadable and refused calls are invalid turns with a message
        to the model. A tool that fails ends the episode as an environment failure: masked, without a reward.
        """
        found = read_action(text, self._tags)
        if found.problem:
            return _unreadable(_tag_message(ToolResult(found.problem, ToolStatus.REFUSED)))
        if found.kind == ANSWER:
            return FinalAnswer(text[: found.kept_chars], found.kept_chars)
        assert self._tools is not None
        try:
            result = await self._tools.call_text(found.kind, found.content, session)
        except ToolFailedError as error:
            return _tool_failure(error, found.kind, [])
        return _call_result([_tag_message(result)], [(found.kind, result)], found.kept_chars)


class ChatTemplateActionHandler:
    """Reads tool calls with a parser and replies with messages of the role `tool`."""

    def __init__(self, tools: ToolBox, parse_calls: ToolCallParser):
        self._tools, self._parse_calls = tools, parse_calls

    async def handle(self, text: str, session: Session) -> StepResult | FinalAnswer:
        try:
            calls = await asyncio.to_thread(self._parse_calls, text)  # parsing a long text takes long
        except ToolCallParseError as error:
            return _unreadable(self._message(UNKNOWN_TOOL, ToolResult(str(error), ToolStatus.REFUSED)))
        if not calls:
            return FinalAnswer(text)
        results: list[tuple[str, ToolResult]] = []
        for call in calls:
            try:
                results.append((call.name, await self._tools.call(call.name, call.arguments, session)))
            except ToolFailedError as error:
                return _tool_failure(error, call.name, results)
        return _call_result([self._message(name, result) for name, result in results], results, None)

    def _message(self, name: str, result: ToolResult) -> Message:
        text = result.text if result.status is ToolStatus.OK else f"{result.status}: {result.text}"
        text = text.encode("utf-8", "replace").decode()  # JSON can spell lone surrogates, which tokenizers reject
        return Message(role="tool", content=text, name=name if name in self._tools.names else UNKNOWN_TOOL)


ActionHandler = TagActionHandler | ChatTemplateActionHandler


def make_action_handler(services: Services) -> ActionHandler:
    """Handler of env.action_format over the tools of the services."""
    if services.config.action_format == "tags":
        return TagActionHandler(services.tools)
    assert services.tools is not None and services.parse_calls is not None, "checked when a run starts"
    return ChatTemplateActionHandler(services.tools, services.parse_calls)


def _tag_message(result: ToolResult) -> Message:
    response = json.dumps({"status": result.status, "text": result.text}, ensure_ascii=False)
    return Message(role="user", content=f"<tool_response>{response}</tool_response>")


def _call_result(
    messages: list[Message], results: Sequence[tuple[str, ToolResult]], kept_chars: int | None
) -> StepResult:
    is_valid = all(result.status is not ToolStatus.REFUSED for _, result in results)
    return StepResult(
        Observation(messages), valid=is_valid, kept_chars=kept_chars, info={"tool_calls": _log_entries(results)}
    )


def _unreadable(message: Message) -> StepResult:
    """Turn without a readable action. Its text is not cut, so that a penalty applies to what caused it."""
    return StepResult(Observation([message]), valid=False, info={"tool_status": "unreadable"})


def _tool_failure(error: ToolFailedError, name: str, before: Sequence[tuple[str, ToolResult]]) -> StepResult:
    """End of an episode in which the tool `name` failed, after the calls `before` in the same turn."""
    failed = {"tool": name, "status": "failed", "seconds": 0.0}
    score = Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=str(error))
    return StepResult(done=True, score=score, info={"tool_calls": [*_log_entries(before), failed]})


def _log_entries(results: Sequence[tuple[str, ToolResult]]) -> list[dict[str, object]]:
    return [
        {"tool": name[:100], "status": str(result.status), "seconds": result.seconds}
        | ({} if result.score is None else {"score": result.score})
        for name, result in results
    ]
