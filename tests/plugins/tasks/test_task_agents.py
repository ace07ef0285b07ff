"""Agents in and beside the sandbox of a task, as real programs against vLLM's HTTP API with canned answers."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from alphaapollo.config.schema import Agent
from alphaapollo.rollout.agents.runner import make_environment_variables
from tests.unit.rollout.agents.test_runner import run_program

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
INSTRUCTION = (EXAMPLES / "local/copy-0/instruction.md").read_text().strip()  # Copy owl.txt to rice.txt.
TASK = {
    "content": [{"role": "user", "content": INSTRUCTION}],
    "env_kwargs": {"task": str(EXAMPLES / "local/copy-0")},
}


@pytest.mark.parametrize(("file", "command", "reward"), [
    ("agent_outside.py", "cp owl.txt rice.txt", 1.0),
    ("agent_inside.py", "cp owl.txt rice.txt", 1.0),
])  # fmt: skip
def test_agent_solves_a_task(server, file, command, reward):
    server.script.answers = {"exit code": "DONE", INSTRUCTION: f"```bash\n{command}\n```"}

    async def play(endpoint, session, client):
        variables = make_environment_variables(endpoint.url, session.token, "policy")
        result = await run_program(Agent(path=str(EXAMPLES / file)), TASK, variables)
        assert result.value == reward, (result, server.script.prompts[-1:])

    _, rows = server.run(play)
    assert [len(row.turn_ends) for row in rows] == [2]
