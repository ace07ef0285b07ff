"""Choose and shorten samples of the model for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alphaapollo.types import IMAGE_MARK, Message, Trajectory, TrajectoryGroup
from alphaapollo.utils.redaction import redact, replace_control_characters

ELLIPSIS = " ... "


def choose_samples(groups: Sequence[TrajectoryGroup]) -> list[tuple[TrajectoryGroup, Trajectory]]:
    """Return the samples with the lowest, the median and the highest reward; the first of equal ones in prompt order.

    Failed samples have no reward and are left out.
    """
    scored = [(group, one) for group in groups for one in group.trajectories if not math.isnan(one.reward)]
    scored.sort(key=lambda sample: sample[1].reward)
    rewards = [one.reward for _, one in scored]
    indices = (rewards.index(rewards[at]) for at in {0, len(rewards) // 2, len(rewards) - 1} if rewards)
    return [scored[index] for index in sorted({*indices})]


def get_last_message(prompt: Sequence[Message] | str) -> str:
    """Return the prompt, or the content of its last message if it is a chat, with a description of its pictures."""
    if isinstance(prompt, str):
        return prompt
    text = prompt[-1]["content"]
    for picture in prompt[-1].get("images") or ():
        text = text.replace(IMAGE_MARK, f"[picture {picture}]" if isinstance(picture, str) else "[picture]", 1)
    return text


def shorten_text(text: str, max_chars: int) -> str:
    """Return the beginning and the end of a text, without secrets and control characters."""
    text = redact(replace_control_characters(text)).strip()
    if len(text) <= max_chars:
        return text
    start = (max_chars - len(ELLIPSIS)) // 2
    return text[:start].rstrip() + ELLIPSIS + text[len(text) - start :].lstrip()
