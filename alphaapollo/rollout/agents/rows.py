"""Turns and rows to train on of a session (session.py).

A path of the session's forest is one token sequence. The longest path from a root is one row. Each remaining branch is
a row of its own, in which the tokens that it shares with another row are context. So each sampled token is trained
on once, after exactly the tokens that the engine received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from alphaapollo.rollout.agents.session import AgentSession, Answer, Request
from alphaapollo.rollout.context import build_row
from alphaapollo.types import ImageInput, Message, Row, Turn

TrainedRows = Literal["all", "last", "main"]


def build_turns_and_rows(
    session: AgentSession, trained_rows: TrainedRows, untrained_roles: Sequence[str]
) -> tuple[list[Turn], list[Row], list[list[int]], list[tuple[ImageInput, ...]]]:
    """Return the turns of a session, its rows to train on, and tokens and images of the engine's prompt of each turn.

    Turns that are not trained on follow the turns of the rows: those of other rows than `trained_rows`, and those of
    `untrained_roles`. The rows are in the order of their last answers, so that the last row ends with the last one.
    """
    branches = find_branches(session.answers)
    if trained_rows == "main":
        branches = branches[:1]
    elif trained_rows == "last":
        branches = [branch for branch in branches if session.answers[-1] in branch]
    chosen = [[one for one in branch if one.request.role not in untrained_roles] for branch in branches]
    turns: list[Turn] = []
    rows: list[Row] = []
    prompts: list[list[int]] = []
    images: list[tuple[ImageInput, ...]] = []
    numbers = {answer: number for number, answer in enumerate(session.answers)}
    for answers in sorted(filter(None, chosen), key=lambda answers: numbers[answers[-1]]):
        first_turn = len(turns)
        before, images_before = list[int](), 0
        for answer in answers:
            context = answer.prompt_ids[len(before) :], answer.images[images_before:]
            turns.append(_make_turn(numbers, answer, *context))
            before, images_before = answer.token_ids, len(answer.images)
        for turn, answer, following in zip(turns[first_turn:], answers, answers[1:], strict=False):
            turn.observation = list_new_messages(following.request, answer)
        first = answers[0]
        num_earlier_tokens = len(first.prompt_ids) - len(first.path[0].prompt_ids)
        rows.append(build_row(turns[first_turn:], first_turn, num_earlier_tokens))
        prompts += [answer.prompt_ids for answer in answers]
        images += [answer.images for answer in answers]
    trained = {turn.answer_number for turn in turns}
    for answer, number in numbers.items():
        if number not in trained:
            turns.append(_make_turn(numbers, answer, answer.prompt_ids, answer.images))
    for turn in turns:  # the rows contain them
        turn.completion = replace(turn.completion, columns={})
    return turns, rows, prompts, images


def find_branches(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Split a forest into paths: the longest path from the first root, then the branches off it, and so on. A branch
    begins with its first answer that is in no earlier path."""
    children: dict[Answer | None, list[Answer]] = defaultdict(list)
    for answer in answers:
        children[answer.parent].append(answer)
    depth: dict[Answer, int] = {}
    for answer in reversed(answers):  # children come after their parents
        depth[answer] = 1 + max((depth[child] for child in children[answer]), default=0)
    branches: list[list[Answer]] = []
    waiting = list(children[None])
    while waiting:
        branch, options = [], [waiting.pop(0)]
        while options:
            longest = max(options, key=lambda one: depth[one])  # the first one of several
            waiting += [one for one in options if one is not longest]
            branch.append(longest)
            options = children[longest]
        branches.append(branch)
    return branches


def _make_turn(
    numbers: Mapping[Answer, int], answer: Answer, context_ids: list[int], images: tuple[ImageInput, ...]
) -> Turn:
    """numbers: position of each answer in the session."""
    request, parent, number = answer.request, answer.parent, numbers[answer]
    info = {
        "request": request.id,
        "role": request.role,
        "difference": request.difference,
        "reused_tokens": len(parent.token_ids) if parent else 0,
        "constrained": request.is_constrained,
        "last_answer": number == len(numbers) - 1,
    }
    shown = {name: value for name, value in info.items() if value}
    reward, sampled = answer.reward or 0.0, answer.sampled
    turn = Turn(context_ids, sampled.completion, sampled.text, reward, info=shown, context_images=images)
    turn.answer_number = number
    return turn


def list_new_messages(request: Request, parent: Answer | None) -> list[Message]:
    """Return the messages that a request adds to the answer that it continues; its whole chat if there is none."""
    keys = request.keys[len(parent.request.keys) + 1 :] if parent else request.keys
    messages = [Message(role=key.role, content=key.text) for key in keys]
    for message, key in zip(messages, keys, strict=True):
        if key.images:
            message["images"] = [request.encoded_images[digest] for digest in key.images]
    return messages
