from alphaapollo.tools.base import Tool
from alphaapollo.tools.function_tool import FunctionTool


def make_measure(unit: str = "cells") -> Tool:
    """Make the tool `measure`. `unit`: env.tool_settings.measure.unit."""

    def measure(path: str) -> str:
        """Return how far a path goes.

        Args:
            path: moves, e.g. >>>
        """
        return f"{path.count('>')} {unit}"

    return FunctionTool(measure)
