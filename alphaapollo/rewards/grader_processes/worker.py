"""Grader process, forked from a server that has imported this module (processes/forked_module.py).

A request is the pickled tuple (prompt, episodes, verdicts), or the pickled name of a data source, whose grader the
process then imports. An episode is None for the answer that the built-in grader makes from the ground truth.
`verdicts`: scores of judges by name, for each episode. A reply is JSON; the first one is a LoadReport. If the reward
function is async, requests overlap, and an empty reply is a timeout."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from inspect import isawaitable
from pathlib import Path
from typing import Any

import msgspec

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.processes.host import reserve_stdin_and_stdout
from alphaapollo.processes.watchdog import exit_when_process_ends
from alphaapollo.rewards.base import (
    adapt_to_episode,
    convert_to_float,
    convert_to_score,
    make_failed_score,
    takes_trajectory,
)
from alphaapollo.rewards.components import (
    MARK_READERS,
    TASK,
    add_component_rewards,
    check_component_names,
    load_components,
)
from alphaapollo.rewards.custom import EpisodeFunction, LoadedFunction, load_reward_function
from alphaapollo.rewards.registry import GRADERS, find_grader, load_answer_maker, load_grader
from alphaapollo.types import Episode, EpisodeTurn, Prompt, Score
from alphaapollo.utils.user_module import format_error, load_user_module

Episodes = Sequence[Episode | None]
Verdicts = Mapping[str, Score]


@dataclass(frozen=True)
class LoadReport:
    """Functions that a grader process has loaded."""

    error: str = ""  # why they cannot be loaded
    takes_turns: bool = False  # whether a reward function or component takes a trajectory
    is_async: bool = False  # whether requests may overlap
    columns: Sequence[str] = ()  # columns of the data that the user's function requires
    takes_prompt_text: bool = False
    takes_groups: bool = False  # whether the user's function gets the completions of a prompt in one call


def encode_reply(scores: Sequence[Score]) -> bytes:
    return json.dumps([*map(vars, scores)], default=vars).encode() + b"\n"


def decode_reply(line: bytes) -> list[Score]:
    return msgspec.convert(json.loads(line), list[Score])  # msgspec's own parser refuses NaN


class GraderWorker:
    """Request loop of a grader process. The loop ends when the parent process closes the pipe or dies."""

    def __init__(self, reward: Reward, custom: CustomRewardFunction):
        self._requests, self._replies = reserve_stdin_and_stdout()
        self._reward, self._custom = reward, custom
        self._custom_function: LoadedFunction | None = None
        self._graders: dict[str, EpisodeFunction] = {}  # by data source
        self._components: dict[str, EpisodeFunction] = {}

    def serve_requests(self) -> None:
        try:
            report = self._load_reward_functions()
        except ValueError as error:
            report = LoadReport(str(error))
        self._reply(0, json.dumps(asdict(report)).encode() + b"\n")
        if report.is_async:
            asyncio.run(self._serve_overlapping_requests())
        while not report.error and (line := self._requests.readline()):
            request = pickle.load(self._requests)
            if isinstance(request, str):
                with suppress(ValueError, ImportError):  # raised again, and reported, when the grader is used
                    self._get_function(request)
                self._reply(int(line), b"\n")
            else:
                self._reply(int(line), self._grade(*request))

    async def _serve_overlapping_requests(self) -> None:
        """Serve requests to an async reward function at the same time."""
        tasks: set[asyncio.Task[None]] = set()
        while line := await asyncio.to_thread(self._requests.readline):
            task = asyncio.create_task(self._answer(int(line), *pickle.load(self._requests)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _answer(self, number: int, prompt: Prompt, episodes: Episodes, verdicts: Sequence[Verdicts]) -> None:
        try:
            async with asyncio.timeout(self._reward.timeout * len(episodes)):
                reply = await self._grade_async(prompt, episodes, verdicts)
        except TimeoutError:
            reply = b"\n"
        self._reply(number, reply)

    def _load_reward_functions(self) -> LoadReport:
        """Load the user's reward function and the reward components."""
        reward, function = self._reward, None
        if reward.custom_module:
            load_user_module(reward.custom_module, "reward.custom_module")
        if self._custom.path:
            function = self._custom_function = load_reward_function(self._custom)
        check_component_names(reward.components, reward.required)
        components = load_components(reward.components, reward)
        self._components = {
            name: adapt_to_episode(component, name in MARK_READERS) for name, component in components.items()
        }
        functions: list[Callable[..., object]] = [*([function.function] if function else []), *components.values()]
        takes_turns = any(map(takes_trajectory, functions))
        if function is None:
            return LoadReport(takes_turns=takes_turns)
        has_group = function.grade_group is not None
        return LoadReport("", takes_turns, function.is_async, function.columns, function.takes_prompt_text, has_group)

    def _grade(self, prompt: Prompt, episodes: Episodes, verdicts: Sequence[Verdicts]) -> bytes:
        try:
            results = self._compute_task_rewards(prompt, episodes, verdicts)
            return self._encode_scores(prompt, episodes, verdicts, results)
        except Exception as error:  # noqa: BLE001 any exception of a reward function becomes a failure with a reason
            return encode_reply([self._make_failed_score(error)] * len(episodes))

    async def _grade_async(self, prompt: Prompt, episodes: Episodes, verdicts: Sequence[Verdicts]) -> bytes:
        try:
            results = self._compute_task_rewards(prompt, episodes, verdicts)
            results = await results if isawaitable(results) else results
            return self._encode_scores(prompt, episodes, verdicts, results)
        except Exception as error:  # noqa: BLE001 any exception of a reward function becomes a failure with a reason
            return encode_reply([self._make_failed_score(error)] * len(episodes))

    def _encode_scores(self, prompt: Prompt, episodes: Episodes, verdicts: Sequence[Verdicts], results: Any) -> bytes:
        def make_score(result: object, episode: Episode | None, judge_scores: Verdicts) -> Score:
            try:
                score = convert_to_score(result)
                if name := self._custom.accuracy:
                    score = replace(score, accuracy=(score.components | {"reward": score.reward}).get(name))
                return self._add_components(prompt, episode, judge_scores, score)
            except Exception as error:  # noqa: BLE001 one completion's failure is not that of the others
                return self._make_failed_score(error)

        return encode_reply([*map(make_score, results, episodes, verdicts)])

    def _make_failed_score(self, error: Exception) -> Score:
        path = self._custom.path or self._reward.custom_module
        reason = format_error(error, Path(path).expanduser().resolve() if path else None)
        return make_failed_score(f"the reward function failed: {reason}")

    def _compute_task_rewards(self, prompt: Prompt, episodes: Episodes, verdicts: Sequence[Verdicts]) -> Any:
        """Return a list of the results of the episodes, or an awaitable of it."""
        if self._custom_function:
            return self._custom_function.grade_all(prompt, [episode for episode in episodes if episode])
        return [
            scores.get(TASK) or self._compute_task_reward(prompt, episode)
            for scores, episode in zip(verdicts, episodes, strict=True)
        ]

    def _compute_task_reward(self, prompt: Prompt, episode: Episode | None) -> object:
        if episode is None:
            answer = load_answer_maker(prompt.data_source)(prompt)
            if answer is None:
                return 1.0
            episode = Episode(answer, [EpisodeTurn(answer)])
        return self._get_function(prompt.data_source)(prompt, episode)

    def _add_components(
        self, prompt: Prompt, episode: Episode | None, verdicts: Mapping[str, Score], task: Score
    ) -> Score:
        weights, required = self._reward.components, self._reward.required
        if episode is None or not (weights or required):
            return task
        judge_scores = {name: score for name, score in verdicts.items() if name != TASK}
        values = {name: score.reward for name, score in judge_scores.items()} | {
            name: convert_to_float(component(prompt, episode), f"component {name!r}")
            for name, component in self._components.items()
        }
        for score in judge_scores.values():  # add the criteria of a rubric, but not its accuracy
            parts = {name: part for name, part in score.components.items() if name != "accuracy"}
            task = replace(task, components=task.components | parts)
        return add_component_rewards(task, values, weights, required)

    def _get_function(self, data_source: str) -> EpisodeFunction:
        if data_source not in self._graders:
            reads_marks = find_grader(data_source) in GRADERS
            self._graders[data_source] = adapt_to_episode(load_grader(data_source, self._reward), reads_marks)
        return self._graders[data_source]

    def _reply(self, number: int, reply: bytes) -> None:
        self._replies.write(b"%d " % number + reply)
        self._replies.flush()


def main(words: Sequence[str]) -> None:
    """Serve requests. words: pid of the process that sends them, and its settings as JSON."""
    exit_when_process_ends(int(words[0]))
    reward, custom = json.loads(words[1])
    GraderWorker(Reward(**reward), CustomRewardFunction(**custom)).serve_requests()
