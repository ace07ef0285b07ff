"""A chat in which the agent of a run answers, with vLLM."""

from __future__ import annotations

import pytest

from tests.loop.conftest import Runner, wait_until_nothing_is_left
from tests.loop.test_command import SIZES, start

AGENT = """
from openai import OpenAI
from openai.resources import chat  # once, not in each session

def run(task, endpoint):
    client, messages = OpenAI(max_retries=0), task["content"]
    request = {"model": endpoint.model, "max_tokens": 4}
    text = client.chat.completions.create(messages=messages, **request).choices[0].message.content
    tool = [{"role": "assistant", "content": text}, {"role": "user", "content": f"tool result {len(messages)}"}]
    client.chat.completions.create(messages=[*messages, *tool], **request)
    checked = [{"role": "user", "content": "check"}]
    client.chat.completions.create(messages=checked, **request, extra_headers={"x-role": "checker"})
    assert messages[-1]["content"] != "1+1="
"""


def test_chat_with_an_agent(ppo: Runner) -> None:
    pytest.importorskip("openai")
    (ppo.out / "agent.py").write_text(AGENT)
    keys = ["env.env_name=agent", f"env.agent.path={ppo.out / 'agent.py'}", "data.max_prompt_length=400"]
    words = [ppo.task.model, *keys, "data.max_response_length=64", *SIZES]
    done = ppo.finish(start(ppo, ["chat", *words], "1+2=\n3+4=\n1+1=\n"))
    assert done.code == 0, done.output
    lines = done.output.splitlines()
    assert [line for line in lines if "tool result" in line][:2] == ["  [user] tool result 1", "  [user] tool result 3"]
    header = "(another chat of the session, role checker)"
    assert [lines[index + 1] for index, line in enumerate(lines) if header in line] == ["  [user] check"] * 3
    assert any("(failed: AssertionError" in line for line in lines)
    wait_until_nothing_is_left(ppo)
