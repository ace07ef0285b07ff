"""An agent of LangGraph with one tool. The client reads the address and the key from the environment."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def run(task, endpoint):
    agent = create_react_agent(ChatOpenAI(model=endpoint.model), tools=[add])
    result = await agent.ainvoke({"messages": task["content"]})
    return float(result["messages"][-1].content.strip() == task["ground_truth"])
