"""Process that runs graders: python -m alphaapollo.rewards.grader_processes.worker PARENT_PID GRADING (protocol.py)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from alphaapollo.rewards.base import failure, on_episodes, takes_trajectory, to_number, to_score
from alphaapollo.rewards.components import check_components, combine, load_components
from alphaapollo.rewards.custom import load_reward_function
from alphaapollo.rewards.grader_processes.protocol import (
    IMPORTING,
    READY,
    READY_FOR_TURNS,
    Grading,
    decode_request,
    encode_reply,
    read_frame,
    to_frame,
)
from alphaapollo.rewards.registry import get_reward
from alphaapollo.types import Episode, Prompt, Score
from alphaapollo.utils.user_module import describe, load_user_module

EpisodeFunction = Callable[[Prompt, Episode], Any]

PR_SET_PDEATHSIG = 1


class Worker:
    """Grades until the parent closes the pipe or dies."""

    def __init__(self, grading: Grading):
        self._requests, self._replies = _take_pipes()
        self._grading = grading
        self._custom: EpisodeFunction | None = None
        self._functions: dict[str, EpisodeFunction] = {}  # by data source
        self._components: dict[str, EpisodeFunction] = {}

    def run(self) -> None:
        grading, own = self._grading, []
        try:
            if grading.module:
                load_user_module(grading.module, "reward.custom_module")
            if grading.path:
                own = [load_reward_function(grading.path, grading.name)]
                self._custom = on_episodes(own[0])
            check_components(grading.weights, grading.required)
            components = load_components(grading.weights)
            self._components = {name: on_episodes(component) for name, component in components.items()}
        except ValueError as error:
            self._write(str(error).encode(errors="replace"))
            return
        self._write(READY_FOR_TURNS if any(map(takes_trajectory, [*own, *components.values()])) else READY)
        while (request := read_frame(self._requests)) is not None:
            self._write(encode_reply(self._grade(*decode_request(request))))

    def _grade(self, prompt: Prompt, episode: Episode) -> Score:
        grading = self._grading
        try:
            task = to_score((self._custom or self._built_in(prompt.data_source))(prompt, episode))
            if not (grading.weights or grading.required):
                return task
            parts = {
                name: to_number(component(prompt, episode), f"component {name!r}")
                for name, component in self._components.items()
            }
            return combine(task, parts, grading.weights, grading.required)
        except Exception as error:  # noqa: BLE001 whatever a reward function raises is a failure with a reason
            path = Path(grading.path or grading.module).expanduser().resolve()
            return failure(f"the reward function failed: {describe(error, path)}")

    def _built_in(self, data_source: str) -> EpisodeFunction:
        if data_source not in self._functions:
            self._write(IMPORTING)
            self._functions[data_source] = on_episodes(get_reward(data_source, self._grading.judge))
            self._write(READY)
        return self._functions[data_source]

    def _write(self, data: bytes) -> None:
        self._replies.write(to_frame(data))
        self._replies.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Our ends of the pipes; what a grader itself reads comes from nowhere, and what it prints goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _die_with(parent: int) -> None:
    """The kernel kills us when our parent dies, whatever a grader is doing; on other systems a closed pipe must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(0)


if __name__ == "__main__":
    _die_with(int(sys.argv[1]))
    Worker(Grading(**json.loads(sys.argv[2]))).run()
