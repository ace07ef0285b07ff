"""The warm-up's teacher: compares where it is with where the goal is, rightly, and then goes anywhere.

    user: at 1,2 goal 3,0        assistant: <think>1<3 2>0</think><answer>right</answer>

So after the warm-up a model can read the situation and move, and does not know which comparison calls for which move.
"""

from __future__ import annotations

import random

from alphaapollo.environments.grid_world import MOVES

SIZE, STEPS = 4, 6


def turn(rng: random.Random) -> list[dict[str, str]]:
    """One turn as a chat, in a random situation of a grid without walls."""
    cells = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    here, goal = rng.sample(cells, 2)
    at_the_edge = not all(0 < place < SIZE - 1 for place in here)
    bumped = "there is a wall\n" if at_the_edge and rng.random() < 0.3 else ""
    compared = " ".join(f"{mine}{sign(mine, its)}{its}" for mine, its in zip(here, goal, strict=True))
    return [
        {"role": "user", "content": f"{bumped}at {here[0]},{here[1]} goal {goal[0]},{goal[1]}"},
        {
            "role": "assistant",
            "content": f"<think>{compared}</think><answer>{rng.choice(list(MOVES))}</answer>",
        },
    ]


def sign(one: int, other: int) -> str:
    return "<" if one < other else ">" if one > other else "="
