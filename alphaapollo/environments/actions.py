"""How a model acts, whatever the format: its text becomes tool calls that are carried out, or the answer.

text -> take(text, session) -> StepResult (calls: what came of them goes to the model) | Answer (the environment's)

env.action_format=tags           tag_actions.py     <python_code>...</python_code>, <answer>...</answer>
                  chat_template  native_actions.py  the model's own format, read by a parser made for it
"""

from __future__ import annotations

from alphaapollo.environments.base import Actions, Services
from alphaapollo.environments.native_actions import NativeActions
from alphaapollo.environments.tag_actions import TagActions


def make_actions(services: Services) -> Actions:
    """As env.action_format says, over the tools of the services."""
    if services.config.action_format == "tags":
        return TagActions(services.tools)
    assert services.tools is not None and services.read_calls is not None, "a run checks this at its start"
    return NativeActions(services.tools, services.read_calls)
