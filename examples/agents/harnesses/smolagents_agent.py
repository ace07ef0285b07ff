"""An agent of smolagents with one tool."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def run(task, endpoint):
    model = OpenAIServerModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
    answer = ToolCallingAgent(tools=[add], model=model).run(task["content"][-1]["content"])
    return float(str(answer) == task["ground_truth"])
