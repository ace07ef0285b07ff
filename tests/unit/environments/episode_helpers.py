"""Play episodes of an environment without a rollout worker; random texts of a model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from alphaapollo.config.schema import Env
from alphaapollo.environments import get_environment_spec
from alphaapollo.environments.base import Environment, Observation, ScoreFn, Services, StepResult
from alphaapollo.environments.memory import Step, select_steps
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.user_module import load_user_module

Agent = Callable[[Environment, str], str]  # (environment, last observation) -> text

WORDS = ["up", "down", "left", "right", "7", "50", "-3", "0", "99999999999999999999999", "3.5", "12 13", "\u0663"]
WORDS += ["<answer>", "</answer>", "<think>", "</think>", "<python_code>", "\n", " ", "\0", "\ud800", "é"]
WORDS += ["{low}", "%s", "higher", "[1, 2]", "None", "__import__('os')", "9**9**9**9", "\\boxed{4}", "x" * 5000]
WORDS += ["<answer>" * 2000]

EXAMPLES = Path(__file__).parents[3] / "examples"


def game(name: str, max_steps: int = 7, **settings: Any) -> Env:
    """Settings of a game of the examples, guessing_game or grid_world, with its environment registered."""
    module = str(EXAMPLES / name / "environment.py")
    load_user_module(module, "env.custom_module")
    return Env(env_name=name, custom_module=module, max_steps=max_steps, **settings)


async def no_grader(prompt: Prompt, text: str) -> Score:
    raise AssertionError("this environment computes its own scores")


async def contains_truth(prompt: Prompt, text: str) -> Score:
    """Grader: 1 if the text contains the ground truth."""
    return Score(float(str(prompt.ground_truth) in text))


def make(config: Env, score: ScoreFn = no_grader, **services: Any) -> Environment:
    """Environment with these services, e.g. `tools`."""
    return get_environment_spec(config.env_name).factory(Services(score, config, **services))


async def _await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def act(config: Env, prompt: Prompt, *texts: str, **services: Any) -> tuple[Observation, list[StepResult]]:
    """First observation and results of an episode in which the model writes these texts."""
    environment = make(config, **services)
    try:
        first = await _await(environment.reset(prompt))
        return first, [await _await(environment.step(text)) for text in texts]
    finally:
        await _await(environment.close())


def take_turns(config: Env, prompt: Prompt, *texts: str, **services: Any) -> tuple[Observation, list[StepResult]]:
    return asyncio.run(act(config, prompt, *texts, **services))


def play(config: Env, agent: Agent, prompt: Prompt) -> list[StepResult]:
    """One episode to its end or to env.max_steps, with the memory prompts if env.context=memory."""

    async def run() -> list[StepResult]:
        environment = make(config)
        first = await _await(environment.reset(prompt))
        seen = first if isinstance(first, str) else first.messages[-1]["content"]
        results: list[StepResult] = []
        steps: list[Step] = []
        while not (results and results[-1].done) and len(results) < config.max_steps:
            text = agent(environment, seen)
            result = await _await(environment.step(text))
            results.append(result)
            if result.observation is None:
                break
            seen = result.observation.messages[-1]["content"]
            steps.append(Step(text, result.observation.messages, result.reward))
            if config.context == "memory":
                seen = environment.recall(select_steps(steps, config.history_length, config.memory_type))[-1]["content"]
        await _await(environment.close())
        return results

    return asyncio.run(run())


def row(id: int = 0, extra_info: Any = None, **env_kwargs: Any) -> Prompt:
    """Row of a dataset whose environment writes the prompt."""
    chat = [Message(role="user", content="The environment writes this prompt.")]
    return Prompt(id, "text", chat, env_kwargs=env_kwargs, extra_info=extra_info or {})


def random_agent(seed: int) -> Agent:
    rng = Random(seed)

    def agent(environment: Environment, seen: str) -> str:
        text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))
        return f"<answer>{text}</answer>" if rng.random() < 0.5 else text

    return agent


def check_results(results: list[StepResult], max_steps: int) -> None:
    """Check an episode of an environment that always ends."""
    assert 1 <= len(results) <= max_steps
    assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
    assert all(result.observation is not None for result in results[:-1])
    score = results[-1].score
    assert score is not None and not score.outcome.failed and 0.0 <= score.reward <= 1.0
