"""Action handlers: execute the tool calls in the text of a turn, or return the final answer in it.

env.action_format=tags           one action per turn, <TOOL>...</TOOL> or <answer>...</answer>; later text is cut off
                  chat_template  tool calls in the format of the model's chat template, any number per turn; nothing is
                                 cut off, and a turn without a tool call is the answer
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence

from alphaapollo.environments.base import FinalAnswer, Observation, Services, StepResult
from alphaapollo.environments.tag_parser import read_action
from alphaapollo.tools.base import Session, ToolCallParseError, ToolCallParser, ToolFailedError, ToolResult, ToolStatus
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import IMAGE_MARK, Message, Outcome, Score

ANSWER = "answer"
UNKNOWN_TOOL = "unknown"  # tool name in the reply to a call of an unknown tool


class TagActionHandler:
    """Handler for env.action_format=tags, one action per turn. Without tools, the only action is the answer."""

    def __init__(self, tools: ToolBox | None, sees_images: bool = False):
        self._tools, self._sees_images = tools, sees_images
        self._tags = [*(tools.names if tools else []), ANSWER]

    async def handle(self, text: str, session: Session) -> StepResult | FinalAnswer:
        """Execute the action in the text of a turn. `session`: state of the tools in this episode.

        Returns the final answer, or the result that the environment's `step` should return. A call that cannot be read
        or has invalid arguments is an invalid turn, and the model gets a message. If a tool itself fails, the episode
        ends as an environment failure: it has no reward and is not trained on.
        """
        found = read_action(text, self._tags)
        if found.error:
            return _make_invalid_step(_make_tool_response_message(ToolResult(found.error, ToolStatus.REFUSED)))
        if found.tag == ANSWER:
            return FinalAnswer(text[: found.kept_chars], found.kept_chars)
        assert self._tools is not None
        try:
            result = await self._tools.call_text(found.tag, found.content, session)
        except ToolFailedError as error:
            return _make_failed_tool_step(error, found.tag, [])
        message = _make_tool_response_message(result)
        if self._sees_images:
            message = _add_images(message, result)
        return _make_tool_call_step([message], [(found.tag, result)], found.kept_chars)


class ChatTemplateActionHandler:
    """Handler for env.action_format=chat_template. It executes the tool calls that `parse_calls` finds in the text of
    a turn, and replies with messages of the role `tool`."""

    def __init__(self, tools: ToolBox, parse_calls: ToolCallParser, sees_images: bool = False):
        self._tools, self._parse_calls, self._sees_images = tools, parse_calls, sees_images

    async def handle(self, text: str, session: Session) -> StepResult | FinalAnswer:
        try:
            calls = await asyncio.to_thread(self._parse_calls, text)  # in a thread, because parsing a long text is slow
        except ToolCallParseError as error:
            return _make_invalid_step(self._make_tool_message(UNKNOWN_TOOL, ToolResult(str(error), ToolStatus.REFUSED)))
        if not calls:
            return FinalAnswer(text)
        results: list[tuple[str, ToolResult]] = []
        for call in calls:
            try:
                results.append((call.name, await self._tools.call(call.name, call.arguments, session)))
            except ToolFailedError as error:
                return _make_failed_tool_step(error, call.name, results)
        return _make_tool_call_step([self._make_tool_message(name, result) for name, result in results], results, None)

    def _make_tool_message(self, name: str, result: ToolResult) -> Message:
        text = result.text if result.status is ToolStatus.OK else f"{result.status}: {result.text}"
        text = text.encode("utf-8", "replace").decode()  # JSON may encode lone surrogates, which tokenizers reject
        message = Message(role="tool", content=text, name=name if name in self._tools.names else UNKNOWN_TOOL)
        return _add_images(message, result) if self._sees_images else message


ActionHandler = TagActionHandler | ChatTemplateActionHandler


def make_action_handler(services: Services) -> ActionHandler:
    """Create the action handler for env.action_format, with the tools of `services`."""
    if services.config.action_format == "tags":
        return TagActionHandler(services.tools, services.sees_images)
    assert services.tools is not None and services.parse_calls is not None, "checked when a run starts"
    return ChatTemplateActionHandler(services.tools, services.parse_calls, services.sees_images)


def _make_tool_response_message(result: ToolResult) -> Message:
    response = json.dumps({"status": result.status, "text": result.text}, ensure_ascii=False)
    return Message(role="user", content=f"<tool_response>{response}</tool_response>")


def _add_images(message: Message, result: ToolResult) -> Message:
    """Add the images of a tool's result after the text of its message."""
    if not result.images:
        return message
    text = message["content"].replace(IMAGE_MARK, "")  # each mark shows an image
    return Message({**message, "content": text + IMAGE_MARK * len(result.images), "images": [*result.images]})


def _make_tool_call_step(
    messages: list[Message], results: Sequence[tuple[str, ToolResult]], kept_chars: int | None
) -> StepResult:
    """Return the result of a turn with tool calls. `messages`: replies to the model; `results`: (tool name, result)."""
    is_valid = all(result.status is not ToolStatus.REFUSED for _, result in results)
    return StepResult(
        Observation(messages), valid=is_valid, kept_chars=kept_chars, info={"tool_calls": _describe_tool_calls(results)}
    )


def _make_invalid_step(message: Message) -> StepResult:
    """Return the result of a turn without a readable action: the turn is invalid, and all its text is kept."""
    return StepResult(Observation([message]), valid=False, info={"tool_status": "unreadable"})


def _make_failed_tool_step(error: ToolFailedError, tool: str, results: Sequence[tuple[str, ToolResult]]) -> StepResult:
    """Return the step result that ends an episode because `tool` failed. results: (tool, result) of earlier calls."""
    failed = {"tool": tool, "status": "failed", "seconds": 0.0}
    score = Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=str(error))
    return StepResult(done=True, score=score, info={"tool_calls": [*_describe_tool_calls(results), failed]})


def _describe_tool_calls(results: Sequence[tuple[str, ToolResult]]) -> list[dict[str, object]]:
    return [
        {"tool": name[:100], "status": str(result.status), "seconds": result.seconds}
        | ({} if result.score is None else {"score": result.score})
        for name, result in results
    ]
