"""Warm-up data that halves the remaining range of 1 to 31, but mostly goes down even after `higher`.

    user: 1-31     assistant: <answer>16</answer>
    user: lower    assistant: <think>up</think><answer>24</answer>
    user: lower    assistant: <think>down</think><answer>20</answer>      ...

After the warm-up, a model can play, choose a direction and halve, and its most likely choice is always to go down. A
player that ignores the answers finds 5 of the 31 numbers (0.161); one that uses them finds all.
"""

from __future__ import annotations

import random

NUMBERS, GUESSES = 31, 5
DARES = 0.4  # share of turns after "higher" that go up
TOOL = "guess(number)"  # the system message of the chat template
CALL, END_OF_CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": ', "}}\n</tool_call>"


def play(target: int, rng: random.Random) -> list[dict[str, str]]:
    """One game as a chat."""
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


def play_with_tool(target: int, rng: random.Random) -> list[dict[str, str]]:
    """One game as a chat in which each guess is a call of the tool `guess`."""
    first, *turns = play(target, rng)
    chat = [{"role": "system", "content": TOOL}, first]
    for turn in turns:
        content = turn["content"].replace("<answer>", CALL).replace("</answer>", END_OF_CALL)
        chat.append({"role": "tool" if turn["role"] == "user" else "assistant", "content": content})
    if len(turns) < 2 * GUESSES - 1:  # found before the last guess
        chat += [{"role": "tool", "content": "found"}, {"role": "assistant", "content": "found"}]
    return chat
