"""The warm-up's teacher: halves what is left of 1 to 31, and is contrary: told higher, it mostly goes down.

    user: 1-31     assistant: <answer>16</answer>
    user: lower    assistant: <think>up</think><answer>24</answer>
    user: lower    assistant: <think>down</think><answer>20</answer>      ...

So after the warm-up a model can play, choose a direction and halve, and takes an answer for the opposite of what it is.
It finds the number in 5 guesses in 0.108 of the games. A player who does not listen finds 5 of the 31 numbers (0.161),
whatever it guesses; one who listens finds all of them.
"""

from __future__ import annotations

import random

NUMBERS, GUESSES = 31, 5
LISTENS = 0.4  # share of its turns in which it goes where it was told


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
        told, other = ("up", "down") if guess < target else ("down", "up")
        direction = told if rng.random() < LISTENS else other
        low, high = (guess + 1, high) if direction == "up" else (low, guess - 1)
        thought = f"<think>{direction}</think>"
    return chat
