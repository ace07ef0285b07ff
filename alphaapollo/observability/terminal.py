"""Terminal output of commands, and samples of the model that are shown there."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from threading import RLock
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from alphaapollo.types import IMAGE_MARK, Message, Trajectory, TrajectoryGroup
from alphaapollo.utils.redaction import redact, replace_control_characters

ELLIPSIS = " ... "


class Terminal(Console):
    """Variant of rich's Console that uses colors and live displays only if the output is a terminal.

    It ignores FORCE_COLOR, which CI services set and which would write escape codes into log files. If the reader of a
    pipe exits (`... | head`), further output is dropped, whereas rich's Console would exit the program.
    """

    def __init__(
        self, *, file: IO[str] | None = None, stderr: bool = False, force_terminal: bool | None = None, **options: Any
    ):
        stream: Any = file or (sys.stderr if stderr else sys.stdout)  # None if closed by `>&-`
        if force_terminal is None:
            force_terminal = stream is not None and stream.isatty()
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # shows characters that the encoding lacks as ?
        super().__init__(file=file, stderr=stderr, force_terminal=force_terminal, **options)
        self.num_prints, self._print_lock = 0, RLock()

    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does, without characters of models and servers that would control the terminal."""
        objects = tuple(map(_replace_control_characters, objects))
        with self._print_lock:  # rich lays out and writes separately, so output of two threads could mix
            super().print(*objects, **options)
            self.num_prints += 1

    def write(self, text: str) -> None:
        """Print plain text without markup and line wrapping."""
        self.print(text, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.file = open(os.devnull, "w")  # noqa: SIM115


def _replace_control_characters(value: object) -> object:
    if isinstance(value, Text):
        value = value.copy()
        value.plain = replace_control_characters(value.plain)
    return replace_control_characters(value) if isinstance(value, str) else value


def choose_samples(groups: Sequence[TrajectoryGroup]) -> list[tuple[TrajectoryGroup, Trajectory]]:
    """Return the samples with the lowest, the median and the highest reward; the first of equal ones in prompt order.

    Failed samples have no reward and are left out.
    """
    scored = [(group, sample) for group in groups for sample in group.trajectories if not math.isnan(sample.reward)]
    scored.sort(key=lambda sample: sample[1].reward)
    rewards = [sample.reward for _, sample in scored]
    indices = (rewards.index(rewards[at]) for at in {0, len(rewards) // 2, len(rewards) - 1} if rewards)
    return [scored[index] for index in sorted({*indices})]


def get_last_message(prompt: Sequence[Message] | str) -> str:
    """Return the prompt, or the content of its last message if it is a chat, with a description of its images."""
    if isinstance(prompt, str):
        return prompt
    text = prompt[-1]["content"]
    for encoded_image in prompt[-1].get("images") or ():
        text = text.replace(IMAGE_MARK, f"[image {encoded_image}]" if isinstance(encoded_image, str) else "[image]", 1)
    return text


def shorten_text(text: str, max_chars: int) -> str:
    """Return the beginning and the end of a text, without secrets and control characters."""
    text = redact(replace_control_characters(text)).strip()
    if len(text) <= max_chars:
        return text
    start = (max_chars - len(ELLIPSIS)) // 2
    return text[:start].rstrip() + ELLIPSIS + text[len(text) - start :].lstrip()
