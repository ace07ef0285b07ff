"""Puzzles of the package reasoning-gym, for the environment and the grader `reasoning_gym`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PUZZLE_KEY = "reasoning_gym"
"""Entry of `Prompt.extra_info` that the environment writes for the grader: {task, level, settings, entry}."""


def make_puzzle_dataset(task: str, level: int | None, settings: Mapping[str, object], seed: int) -> Any:
    """Create a reasoning_gym data set with one puzzle of a task, e.g. chain_sum. level: of the task's curriculum; None:
    its default settings. `settings` override those of the level. Raises ValueError if reasoning_gym rejects them."""
    from reasoning_gym import factory  # takes seconds to import

    dataset_class, config_class = factory.DATASETS[task]
    fixed = {"seed": seed, "size": 1}
    try:
        if level is None:
            return dataset_class(config_class(**settings, **fixed))
        curriculum = factory.create_curriculum(task)
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration({**settings, **fixed})
        for name, value in settings.items():
            setattr(config, name, value)
        return dataset_class(config)
    except (AssertionError, TypeError, ValueError) as error:
        at = "" if level is None else f" at level {level}"
        raise ValueError(
            f"reasoning_gym's task {task!r} cannot be created{at} with {dict(settings)}: {error}. Change its settings."
        ) from error
