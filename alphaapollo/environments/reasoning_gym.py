"""The generated puzzles of the package reasoning-gym, by the names of its tasks: one question, one answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.read_tags import Unreadable, read_action
from alphaapollo.environments.text_game import fill, instance_seed
from alphaapollo.types import Message, Prompt
from alphaapollo.utils.registry import nearest

PROMPT = "{question}\n\nThink first. Then give the answer, and nothing else, in <answer>...</answer>."
PUZZLE = "reasoning_gym"  # the entry of extra_info that the grader looks at
NOT_TASKS = frozenset({"composite"})  # a mixture of others
_making = Lock()  # the samples of a group begin at once: one makes the puzzle, the others find it made


def check(config: Env) -> None:
    """Every task can be made with its settings (ValueError: which cannot, and why)."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "env.env_name=reasoning_gym needs its package: pip install -e '.[reasoning-gym]' in the clone."
        )
    settings = config.reasoning_gym
    if not settings.tasks:
        raise ValueError("env.reasoning_gym.tasks is empty: name tasks, e.g. [chain_sum,countdown], or write [all].")
    known = task_names(None)
    for task in [*settings.settings, *(task for task in settings.tasks if task != "all")]:
        if task not in known:
            near = nearest(task, known)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"env.reasoning_gym: no task {task!r}.{hint} Known: {', '.join(known)}.")
    for task in settings.tasks:
        if task != "all":
            _make(task, settings.level, settings.settings.get(task, {}), seed=0)


def task_names(level: int | None) -> list[str]:
    """What `all` stands for: every task; with a level, every one that has a curriculum."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    return sorted(set(DATASETS if level is None else CURRICULA) - NOT_TASKS)


def tasks_of(config: Env) -> list[str]:
    """The tasks to draw from; one that stands there twice is drawn twice as often."""
    every = task_names(config.reasoning_gym.level)
    return [task for name in config.reasoning_gym.tasks for task in (every if name == "all" else [name])]


@register_environment("reasoning_gym", check=check, tools=None, own_prompts=True)
class ReasoningGym:
    """A row's own env_kwargs.task and .level come before env.reasoning_gym.tasks and .level, so the order of
    the rows is a curriculum (data.shuffle=false)."""

    def __init__(self, services: Services):
        self._config, self._score = services.config, services.score

    def reset(self, prompt: Prompt) -> Observation:
        settings, seed = self._config.reasoning_gym, instance_seed(self._config, prompt)
        task = prompt.env_kwargs.get("task")
        if task is None:
            tasks = tasks_of(self._config)
            task = tasks[seed % len(tasks)]
        level = prompt.env_kwargs.get("level")
        puzzle = {
            "task": task,
            "level": settings.level if level is None else int(level),
            "settings": settings.settings.get(task, {}),
        }
        with _making:
            entry = _entry(json.dumps(puzzle), seed % 2**31)
        self._prompt = replace(
            prompt,
            data_source="reasoning_gym",
            ground_truth=str(entry["answer"]),
            extra_info={**prompt.extra_info, PUZZLE: {**puzzle, "entry": entry}},
        )
        question = fill(settings.prompt or PROMPT, question=entry["question"])
        return Observation([Message(role="user", content=question)])

    async def step(self, action: str) -> StepResult:
        found = read_action(action)
        kept = None if isinstance(found, Unreadable) else found.kept_chars
        return StepResult(
            done=True,
            valid=not isinstance(found, Unreadable),
            score=await self._score(self._prompt, action[:kept]),
            kept_chars=kept,
            info={"task": self._prompt.extra_info[PUZZLE]["task"]},
        )

    async def close(self) -> None:
        """Nothing is held."""
        return


@lru_cache(maxsize=256)
def _entry(puzzle: str, seed: int) -> dict[str, Any]:
    entry: dict[str, Any] = _make(**json.loads(puzzle), seed=seed)[0]
    return entry


def _make(task: str, level: int | None, settings: Mapping[str, Any], seed: int) -> Any:
    from alphaapollo.rewards.reasoning_gym import make_dataset  # here, for it takes seconds to import

    return make_dataset(task, level, settings, seed)
