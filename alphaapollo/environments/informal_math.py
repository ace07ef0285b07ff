r"""Maths problems in words, with tools.

    question -> <think>...</think><python_code>48/2</python_code>
             -> <tool_response>{"status": "ok", "text": "24.0\n"}</tool_response>
             -> <think>...</think><answer>\boxed{24}</answer> -> the reward function of the row's data_source

Each turn is one action: a call of one tool, or the answer. What follows it is cut off and not trained on.
"""

from __future__ import annotations

import json
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.projection import Unreadable, project
from alphaapollo.tools.base import Session, ToolResult
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Message, Prompt

ANSWER = "answer"
PLAIN = r"Reason step by step. Think inside <think>...</think>, then answer with <answer>\boxed{...}</answer>."
WITH_TOOLS = r"""Reason step by step. Think inside <think>...</think>, then do exactly one thing:
%s
or answer with <answer>\boxed{...}</answer>."""
RUN_PYTHON = (
    "run Python with <python_code>...</python_code>, whose result comes back in <tool_response>...</tool_response>,"
)


def tools_of(config: Env) -> list[str]:
    """The tools that the model may call: those that are enabled, then env.tools."""
    settings = config.informal_math
    enabled = {"python_code": settings.enable_python_code, "local_rag": settings.enable_local_rag}
    return list(dict.fromkeys([*(name for name, is_on in enabled.items() if is_on), *config.tools]))


@register_environment("informal_math", graded=True, tools=tools_of)
class InformalMath:
    """One problem. The question is env_kwargs.question, else the prompt's own text."""

    def __init__(self, services: Services):
        self._score, self._settings, self._tools = services.score, services.config.informal_math, services.tools
        self._tags = [*(self._tools.names if self._tools else []), ANSWER]
        self._session = Session()
        self._prompt: Prompt | None = None

    async def reset(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        template = self._settings.prompt or f"{{question}}\n\n{instruction(self._tools)}"
        return _say(template.replace("{question}", question_of(prompt)))

    async def step(self, action: str) -> StepResult:
        assert self._prompt is not None, "step before reset"
        found = project(action, self._tags)
        if isinstance(found, Unreadable):
            return StepResult(_response("refused", found.problem), valid=False, info={"tool_status": "unreadable"})
        if found.kind == ANSWER:
            kept = action if found.kept_chars is None else action[: found.kept_chars]
            return StepResult(done=True, score=await self._score(self._prompt, kept), kept_chars=found.kept_chars)
        assert self._tools is not None
        result = await self._tools.call_text(found.kind, found.content, self._session)
        return StepResult(
            _response(result.status, result.text),
            kept_chars=found.kept_chars,
            info={
                "tool": found.kind,
                "tool_status": str(result.status),
                "tool_seconds": result.seconds,
                **_score(result),
            },
        )

    async def close(self) -> None:
        await self._session.close()


def question_of(prompt: Prompt) -> str:
    """The bare question, without what a data script may have added for single turns."""
    if question := prompt.env_kwargs.get("question"):
        return str(question)
    return prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["content"]


def instruction(tools: ToolBox | None) -> str:
    """What the model may do."""
    if tools is None:
        return PLAIN
    return WITH_TOOLS % "\n".join(_how_to_call(schema["function"]) for schema in tools.schemas())


def _how_to_call(function: dict[str, Any]) -> str:
    name = function["name"]
    if name == "python_code":
        return RUN_PYTHON
    example = json.dumps(dict.fromkeys(function["parameters"].get("properties", {}), "..."))
    return f"call <{name}>{example}</{name}> ({function['description']}),"


def _response(status: str, text: str) -> Observation:
    response = json.dumps({"status": status, "text": text}, ensure_ascii=False)
    return _say(f"<tool_response>{response}</tool_response>")


def _say(text: str) -> Observation:
    return Observation([Message(role="user", content=text)])


def _score(result: ToolResult) -> dict[str, float]:
    return {} if result.score is None else {"tool_score": result.score}
