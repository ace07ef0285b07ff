"""Images of prompts and tools in environments."""

import asyncio

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.environments.actions import ActionHandler
from alphaapollo.environments.base import StepResult
from alphaapollo.rollout.environment_replies import check_step_reply
from alphaapollo.tools.base import Session, ToolCall, ToolResult, ToolStatus
from alphaapollo.tools.function_tool import FunctionTool
from alphaapollo.tools.toolbox import ToolBox
from tests.unit.rollout.test_images import SMALL, WIDE


def draw(count: int) -> ToolResult:
    """Draw.

    Args:
        count: number of images.
    """
    return ToolResult(f"{count} <image> images", ToolStatus.OK, images=[SMALL, WIDE][:count])


TOOLS = ToolBox([FunctionTool(draw)], ToolLimits())


def act(handler: ActionHandler) -> dict:
    result = asyncio.run(handler.handle('<draw>{"count": 2}</draw>', Session()))
    assert isinstance(result, StepResult)
    return check_step_reply(result).observation.messages[0]


def test_images_of_a_tool_follow_its_text() -> None:
    message = act(ActionHandler(TOOLS, sees_images=True))
    text = '<tool_response>{"status": "ok", "text": "2  images"}</tool_response><image><image>'
    assert message == {"role": "user", "content": text, "images": [SMALL, WIDE]}
    native = ActionHandler(TOOLS, lambda text: [ToolCall("draw", '{"count": 2}')], sees_images=True)
    content = "2  images<image><image>"
    assert act(native) == {"role": "tool", "content": content, "name": "draw", "images": [SMALL, WIDE]}
