"""Environment for puzzles of the package reasoning-gym: one question and one answer per episode."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock

from alphaapollo.config.schema import Env
from alphaapollo.environments.action_parser import read_action
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.environments.text_game import derive_instance_seed
from alphaapollo.plugins.adapters.reasoning_gym_puzzles import PUZZLE_KEY, make_puzzle_dataset
from alphaapollo.types import JsonObject, Message, Prompt
from alphaapollo.utils.registry import suggest_similar
from alphaapollo.utils.text import fill_template

PROMPT = "{question}\n\nThink first. Then give the answer, and nothing else, in <answer>...</answer>."
EXCLUDED_TASKS = frozenset({"composite"})  # a mixture of other tasks
_puzzle_lock = Lock()  # samples of a group start together: one generates the puzzle, the rest read the cache


def check_settings(config: Env) -> None:
    """Raise ValueError if the package is missing, or a task is unknown or rejects its settings."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "env.env_name=reasoning_gym needs the package reasoning-gym. Install it: pip install -e '.[reasoning-gym]'"
        )
    settings = config.find_plugin_section("reasoning_gym")
    if not settings.tasks:
        raise ValueError("env.reasoning_gym.tasks is empty. List tasks, e.g. [chain_sum,countdown], or use [all].")
    known = list_tasks(None)
    for task in [*settings.settings, *(task for task in settings.tasks if task != "all")]:
        if task not in known:
            hint = suggest_similar(task, known, count=3)
            raise ValueError(f"env.reasoning_gym: unknown task {task!r}.{hint} Known tasks: {', '.join(known)}.")
    for task in settings.tasks:
        if task != "all":
            make_puzzle_dataset(task, settings.level, settings.settings.get(task, {}), seed=0)


def list_tasks(level: int | None) -> list[str]:
    """Return the tasks that tasks=[all] stands for: all tasks, or with a level, all tasks that have a curriculum."""
    from reasoning_gym.factory import CURRICULA, DATASETS

    return sorted(set(DATASETS if level is None else CURRICULA) - EXCLUDED_TASKS)


@register_environment("reasoning_gym", check=check_settings, tools=None, own_prompts=True)
class ReasoningGymEnvironment:
    """Environment of one puzzle. The keys `task` and `level` of a prompt's env_kwargs override env.reasoning_gym."""

    def __init__(self, services: Services):
        self._config, self._score, self._turns = services.config, services.score, services.turns

    def reset(self, prompt: Prompt) -> Observation:
        settings, seed = self._config.find_plugin_section("reasoning_gym"), derive_instance_seed(self._config, prompt)
        task = prompt.env_kwargs.get("task")
        if task is None:
            every = list_tasks(settings.level)
            tasks = [task for name in settings.tasks for task in (every if name == "all" else [name])]
            task = tasks[seed % len(tasks)]
        level = prompt.env_kwargs.get("level")
        puzzle = {
            "task": task,
            "level": settings.level if level is None else int(level),
            "settings": settings.settings.get(task, {}),
        }
        with _puzzle_lock:
            entry = _generate_puzzle(json.dumps(puzzle), seed % 2**31)
        self._prompt = replace(
            prompt,
            data_source="reasoning_gym",
            ground_truth=str(entry["answer"]),
            extra_info={**prompt.extra_info, PUZZLE_KEY: {**puzzle, "entry": entry}},
        )
        question = fill_template(self._config.prompt or PROMPT, question=entry["question"])
        return Observation([Message(role="user", content=question)])

    async def step(self, action: str) -> StepResult:
        found = read_action(action, turns=self._turns)
        return StepResult(
            done=True,
            valid=not found.error,
            score=await self._score(self._prompt, action[: found.kept_chars]),
            kept_chars=found.kept_chars,
            info={"task": self._prompt.extra_info[PUZZLE_KEY]["task"]},
        )

    async def close(self) -> None: ...


@lru_cache(maxsize=256)
def _generate_puzzle(puzzle_json: str, seed: int) -> JsonObject:
    """Generate the puzzle of a seed. `puzzle_json`: {task, level, settings} as JSON, which can be a cache key."""
    entry: JsonObject = make_puzzle_dataset(**json.loads(puzzle_json), seed=seed)[0]
    return entry
