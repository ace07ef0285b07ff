"""An agent of pydantic-ai with one tool. The client reads the address and the key from the environment."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def run(task, endpoint):
    agent = Agent(OpenAIChatModel(endpoint.model), tools=[add])
    result = await agent.run(task["content"][-1]["content"])
    return float(result.output.strip() == task["ground_truth"])
