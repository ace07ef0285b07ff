"""informal_math with env.action_format=chat_template."""

from typing import Any

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.environments.base import StepResult
from alphaapollo.environments.informal_math import NATIVE
from alphaapollo.rollout.tool_call_parser import make_tool_call_parser
from alphaapollo.tools.base import ToolFailedError
from alphaapollo.tools.function_tool import FunctionTool, tool
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import EpisodeEnd, GroupRequest, Message, Outcome, Prompt, Sampling, Score, Trajectory
from tests.unit.environments.episode_helpers import contains_truth, take_turns
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker
from tests.unit.tool_templates import FORGETFUL, HERMES, RESPONSE_TEMPLATE, call, tokenizer_of

PROMPT = Prompt(3, "math", [Message(role="user", content="What is 6 times 7?")], ground_truth="42")
BROKEN = call("double", x=1)[:-14]


def double(x: int) -> int:
    """Twice x."""
    return 2 * x


def broken() -> str:
    """Always fails."""
    raise ToolFailedError("the server is gone")


def native(**settings: Any) -> Env:
    return Env(env_name="informal_math", action_format="chat_template", **settings)


def take(*actions: str) -> list[StepResult]:
    """Turns of one episode."""
    box = ToolBox([FunctionTool(double), FunctionTool(broken)], ToolLimits())
    tokenizer = tokenizer_of()
    tokenizer.response_template = RESPONSE_TEMPLATE
    parse_calls = make_tool_call_parser("", ToolRenderer(tokenizer, box.schemas()))

    first, results = take_turns(native(), PROMPT, *actions, score=contains_truth, tools=box, parse_calls=parse_calls)
    assert first.messages[0]["content"] == f"What is 6 times 7?\n\n{NATIVE}"
    return results


def answers(result: StepResult) -> list[str]:
    assert result.observation is not None
    assert {message["role"] for message in result.observation.messages} == {"tool"}
    return [message["content"] for message in result.observation.messages]


def statuses(result: StepResult) -> list[str]:
    return [call["status"] for call in result.info["tool_calls"]]


def test_several_calls_are_made_in_order_and_a_turn_without_one_is_the_answer():
    first, last = take(f"<think>twice</think>{call('double', x=3)}\n{call('double', x=21)}", "It is \\boxed{42}.")
    assert answers(first) == ["6", "42"] and statuses(first) == ["ok", "ok"]
    assert [message["name"] for message in first.observation.messages] == ["double", "double"]
    assert first.valid and not first.done and first.kept_chars is None
    assert last.done and last.score == Score(1.0) and last.kept_chars is None


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (call("treble", x=1), "unknown tool 'treble'"),
        (call("double", y=1), "double: argument: "),
        ('<tool_call>{"name": "double", "arguments": [1]}</tool_call>', "double: argument: [1] "),
        (call("\\ud800", x=1), "unknown tool '\\ud800'"),
        (BROKEN, "this tool call"),
        (f"{call('double', x=1)}{BROKEN}", "this tool call"),
        ("<tool_call>", "this tool call"),
    ],
)
def test_refused_or_unreadable_call_makes_the_turn_invalid(action, says):
    (result,) = take(action)
    assert answers(result)[0].startswith(f"refused: {says}") and not result.valid and not result.done
    if says == "this tool call":
        assert result.info == {"tool_status": "unreadable"}
    else:
        assert statuses(result) == ["refused"]


def test_tool_failure_has_no_reward():
    (result,) = take(call("double", x=1) + call("broken"))
    assert result.done and statuses(result) == ["ok", "failed"]
    assert result.score.outcome is Outcome.ENVIRONMENT_FAILED and result.score.reason == "the server is gone"


# Complete episodes on the rollout worker


@tool
def treble(x: int) -> int:
    """Three times x."""
    return 3 * x


def play(tmp_path, turns: list[str], template: str = HERMES, **settings: Any) -> tuple[ToolRenderer, Trajectory]:
    tokenizer = tokenizer_of(template)
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    left = list(turns)
    env = native(tools=["treble"], max_steps=5, informal_math={"enable_python_code": False}, **settings)
    engine = TextEngine(tmp_path, lambda text: left.pop(0))
    worker = make_worker(tmp_path, engine, env, max_prompt_length=1000, max_response_length=1000)
    (group,) = generate(worker, GroupRequest(PROMPT, 1, Sampling(1000), stream_position=0))
    return ToolRenderer(tokenizer, worker._tools.schemas()), group.trajectories[0]


def test_tokens_of_three_turns_match_the_template(tmp_path):
    two = f"{call('treble', x=2)}\n{call('treble', x=-1)}"
    turns = [f"Hm.\n{two}", call("treble", x=14), "<think>so</think>\\boxed{42}"]
    renderer, trajectory = play(tmp_path, turns)
    assert trajectory.end is EpisodeEnd.DONE and trajectory.score.reward == 1.0
    assert [turn.text for turn in trajectory.turns] == turns
    assert [call["seconds"] >= 0 for turn in trajectory.turns for call in turn.info.get("tool_calls", [])] == [True] * 3

    def results(*texts: str) -> list[dict]:
        return [{"role": "tool", "content": text, "name": "treble"} for text in texts]

    chat = [{"role": "user", "content": f"What is 6 times 7?\n\n{NATIVE}"}]
    for text, answered in zip(turns, (results("6", "-3"), results("42"), []), strict=True):
        chat += [{"role": "assistant", "content": text}, *answered]
    (row,) = trajectory.rows
    assert [*row.token_ids, *renderer.encode(["\n"])[0]] == renderer.encode([renderer.render_chat(chat, False)])[0]
    sampled = [token for token, mask in zip(row.token_ids, row.action_mask, strict=True) if mask]
    assert sampled == [token for turn in trajectory.turns for token in turn.completion.token_ids]


@pytest.mark.parametrize(("template", "context"), [(HERMES, "memory"), (FORGETFUL, "append")])
def test_memory_context_and_a_template_that_drops_earlier_thoughts(tmp_path, template, context):
    turns = [call("treble", x=1), f"<think>?</think>{call('treble', x=14)}", "\\boxed{42}"]
    _, trajectory = play(tmp_path, turns, template, context=context)
    assert len(trajectory.rows) == (3 if context == "memory" else 1) and trajectory.score.reward == 1.0
