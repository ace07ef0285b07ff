"""env.action_format=tags: one action a turn, `<tool>...</tool>` or `<answer>...</answer>`. What follows it is cut off
and not trained on."""

from __future__ import annotations

import json

from alphaapollo.environments.action_results import broken, called, unreadable
from alphaapollo.environments.base import Answer, StepResult
from alphaapollo.environments.read_tags import Unreadable, read_action
from alphaapollo.tools.base import Session, ToolFailedError, ToolStatus
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Message

ANSWER = "answer"


class TagActions:
    """Actions over these tools (None: the model can only answer)."""

    def __init__(self, tools: ToolBox | None):
        self._tools = tools
        self._tags = [*(tools.names if tools else []), ANSWER]

    async def take(self, text: str, session: Session) -> StepResult | Answer:
        found = read_action(text, self._tags)
        if isinstance(found, Unreadable):
            return unreadable(_response(ToolStatus.REFUSED, found.problem))
        if found.kind == ANSWER:
            return Answer(text if found.kept_chars is None else text[: found.kept_chars], found.kept_chars)
        assert self._tools is not None
        try:
            result = await self._tools.call_text(found.kind, found.content, session)
        except ToolFailedError as error:
            return broken(error, found.kind)
        return called([_response(result.status, result.text)], [(found.kind, result)], found.kept_chars)


def _response(status: str, text: str) -> Message:
    response = json.dumps({"status": status, "text": text}, ensure_ascii=False)
    return Message(role="user", content=f"<tool_response>{response}</tool_response>")
