"""The warm-up's teacher: compares where it is with where the goal is, rightly, and then rather goes astray.

    user: at 0,1 goal 2,1        assistant: <think>0<2 1=1</think><answer>down</answer>

So after the warm-up a model can read the situation and move, and takes each comparison for a reason to stay away.
"""

from __future__ import annotations

import random

from alphaapollo.environments.grid_world import MOVES, Cell

SIZE, STEPS = 3, 4
WEIGHT = 0.6  # how likely it takes a move that comes nearer, against one that does not


def turn(rng: random.Random) -> list[dict[str, str]]:
    """One turn as a chat, in a random situation of a grid without walls."""
    cells = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    here, goal = rng.sample(cells, 2)
    at_the_edge = not all(0 < place < SIZE - 1 for place in here)
    bumped = "there is a wall\n" if at_the_edge and rng.random() < 0.3 else ""
    nexts = [(here[0] + down, here[1] + right) for down, right in MOVES.values()]
    weights = [WEIGHT if distance(place, goal) < distance(here, goal) else 1 for place in nexts]
    (move,) = rng.choices(list(MOVES), weights)
    compared = " ".join(f"{mine}{sign(mine, its)}{its}" for mine, its in zip(here, goal, strict=True))
    return [
        {"role": "user", "content": f"{bumped}at {here[0]},{here[1]} goal {goal[0]},{goal[1]}"},
        {"role": "assistant", "content": f"<think>{compared}</think><answer>{move}</answer>"},
    ]


def sign(one: int, other: int) -> str:
    return "<" if one < other else ">" if one > other else "="


def distance(one: Cell, other: Cell) -> int:
    return sum(abs(mine - its) for mine, its in zip(one, other, strict=True))
