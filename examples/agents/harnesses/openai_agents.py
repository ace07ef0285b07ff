"""Two agents of the OpenAI Agents SDK: the first one uses the second one, a sub-agent with its own chat, as a tool. The
SDK sends its requests to the API for responses."""

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def run(task, endpoint):
    helper = Agent(name="helper", model=endpoint.model, tools=[add])
    ask_helper = helper.as_tool("ask_helper", "Ask an assistant who can add.")
    agent = Agent(name="main", model=endpoint.model, tools=[ask_helper])
    result = await Runner.run(agent, task["content"])
    return float(result.final_output.strip() == task["ground_truth"])
