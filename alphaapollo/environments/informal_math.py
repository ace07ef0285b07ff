r"""Environment for math word problems with tools.

    question -> <think>...</think><python_code>48/2</python_code>
             -> <tool_response>{"status": "ok", "text": "24.0\n"}</tool_response>
             -> <think>...</think><answer>\boxed{24}</answer> -> the reward function of the row's data_source

The example has env.action_format=tags, with one action per turn. With env.action_format=chat_template, the model calls
tools in the format of its chat template, and a turn without a tool call is the answer."""

from __future__ import annotations

import json

from alphaapollo.config.schema import Env
from alphaapollo.environments.actions import make_action_handler
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.tools.base import Session
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Json, JsonObject, Message, Prompt

NATIVE = r"Reason step by step, with the tools where they help. Put your final answer within \boxed{}."
PLAIN = r"Reason step by step. Think inside <think>...</think>, then answer with <answer>\boxed{...}</answer>."
WITH_TOOLS = r"""Reason step by step. Think inside <think>...</think>, then do exactly one thing:
%s
or answer with <answer>\boxed{...}</answer>."""
RUN_PYTHON = (
    "run Python with <python_code>...</python_code>, whose result comes back in <tool_response>...</tool_response>,"
)
EXAMPLES: JsonObject = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}


def get_tool_names(config: Env) -> list[str]:
    """Return the tools of the environment: those that env.informal_math enables, and env.tools."""
    settings = config.informal_math
    enabled = {"python_code": settings.enable_python_code, "local_rag": settings.enable_local_rag}
    return list(dict.fromkeys([*(name for name, is_on in enabled.items() if is_on), *config.tools]))


@register_environment("informal_math", graded=True, tools=get_tool_names)
class InformalMathEnvironment:
    """Environment of one math problem: the model may call tools before it answers."""

    def __init__(self, services: Services):
        self._score, self._config, self._tools = services.score, services.config, services.tools
        self._actions = make_action_handler(services)
        self._session = Session()
        self._prompt: Prompt | None = None

    async def reset(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        words = make_tag_instruction(self._tools) if self._config.action_format == "tags" else NATIVE
        template = self._config.prompt or f"{{question}}\n\n{words}"
        message = Message(role="user", content=template.replace("{question}", get_problem(prompt)))
        if isinstance(prompt.content, list) and prompt.content[-1].get("images"):
            message["images"] = prompt.content[-1]["images"]  # their marks are in the problem
        return Observation([message])

    async def step(self, action: str) -> StepResult:
        assert self._prompt is not None, "step before reset"
        result = await self._actions.handle(action, self._session)
        if isinstance(result, StepResult):
            return result
        return StepResult(done=True, score=await self._score(self._prompt, result.text), kept_chars=result.kept_chars)

    async def close(self) -> None:
        await self._session.close()


def get_problem(prompt: Prompt) -> str:
    """Return the math problem: env_kwargs.question if the row has it, else the prompt's text or last message."""
    if question := prompt.env_kwargs.get("question"):
        return str(question)
    return prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["content"]


def make_tag_instruction(tools: ToolBox | None) -> str:
    """Return the instruction for the model that explains how to write tool calls and the answer in tags."""
    if tools is None:
        return PLAIN
    return WITH_TOOLS % "\n".join(describe_tool(schema["function"]) for schema in tools.schemas())


def describe_tool(function: JsonObject) -> str:
    """Return the line of the instruction that explains one tool. `function`: its {name, description, parameters}."""
    name = function["name"]
    if name == "python_code":
        return RUN_PYTHON
    properties = function["parameters"].get("properties", {})
    example = json.dumps(
        {key: make_example_value(spec, function["parameters"]) for key, spec in properties.items()}, ensure_ascii=False
    )
    return f"call <{name}>{example}</{name}> ({function['description']}),"


def make_example_value(schema: Json, root_schema: JsonObject, followed_refs: tuple[str, ...] = ()) -> Json:
    """Return an example value for a JSON schema: its default, its first listed value, or a value of its type."""
    if not isinstance(schema, dict) or schema.get("$ref") in followed_refs:
        return "..."
    if reference := schema.get("$ref"):
        found: Json = root_schema
        for step in reference.split("/")[1:]:
            found = found.get(step) if isinstance(found, dict) else None
        return make_example_value(found, root_schema, (*followed_refs, reference))
    if fixed := [schema[key] for key in ("default", "const") if key in schema]:
        return fixed[0]
    if listed := schema.get("enum") or schema.get("examples"):
        return listed[0]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return None if {"type": "null"} in options else make_example_value(options[0], root_schema, followed_refs)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        names, properties = schema.get("required", []), schema.get("properties", {})
        return {name: make_example_value(properties.get(name), root_schema, followed_refs) for name in names}
    return schema.get("minimum", EXAMPLES.get(kind, "..."))
