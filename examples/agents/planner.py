"""Two agents of the OpenAI Agents SDK with one policy: a planner chooses a shop, and a solver gets the price there."""

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def run(task, endpoint):
    sold = task["extra_info"]

    @function_tool
    def price(item: str, shop: str) -> str:
        """Look up the price of an item in a shop."""
        return task["ground_truth"] if (item, shop) == (sold["item"], sold["shop"]) else "none"

    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=AsyncOpenAI())
    planner = Agent(name="planner", instructions="Which shop?", model=model, model_settings=as_role("planner"))
    solver = Agent(name="solver", tools=[price], model=model, model_settings=as_role("solver"))
    try:
        plan = await Runner.run(planner, task["content"])
        result = await Runner.run(solver, f"{sold['item']} in {plan.final_output}?", max_turns=3)
    except MaxTurnsExceeded:
        return 0.0
    return float(result.final_output.strip() == task["ground_truth"])


def as_role(name):
    """Name the role of an agent's requests."""
    return ModelSettings(extra_headers={"x-role": name})
