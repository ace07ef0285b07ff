from alphaapollo.tools.base import Tool
from alphaapollo.tools.function_tool import FunctionTool
from maze_lab.settings import SignSettings


def make_measure(unit: str = "cells") -> Tool:
    """Make the tool `measure`. `unit`: env.tool_settings.measure.unit."""

    def measure(path: str) -> str:
        """Return how far a path goes.

        Args:
            path: moves, e.g. >>>
        """
        return f"{path.count('>')} {unit}"

    return FunctionTool(measure)


async def open_signs(settings: SignSettings) -> list[Tool]:
    """Return the tools of the section env.maze_signs."""

    def read_sign() -> str:
        """Return the text of the sign."""
        return settings.text

    return [FunctionTool(read_sign)]
