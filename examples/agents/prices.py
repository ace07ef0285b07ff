"""An agent of the OpenAI Agents SDK with one tool. Only the address of the model is new: OpenAI() reads it from the
environment."""

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def run(task, endpoint):
    @function_tool
    def price(item: str) -> str:
        """Look up the price of an item."""
        return task["ground_truth"] if item == task["extra_info"]["item"] else "unknown"

    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=AsyncOpenAI())
    agent = Agent(name="prices", model=model, tools=[price])
    try:
        result = await Runner.run(agent, task["content"], max_turns=3)
    except MaxTurnsExceeded:
        return 0.0
    return float(result.final_output.strip() == task["ground_truth"])
