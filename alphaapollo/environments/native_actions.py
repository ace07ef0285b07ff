"""env.action_format=chat_template: calls as the model was trained to make them, several a turn if it likes. A turn
without a call is the answer. Nothing is cut off."""

from __future__ import annotations

import asyncio

from alphaapollo.environments.action_results import Called, broken, called, unreadable
from alphaapollo.environments.base import Answer, StepResult
from alphaapollo.tools.base import Session, ToolFailedError, ToolResult, ToolStatus
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.tools.written_calls import ReadCalls, UnreadableCallError
from alphaapollo.types import Message

NOBODY = "unknown"  # stands for the tool in the answer to a call that names none of ours


class NativeActions:
    """Actions over these tools, in texts that `read_calls` reads."""

    def __init__(self, tools: ToolBox, read_calls: ReadCalls):
        self._tools, self._read_calls = tools, read_calls

    async def take(self, text: str, session: Session) -> StepResult | Answer:
        try:
            calls = await asyncio.to_thread(self._read_calls, text)  # long texts take a parser long
        except UnreadableCallError as error:
            return unreadable(self._message(NOBODY, ToolResult(str(error), ToolStatus.REFUSED)))
        if not calls:
            return Answer(text, None)
        results: list[Called] = []
        for call in calls:
            try:
                results.append((call.name, await self._tools.call(call.name, call.arguments, session)))
            except ToolFailedError as error:
                return broken(error, call.name, results)
        return called([self._message(name, result) for name, result in results], results, None)

    def _message(self, name: str, result: ToolResult) -> Message:
        text = result.text if result.status is ToolStatus.OK else f"{result.status}: {result.text}"
        text = text.encode("utf-8", "replace").decode()  # JSON can spell lone surrogates, which end a tokenizer
        return Message(role="tool", content=text, name=name if name in self._tools.names else NOBODY)
