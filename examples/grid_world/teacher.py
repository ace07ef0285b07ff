"""Warm-up data that names the direction of the goal correctly, but mixes up left and right when it moves.

    user: at 0,1 goal 2,0        assistant: <think>down left</think><answer>right</answer>

After the warm-up, a model can read the situation and move, and most of its sideways moves go the wrong way.
"""

from __future__ import annotations

import random

Cell = tuple[int, int]  # row, column
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIZE, STEPS = 3, 4
MIRRORED = {"left": "right", "right": "left"}
KNOWS = 0.3  # share of sideways moves in the correct direction


def turn(rng: random.Random) -> list[dict[str, str]]:
    """One turn as a chat, in a random situation of a grid without walls."""
    cells = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    here, goal = rng.sample(cells, 2)
    at_the_edge = not all(0 < place < SIZE - 1 for place in here)
    bumped = "there is a wall\n" if at_the_edge and rng.random() < 0.3 else ""
    nearer = [move for move, step in MOVES.items() if distance(after(here, step), goal) < distance(here, goal)]
    move = rng.choice(nearer)
    if rng.random() >= KNOWS:
        move = MIRRORED.get(move, move)
    return [
        {"role": "user", "content": f"{bumped}at {here[0]},{here[1]} goal {goal[0]},{goal[1]}"},
        {"role": "assistant", "content": f"<think>{' '.join(nearer)}</think><answer>{move}</answer>"},
    ]


def after(here: Cell, step: Cell) -> Cell:
    return here[0] + step[0], here[1] + step[1]


def distance(one: Cell, other: Cell) -> int:
    return sum(abs(mine - its) for mine, its in zip(one, other, strict=True))
