"""Puzzles of the package reasoning-gym: one question, one answer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.tag_parser import read_action
from alphaapollo.environments.text_game import fill_template, instance_seed
from alphaapollo.tools.reasoning_gym_data import make_dataset
from alphaapollo.types import Message, Prompt
from alphaapollo.utils.registry import did_you_mean

PROMPT = "{question}\n\nThink first. Then give the answer, and nothing else, in <answer>...</answer>."
PUZZLE = "reasoning_gym"  # the key of extra_info that the grader reads
EXCLUDED_TASKS = frozenset({"composite"})  # a mixture of other tasks
_puzzle_lock = Lock()  # the samples of a group start at once: one generates the puzzle, the others use the cache


def check(config: Env) -> None:
    """Check that every task can be made with its settings (ValueError)."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "env.env_name=reasoning_gym needs the package reasoning-gym. Install it: pip install -e '.[reasoning-gym]'"
        )
    settings = config.reasoning_gym
    if not settings.tasks:
        raise ValueError("env.reasoning_gym.tasks is empty. List tasks, e.g. [chain_sum,countdown], or use [all].")
    known = task_names(None)
    for task in [*settings.settings, *(task for task in settings.tasks if task != "all")]:
        if task not in known:
            hint = did_you_mean(task, known, count=3)
            raise ValueError(f"env.reasoning_gym: no task {task!r}.{hint} Known: {', '.join(known)}.")
    for task in settings.tasks:
        if task != "all":
            make_dataset(task, settings.level, settings.settings.get(task, {}), seed=0)


def task_names(level: int | None) -> list[str]:
    """The tasks that `all` means: every task, or with a level every task that has a curriculum."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    return sorted(set(DATASETS if level is None else CURRICULA) - EXCLUDED_TASKS)


@register_environment("reasoning_gym", check=check, tools=None, own_prompts=True)
class ReasoningGymEnvironment:
    """A row's env_kwargs.task and .level override env.reasoning_gym.tasks and .level, so that the order of the rows can
    be a curriculum (data.shuffle=false)."""

    def __init__(self, services: Services):
        self._config, self._score = services.config, services.score

    def reset(self, prompt: Prompt) -> Observation:
        settings, seed = self._config.reasoning_gym, instance_seed(self._config, prompt)
        task = prompt.env_kwargs.get("task")
        if task is None:
            every = task_names(settings.level)
            tasks = [task for name in settings.tasks for task in (every if name == "all" else [name])]
            task = tasks[seed % len(tasks)]
        level = prompt.env_kwargs.get("level")
        puzzle = {
            "task": task,
            "level": settings.level if level is None else int(level),
            "settings": settings.settings.get(task, {}),
        }
        with _puzzle_lock:
            entry = _make_puzzle(json.dumps(puzzle), seed % 2**31)
        self._prompt = replace(
            prompt,
            data_source="reasoning_gym",
            ground_truth=str(entry["answer"]),
            extra_info={**prompt.extra_info, PUZZLE: {**puzzle, "entry": entry}},
        )
        question = fill_template(self._config.prompt or PROMPT, question=entry["question"])
        return Observation([Message(role="user", content=question)])

    async def step(self, action: str) -> StepResult:
        found = read_action(action)
        return StepResult(
            done=True,
            valid=not found.problem,
            score=await self._score(self._prompt, action[: found.kept_chars]),
            kept_chars=found.kept_chars,
            info={"task": self._prompt.extra_info[PUZZLE]["task"]},
        )

    async def close(self) -> None: ...


@lru_cache(maxsize=256)
def _make_puzzle(puzzle: str, seed: int) -> dict[str, Any]:
    entry: dict[str, Any] = make_dataset(**json.loads(puzzle), seed=seed)[0]
    return entry
