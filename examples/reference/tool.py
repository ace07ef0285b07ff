"""env.custom_module=examples/reference/tool.py env.tools=[look_up]"""

from alphaapollo.tools.base import Session, ToolResult, ToolStatus
from alphaapollo.tools.function_tool import tool

CAPITALS = {"France": "Paris", "Japan": "Tokyo"}


@tool
def look_up(country: str, session: Session) -> ToolResult:
    """Return the capital of a country.

    Args:
        country: English name of the country.
    """
    asked = session.state.setdefault("look_up", [])
    asked.append(country)
    if country not in CAPITALS:
        return ToolResult(f"{country} is unknown.", ToolStatus.ERROR)
    return ToolResult(f"{CAPITALS[country]} (call {len(asked)})", ToolStatus.OK)
