"""Grid world: the model walks from A to G around walls, one step per turn.

.#..        env.settings.view=map
.A#.
...G        env.settings.view=coordinates:  at 1,1 goal 2,3 walls up right     (row,column from 0)

Placeholders of env.prompt: {size}, {steps}, {legend} and {view}.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Annotated, Literal

from pydantic import Field

from alphaapollo.config.schema.base import Section
from alphaapollo.environments.base import register_environment
from alphaapollo.environments.memory import Step
from alphaapollo.environments.text_game import MoveResult, TextGame
from alphaapollo.types import Message
from alphaapollo.utils.text import fill_template

Cell = tuple[int, int]  # row, column
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
PROMPT = (
    "You are in a grid of {size} x {size} cells{legend}. Reach the goal in at most {steps} steps. Answer with one "
    "move, up, down, left or right: <answer>move</answer>.\n{view}"
)
LEGENDS = {
    "map": ": A is where you are, G the goal, # a wall",
    "coordinates": "; cells are row,column, counted from 0 at the top left",
}
MAX_DRAWS = 50  # random walls are drawn this often until a goal is reachable; then a grid without walls is used


class GridWorldSettings(Section):
    size: Annotated[int, Field(ge=2, le=50)] = 5
    """Rows and columns of the grid."""
    walls: Annotated[float, Field(ge=0.0, le=0.5)] = 0.2
    """Share of cells that are walls."""
    view: Literal["map", "coordinates"] = "map"
    """Observation: a drawing of the grid, or coordinates of agent, goal and adjacent walls in words."""
    step_reward: float = 0.0
    """Reward of a move that shortens the way to the goal by one step; a move away from it costs as much."""


@register_environment("grid_world", tools=None, settings=GridWorldSettings)
class GridWorldEnvironment(TextGame):
    """Grid world whose goal can be reached within env.max_steps moves. Moves into walls have no effect."""

    def begin(self, rng: Random) -> None:
        settings = self.settings
        for draw in range(MAX_DRAWS + 1):
            share = settings.walls if draw < MAX_DRAWS else 0.0
            cells = [(row, column) for row in range(settings.size) for column in range(settings.size)]
            self.free = {cell for cell in cells if rng.random() >= share}
            if not self.free:
                continue
            self.position = rng.choice(sorted(self.free))
            paths = find_shortest_paths(self.free, self.position)
            goals = sorted(cell for cell, path in paths.items() if 0 < len(path) <= self.config.max_steps)
            if goals:
                self.goal = rng.choice(goals)
                self.shortest_path = paths[self.goal]
                self.distances = {cell: len(path) for cell, path in find_shortest_paths(self.free, self.goal).items()}
                return
        raise AssertionError("no goal is reachable in a grid without walls; please report this bug")

    def prompt(self) -> str:
        return self._make_prompt(self.view())

    def play(self, action: str) -> MoveResult:
        named = set(re.findall(r"[a-z]+", action.lower())) & set(MOVES)
        if len(named) != 1:
            text = f"invalid action: {len(named) or 'no'} moves; name one of {', '.join(MOVES)}\n{self.view()}"
            return MoveResult(text, valid=False)
        target = _find_neighbour(self.position, named.pop())
        if target not in self.free:
            return MoveResult(f"there is a wall\n{self.view()}")
        nearer = self.distances[self.position] - self.distances[target]
        self.position = target
        return MoveResult(self.view(), won=target == self.goal, reward=self.settings.step_reward * nearer)

    def state(self) -> str:
        return f"{self.position[0]},{self.position[1]}"

    def recall(self, steps: Sequence[Step]) -> list[Message]:
        """Return the prompt of a later turn: the instructions and the current view, which shows the complete state."""
        return [Message(role="user", content=self._make_prompt(steps[-1].observation[-1]["content"]))]

    def view(self) -> str:
        """Return the current grid as the model sees it: a map or coordinates (env.settings.view)."""
        size = self.settings.size
        if self.settings.view == "coordinates":
            (row, column), (goal_row, goal_column) = self.position, self.goal
            cells = {name: _find_neighbour(self.position, name) for name in MOVES}
            inside = {name: cell for name, cell in cells.items() if min(cell) >= 0 and max(cell) < size}
            walls = [name for name, cell in inside.items() if cell not in self.free]
            beside = " ".join(["", "walls", *walls]) if walls else ""
            return f"at {row},{column} goal {goal_row},{goal_column}{beside}"
        marks = dict.fromkeys(self.free, ".") | {self.goal: "G", self.position: "A"}
        return "\n".join("".join(marks.get((row, column), "#") for column in range(size)) for row in range(size))

    def _make_prompt(self, view: str) -> str:
        legend = LEGENDS[self.settings.view]
        values = {"size": self.settings.size, "steps": self.config.max_steps, "legend": legend}
        return fill_template(self.config.prompt or PROMPT, **values, view=view)


def find_shortest_paths(free: set[Cell], start: Cell) -> dict[Cell, list[str]]:
    """Return {reachable cell: moves of the shortest path from `start`}. `free`: cells without a wall."""
    paths: dict[Cell, list[str]] = {start: []}
    waiting = deque([start])
    while waiting:
        cell = waiting.popleft()
        for name in MOVES:
            target = _find_neighbour(cell, name)
            if target in free and target not in paths:
                paths[target] = [*paths[cell], name]
                waiting.append(target)
    return paths


def _find_neighbour(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
