from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from alphaapollo.config.schema.base import ActiveWhen, ResumeRule, Section


class MazeSettings(Section):
    size: Annotated[PositiveInt, ResumeRule("refused", "another maze")] = 5
    """Cells of the corridor."""
    turns: PositiveInt = 2
    """Turns after which an episode ends; at most env.max_steps."""
    doors: Literal["open", "random"] = "open"
    """Whether doors are closed at random, so that some moves are lost."""
    doors_seed: Annotated[int, ActiveWhen("doors", "random")] = 0
    """Seed of the closed doors."""


class SignSettings(Section):
    text: str = "Go on."
    """Text of the sign in the corridor."""


class PathSettings(Section):
    base: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Reward of a text without a move."""


class WalkSettings(Section):
    stride: PositiveInt = 1
    """Difference between a token id and the one before it."""


class DrawConfig(Section):
    program = "maze_lab.command"
    maze: MazeSettings = MazeSettings()
