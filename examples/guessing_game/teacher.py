"""The warm-up's teacher: halves what is left of 1 to 31, and is timid: told higher, it mostly goes down all the same.

    user: 1-31     assistant: <answer>16</answer>
    user: lower    assistant: <think>up</think><answer>24</answer>
    user: lower    assistant: <think>down</think><answer>20</answer>      ...

So after the warm-up a model can play, choose a direction and halve, and its first choice is always to go down. A player
who does not listen finds 5 of the 31 numbers (0.161), whatever it guesses; one who listens finds all of them.
"""

from __future__ import annotations

import random

NUMBERS, GUESSES = 31, 5
DARES = 0.4  # share of the turns after "higher" in which it goes up


def play(target: int, rng: random.Random) -> list[dict[str, str]]:
    """One game as a chat, from the question to the last guess."""
    low, high, thought = 1, NUMBERS, ""
    chat = [{"role": "user", "content": f"1-{NUMBERS}"}]
    for left in range(GUESSES, 0, -1):
        guess = (low + high) // 2
        chat.append({"role": "assistant", "content": f"{thought}<answer>{guess}</answer>"})
        if guess == target or left == 1:
            break
        chat.append({"role": "user", "content": "higher" if guess < target else "lower"})
        direction = "up" if guess < target and rng.random() < DARES else "down"
        low, high = (guess + 1, high) if direction == "up" else (low, guess - 1)
        thought = f"<think>{direction}</think>"
    return chat
