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

from alphaapollo.environments.action_parser import read_action
from alphaapollo.environments.base import FinalAnswer, Observation, Services, StepResult
from alphaapollo.rewards.base import add_marks
from alphaapollo.tools.base import (
    Session,
    ToolCall,
    ToolCallParseError,
    ToolCallParser,
    ToolFailedError,
    ToolResult,
    ToolStatus,
)
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import IMAGE_MARK, Json, JsonObject, Message, Outcome, Score, Turn

ANSWER = "answer"
UNKNOWN_TOOL = "unknown"  # tool name in the reply to a call of an unknown tool


class ActionHandler:
    """Handler of the actions of env.action_format. Without `parse_calls`, the format is tags; without `tools`, the only
    action is the answer."""

    def __init__(
        self,
        tools: ToolBox | None,
        parse_calls: ToolCallParser | None = None,
        sees_images: bool = False,
        turns: Sequence[Turn] = (),
    ):
        self._tools, self._parse_calls, self._sees_images, self._turns = tools, parse_calls, sees_images, turns

    async def handle(self, text: str, session: Session) -> StepResult | FinalAnswer:
        """Execute the action in the text of a turn. Returns the final answer, or what `step` should return: a call that
        cannot be read is an invalid turn, and if a tool itself fails, the episode ends as an environment failure."""
        calls, message_info = list[tuple[str, Json]](), JsonObject()
        if self._parse_calls is None:
            tool_names = self._tools.names if self._tools else []
            action = read_action(text, [*tool_names, ANSWER], turns=self._turns)
            if action.tag == ANSWER:
                return FinalAnswer(text[: action.kept_chars], action.kept_chars)
            calls, kept_chars, error = [(action.tag, action.content)], action.kept_chars, action.error
        else:
            kept_chars, error = None, ""
            try:  # in a thread, because parsing a long text is slow
                parsed = await asyncio.to_thread(self._parse_calls, add_marks(text, self._turns))
                calls = [(call.name, call.arguments) for call in parsed]
                message_info = {"message": _make_call_message(parsed)} if parsed else {}
            except ToolCallParseError as parse_error:
                error = str(parse_error)
            if not calls and not error:
                return FinalAnswer(text)
        if error:
            message = self._make_message(UNKNOWN_TOOL, ToolResult(error, ToolStatus.REFUSED))
            return StepResult(Observation([message]), valid=False, info={"tool_status": "unreadable"})
        assert self._tools is not None
        call_tool = self._tools.call_text if self._parse_calls is None else self._tools.call
        results: list[tuple[str, ToolResult]] = []
        for name, arguments in calls:
            try:
                results.append((name, await call_tool(name, arguments, session)))
            except ToolFailedError as failure:
                described = [*_describe_tool_calls(results), {"tool": name, "status": "failed", "seconds": 0.0}]
                score = Score(math.nan, outcome=Outcome.ENVIRONMENT_FAILED, reason=str(failure))
                return StepResult(done=True, score=score, info={"tool_calls": described})
        return StepResult(
            Observation([self._make_message(name, result) for name, result in results]),
            valid=all(result.status is not ToolStatus.REFUSED for _, result in results),
            kept_chars=kept_chars,
            info={"tool_calls": _describe_tool_calls(results)} | message_info,
        )

    def _make_message(self, name: str, result: ToolResult) -> Message:
        """Return the reply to a call, with the images of the tool's result after its text."""
        if self._parse_calls is None:
            response = json.dumps({"status": result.status, "text": result.text}, ensure_ascii=False)
            message = Message(role="user", content=f"<tool_response>{response}</tool_response>")
        else:
            text = result.text if result.status is ToolStatus.OK else f"{result.status}: {result.text}"
            text = text.encode("utf-8", "replace").decode()  # JSON may encode lone surrogates, which tokenizers reject
            is_known = self._tools is not None and name in self._tools.names
            message = Message(role="tool", content=text, name=name if is_known else UNKNOWN_TOOL)
        if not self._sees_images or not result.images:
            return message
        text = message["content"].replace(IMAGE_MARK, "")  # each mark shows an image
        return Message({**message, "content": text + IMAGE_MARK * len(result.images), "images": [*result.images]})


def make_action_handler(services: Services) -> ActionHandler:
    """Create the action handler for env.action_format, with the tools of `services`."""
    parse_calls = services.parse_calls if services.config.action_format == "chat_template" else None
    return ActionHandler(services.tools, parse_calls, services.sees_images, services.turns)


def _make_call_message(calls: Sequence[ToolCall]) -> JsonObject:
    """Return the message of a turn with calls, as TRL's reward functions read it. Invalid JSON arguments are texts."""
    shown = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
        shown.append({"type": "function", "function": {"name": call.name, "arguments": arguments}})
    return {"role": "assistant", "content": calls[0].content, "tool_calls": shown}


def _describe_tool_calls(results: Sequence[tuple[str, ToolResult]]) -> list[dict[str, object]]:
    return [
        {"tool": name[:100], "status": str(result.status), "seconds": result.seconds}
        | ({} if result.score is None else {"score": result.score})
        for name, result in results
    ]
