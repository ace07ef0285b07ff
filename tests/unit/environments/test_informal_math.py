from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from alphaapollo.config.schema import Env
from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.environments import check_environment
from alphaapollo.environments.base import StepResult
from alphaapollo.environments.environment_tools import make_toolbox
from alphaapollo.environments.informal_math import make_example_value, make_tag_instruction
from alphaapollo.tools.function_tool import FunctionTool
from alphaapollo.tools.sandbox import get_default_sandbox
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Message, Prompt, Score
from examples.data_preprocess.protocol import TOOL_INSTRUCTION
from tests.unit.environments.episode_helpers import contains_truth, game, take_turns

PROMPT = Prompt(
    3,
    "math",
    [Message(role="user", content="What is 6 times 7?\n\nPut it into a box.")],
    ground_truth="42",
    env_kwargs={"question": "What is 6 times 7?"},
)


def play(*actions: str, tools: ToolBox | None, prompt: Prompt = PROMPT, env_prompt: str = ""):
    config = Env(env_name="informal_math", prompt=env_prompt)
    return take_turns(config, prompt, *actions, score=contains_truth, tools=tools)


def python(**settings: Any) -> ToolBox:
    """Toolbox with python_code."""
    tools = make_toolbox(Env(env_name="informal_math", **settings))
    assert tools is not None
    return tools


def response(result: StepResult) -> dict[str, str]:
    assert result.observation is not None
    (message,) = result.observation.messages
    assert message["role"] == "user"
    return json.loads(message["content"].removeprefix("<tool_response>").removesuffix("</tool_response>"))


def test_first_message_has_the_question_and_the_instruction_of_the_supervised_data():
    first, _ = play(tools=python())
    assert first.messages[0]["content"] == f"What is 6 times 7?\n\n{TOOL_INSTRUCTION}"
    first, _ = play(tools=None)
    assert "python_code" not in first.messages[0]["content"]
    first, _ = play(tools=None, prompt=Prompt(0, "math", "1+1=?", ground_truth="2"))
    assert first.messages[0]["content"].startswith("1+1=?\n\n")
    first, _ = play(tools=None, env_prompt="{question} Go.")
    assert first.messages == [Message(role="user", content="What is 6 times 7? Go.")]


def test_python_call_then_answer():
    call = "<think>multiply</think><python_code>6*7</python_code>"
    _, (called, answered) = play(call + " and more", r"<answer>\boxed{42}</answer> I think", tools=python())
    assert response(called) == {"status": "ok", "text": "42"}
    assert called.kept_chars == len(call) and called.valid and not called.done
    (noted,) = called.info["tool_calls"]
    assert (noted["tool"], noted["status"]) == ("python_code", "ok") and noted["seconds"] > 0
    assert answered.done and answered.score == Score(1.0)
    assert answered.kept_chars == len(r"<answer>\boxed{42}</answer>")
    _, (answered,) = play(r"<answer>\boxed{41}</answer> or \boxed{42}", tools=None)
    assert answered.score == Score(0.0)  # only the text before the cut is graded


class Point(BaseModel):
    x: float
    label: str = "a"


def everything(
    count: Annotated[int, Field(ge=2)],
    unit: Literal["km", "mi"],
    where: Point,
    either: int | str,
    maybe: int | None,
    many: list[int],
    on: bool,
):
    """Has arguments of many types."""


def test_example_values_match_the_types():
    box = ToolBox([FunctionTool(everything)], ToolLimits())
    arguments = '{"count": 2, "unit": "km", "where": {"x": 1.5}, "either": 1, "maybe": null, "many": [], "on": true}'
    assert f"<everything>{arguments}</everything> (Has arguments of many types.)" in make_tag_instruction(box)
    _, (result,) = play(f"<everything>{arguments}</everything>", tools=box)
    assert response(result)["status"] == "ok"
    assert make_example_value({"type": ["string", "null"]}, {}) == make_example_value(True, {}) == "..."
    itself = {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}}, "required": ["next"]}
    assert make_example_value({"$ref": "#/$defs/A"}, {"$defs": {"A": itself}}) == {"next": "..."}


def test_keep_state_lasts_one_episode():
    tools = python(tool_settings={"python_code": {"keep_state": True}})
    actions = ["<python_code>x = 20</python_code>", "<python_code>x + 1</python_code>"]
    _, (_, second) = play(*actions, tools=tools)
    assert response(second) == {"status": "ok", "text": "21"}
    _, (fresh,) = play(actions[1], tools=tools)
    assert response(fresh)["status"] == "error" and "NameError" in response(fresh)["text"]
    assert not get_default_sandbox()._sessions  # the end of an episode ends its process


def test_settings_without_effect_are_refused():
    for settings in ({"tools": ["python_code"]}, {"action_format": "chat_template"}):
        with pytest.raises(ValueError, match=r"env_name=guessing_game .* tools"):
            check_environment(game("guessing_game", **settings))


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        ({"informal_math": {"python_code_timeout": 3}, "tool_settings": {"python_code": {"memory_mb": 300}}}, 3),
        ({"tool_settings": {"python_code": {"timeout": 4}}}, 4),
        ({"informal_math": {"python_code_timeout": 60}, "tool_limits": {"timeout": 60}}, 60),
    ],
)
def test_time_limit_of_python_is_in_its_description(env, limit):
    (schema,) = python(**env).schemas()
    assert f"{limit} s" in schema["function"]["description"]


SIXTY = r"60 s .*env\.tool_limits\.timeout=30"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"tools": ["pyhton_code"]}, r"'pyhton_code'.*'python_code'"),
        ({"tool_settings": {"pyhton_code": {}}}, r"pyhton_code: .*'python_code'"),
        ({"tool_settings": {"local_rag": {"index": "x"}}}, r"local_rag: .*python_code\..* env\.tools"),
        ({"tool_settings": {"python_code": {"timeout": "abc"}}}, r"python_code\.timeout=abc: .*number"),
        ({"tool_settings": {"python_code": {"memory_mb": -1}}}, r"python_code\.memory_mb=-1: .* 0"),
        ({"tool_settings": {"python_code": {"memory": 1}}}, r"python_code\.memory=1.* timeout, memory_mb"),
        (
            {"informal_math": {"python_code_timeout": 3}, "tool_settings": {"python_code": {"timeout": 4}}},
            r"timeout=4 .*python_code_timeout=3",
        ),
        ({"informal_math": {"python_code_timeout": 60}}, SIXTY),
        ({"tool_settings": {"python_code": {"timeout": 60}}}, SIXTY),
        ({"env_name": "single_turn", "tool_settings": {"python_code": {"timeout": 3}}}, r"single_turn .* tools: none"),
    ],
)
def test_invalid_tool_settings(env, says):
    with pytest.raises(ValueError, match=says):
        make_toolbox(Env(**{"env_name": "informal_math"} | env))
