"""Client of the grader processes. It isolates a run from reward functions that hang or crash.

    score(prompt, text) -> judges, if any -> free slot -> idle process -> Score; a failure is retried once

When grading a completion exceeds the time limit or its process dies, only this completion fails. The next completion is
graded by a new process. A timeout is not retried. If a built-in grader fails on a completion but can grade another
answer to the same prompt, the completion is at fault, and its score is 0. There are reward.num_workers slots. A
completion that is slow to grade gives up its slot, so that it does not delay other completions. An async reward
function has one process, which grades MAX_OVERLAPPING completions at the same time. A function that takes lists gets
the completions of a CompletionGroup in one call. Judges run in this process, because they call no code of users."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.processes.host import (
    EXIT_GRACE,
    READ_GRACE,
    ProcessDiedError,
    ProcessError,
    ProcessHost,
    ProcessTimeoutError,
)
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.rewards.base import add_marks, get_question, make_failed_score, make_wrong_format_score
from alphaapollo.rewards.completion_group import CompletionGroup
from alphaapollo.rewards.components import TASK
from alphaapollo.rewards.grader_processes.worker import LoadReport, decode_reply
from alphaapollo.rewards.judges import JUDGES, CompleteMessage, JudgeClient, JudgeServer, wait_for_all
from alphaapollo.rewards.registry import assign_judges
from alphaapollo.types import Episode, EpisodeTurn, JudgeUsage, Prompt, Score, Turn
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.json_types import to_json_value

START_TIMEOUT = 120.0  # seconds to start a process, or to import a grader's libraries
MAX_ATTEMPTS = 2  # attempts per completion
ORDINARY_ANSWER = "<answer>0</answer>"  # if a grader fails on this, too, the ground truth or the machine is at fault
WORKER = "alphaapollo.rewards.grader_processes.worker"
SLOW_SECONDS = 0.5  # seconds after which a completion counts as slow
MAX_SLOW = 8  # slow completions that do not count towards reward.num_workers
MAX_OVERLAPPING = 64  # completions that an async reward function grades at the same time
GraderInput = tuple[str | None, Sequence[Turn], Mapping[str, Score]]
"""Text (None: the answer made from the ground truth), turns and the scores of judges of a completion."""


class RewardClient:
    """Client that computes rewards in grader processes, and adds reward.components. Belongs to one event loop."""

    def __init__(self, reward: Reward, custom: CustomRewardFunction):
        self._reward, self._custom = reward, custom
        self.policy: CompleteMessage | None = None  # the model of reward.judge.backend=policy, set by a rollout worker
        self.render: Callable[[Prompt], str] = get_question  # text of a prompt for OpenRLHF's functions
        self.max_steps = 0  # iterations of the run, for functions of TRL
        self.fails_incomplete = False  # whether a score that lacks a component is a failure
        self.loaded = LoadReport()  # functions that the processes load; empty until the first one has started
        self._slots = asyncio.Semaphore(reward.num_workers)
        self._slow_slots = asyncio.Semaphore(MAX_SLOW)
        self._processes: set[ProcessHost] = set()
        self._idle: list[ProcessHost] = []
        self._imported: WeakKeyDictionary[ProcessHost, set[str]] = WeakKeyDictionary()  # data sources of the graders
        self._starting = asyncio.Lock()  # held while the process of an async reward function starts
        self._tasks: set[asyncio.Task[tuple[list[Score], bool]]] = set()
        self._judge: JudgeClient | None = None  # created for the first completion that needs it
        self._server: JudgeServer | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Start the first grader process. Raises ValueError if it does not start or cannot load a reward function."""
        if self._reward.judge.model and importlib.util.find_spec("openai"):
            importlib.import_module("openai")  # takes a second, during which the event loop is blocked
        try:
            process = await self._start_process()
        except ProcessDiedError:  # possibly killed from outside: retry once
            process = await self._start_process()
        self._idle.append(process)

    async def score(self, prompt: Prompt, text: str, turns: Sequence[Turn] = ()) -> Score:
        """Score one completion. Never raises: after a timeout or MAX_ATTEMPTS failures, the score is GRADER_FAILED, or
        WRONG_FORMAT if the completion is at fault. turns: turns of the episode; empty if the text is the only turn."""
        try:
            with exclude_from_time_limit():
                verdicts = await self._ask_judges(prompt, add_marks(text, turns))
        except ValueError as error:
            return make_failed_score(str(error))
        if TASK in verdicts and not (self._reward.components or self._reward.required):
            return verdicts[TASK]
        group, completion = CompletionGroup.current.get(), (text, turns, verdicts)
        if group and self.loaded.takes_groups:
            score = await group.grade(completion, partial(self._grade_group, prompt))
        else:
            (score,) = await self._try_grading(prompt, [completion])
        uses_built_in_grader = not (TASK in verdicts or self._custom.path or self._reward.custom_module)
        if score.outcome.failed and uses_built_in_grader and await self._can_grade(prompt, turns, verdicts):
            verdicts_with_task = verdicts | {TASK: make_wrong_format_score(score.reason)}
            (score,) = await self._try_grading(prompt, [(text, turns, verdicts_with_task)])
        if score.skipped_components and self.fails_incomplete:
            return make_failed_score(f"{', '.join(score.skipped_components)}: NaN or infinite. Return a finite number.")
        return replace(score, judge_usage=sum((verdict.judge_usage for verdict in verdicts.values()), JudgeUsage()))

    async def _can_grade(self, prompt: Prompt, turns: Sequence[Turn], verdicts: dict[str, Score]) -> bool:
        """Return whether the grader works for an ordinary answer to the prompt."""
        (score,) = await self._try_grading(prompt, [(ORDINARY_ANSWER, turns, verdicts)])
        return not score.outcome.failed

    async def score_ground_truth(self, prompt: Prompt) -> Score:
        """Score an answer that the built-in grader makes from the ground truth. Below 1, no answer can be right."""
        return (await self._try_grading(prompt, [(None, (), {})]))[0]

    async def _ask_judges(self, prompt: Prompt, text: str) -> dict[str, Score]:
        """Return the scores of judges: {name of a component, or `task`: score}. Raises ValueError if one fails."""
        names = assign_judges(prompt, self._reward, bool(self._custom.path))
        if not names:
            return {}
        if self._is_closed:
            raise ValueError("the graders are closed")
        client = self._judge = self._judge or JudgeClient(self._reward.judge, self._open_judge_model())
        calls = [JUDGES[judge](client, self._reward, prompt, text) for judge in names.values()]
        return dict(zip(names, await wait_for_all(calls), strict=True))

    def _open_judge_model(self) -> CompleteMessage:
        if self._reward.judge.backend == "server":
            self._server = JudgeServer(self._reward.judge)
            return self._server.complete
        if self.policy is None:
            raise ValueError("reward.judge.backend=policy needs an engine, which this command lacks. Set it to server.")
        return self.policy

    def clear_judge_cache(self) -> None:
        """Forget the verdicts of reward.judge.backend=policy, after its weights have changed."""
        if self._judge and self.policy:
            self._judge.clear_cache()

    async def _grade_group(self, prompt: Prompt, completions: Sequence[GraderInput]) -> list[Score]:
        """Grade completions of a prompt in one call. If all fail, grade each alone, then the gradable ones together."""
        scores = await self._try_grading(prompt, completions)
        if len(completions) == 1 or not all(score.outcome.failed for score in scores):
            return scores
        calls = [self._try_grading(prompt, [completion]) for completion in completions]
        separate_scores = [score for (score,) in await asyncio.gather(*calls)]
        pairs = zip(completions, separate_scores, strict=True)
        gradable = [completion for completion, score in pairs if not score.outcome.failed]
        if len(gradable) == len(completions):  # only the call with all of them fails
            return scores
        regraded = iter(await self._try_grading(prompt, gradable) if gradable else ())
        return [score if score.outcome.failed else next(regraded) for score in separate_scores]

    async def _try_grading(self, prompt: Prompt, completions: Sequence[GraderInput]) -> list[Score]:
        """Grade completions of a prompt, at most MAX_ATTEMPTS times, in one request."""
        count, verdicts = len(completions), [scores for _, _, scores in completions]
        try:
            episodes = [self._make_episode(prompt, text, turns) for text, turns, _ in completions]
            request = pickle.dumps((prompt, episodes, verdicts))
        except (TypeError, ValueError) as error:
            return [make_failed_score(f"the trajectory cannot be sent to the reward function as JSON: {error}")] * count
        source = "" if TASK in verdicts[0] or self._custom.path else prompt.data_source
        limit = max(count * self._reward.timeout, START_TIMEOUT)
        for _ in range(MAX_ATTEMPTS):
            with exclude_from_time_limit(), HEARTBEAT.record_call("grade", timeout=limit):
                task = asyncio.create_task(self._grade_once(request, source, count))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                # If the caller is cancelled, the process finishes its work.
                scores, is_final = await asyncio.shield(task)
            if is_final:
                break
        return scores

    def _make_episode(self, prompt: Prompt, text: str | None, turns: Sequence[Turn]) -> Episode | None:
        """Return what reward functions get, with the turns as JSON values, because `Turn.info` may contain objects of
        classes that the grader process cannot import. Raises TypeError or ValueError if JSON cannot represent them."""
        if text is None:
            return None
        loaded, episode_turns, step = self.loaded, [EpisodeTurn(text)], 0
        if turns and loaded.takes_turns:
            records = [
                [turn.text, turn.observation, turn.reward, turn.valid, turn.info, list(turn.completion.token_ids)]
                for turn in turns
            ]
            values = json.loads(json.dumps(records, default=to_json_value))
            episode_turns = [EpisodeTurn(*record) for record in values]
            step = turns[-1].completion.weight_version
        prompt_text = self.render(prompt) if loaded.takes_prompt_text else ""
        return Episode(text, episode_turns, prompt_text, step, self.max_steps, add_marks(text, turns))

    async def close(self) -> None:
        """Kill the grader processes. Completions that are being graded get a failed score."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        if self._judge:
            await self._judge.close()
        if self._server:
            await self._server.close()
        await asyncio.gather(*self._tasks, *(process.close() for process in self._processes))

    async def _start_process(self) -> ProcessHost:
        settings = json.dumps([self._reward.model_dump(), self._custom.model_dump()])
        process = await ProcessHost.fork(WORKER, os.getpid(), settings)
        self._processes.add(process)
        if self._is_closed:
            process.kill()
        try:
            report = LoadReport(**json.loads(await process.read_first_reply(START_TIMEOUT)))
        except ProcessError as error:
            path = self._custom.path or self._reward.custom_module
            prefix = f"{path}: " if path else ""
            raise type(error)(f"{prefix}the grader process does not start: {error}") from error
        except BaseException:
            await process.close()
            raise
        if report.error:
            await process.close()
            raise ValueError(report.error)
        if report.is_async and not self.loaded.is_async:
            self._slots = asyncio.Semaphore(MAX_OVERLAPPING)
        self.loaded = report
        return process

    async def _grade_once(self, request: bytes, data_source: str, count: int) -> tuple[list[Score], bool]:
        """Send a request with `count` completions to a grader process. Returns the scores and whether they are final: a
        second attempt is useless after scores or a timeout. `data_source`: source of the grader to use; empty: none."""
        slots, timeout, is_async = self._slots, count * self._reward.timeout, self.loaded.is_async
        await slots.acquire()
        try:
            process = await self._take_process(data_source)
            # An async function is stopped by the process itself, with an empty reply.
            answer = asyncio.create_task(process.request(request, timeout, EXIT_GRACE if is_async else READ_GRACE))
            if not is_async:
                await asyncio.wait({answer}, timeout=SLOW_SECONDS)
                if not answer.done() and not self._slow_slots.locked():
                    await self._slow_slots.acquire()
                    slots.release()
                    slots = self._slow_slots
            if not (reply := await answer).strip():
                raise ProcessTimeoutError(f"the process gave no answer within {timeout:g} s")
            scores = decode_reply(reply)
            if not is_async:
                await self._put_back(process)
            return scores, not any(score.outcome.failed for score in scores)
        except (ValueError, OSError) as error:  # ProcessError, or an import that no longer works
            score = make_failed_score(f"the reward function gave no reward: {error}")
            return [score] * count, self._is_closed or isinstance(error, ProcessTimeoutError)
        finally:
            slots.release()

    async def _take_process(self, data_source: str) -> ProcessHost:
        """Return an idle or a new process that has imported the grader of the data source."""
        if self._is_closed:
            raise ValueError("the graders are closed")
        if self.loaded.is_async:
            async with self._starting:
                if not (self._idle and self._idle[0].is_running):
                    self._idle = [await self._start_process()]
                return self._idle[0]
        process = self._idle.pop() if self._idle else await self._start_process()
        imported = self._imported.setdefault(process, {""})
        if data_source not in imported:
            await process.request(pickle.dumps(data_source), START_TIMEOUT)
            imported.add(data_source)
        return process

    async def _put_back(self, process: ProcessHost) -> None:
        """Keep a process for other completions. End it if there are more than reward.num_workers, and nothing waits."""
        self._processes = {grader for grader in self._processes if grader.is_running}
        if len(self._processes) > self._reward.num_workers and not self._slots.locked():
            self._processes.discard(process)
            await process.close()
        else:
            self._idle.append(process)


def check_reward_function(reward: Reward, custom: CustomRewardFunction) -> None:
    """Check at startup that a grader process can load the user's reward function and all reward components. Raises
    ValueError if one of them cannot be loaded, or if importing it hangs or exits the process."""

    async def check_client_starts() -> None:
        client = RewardClient(reward, custom)
        await client.start()  # if it raises, its processes have ended
        await client.close()

    asyncio.run(check_client_starts())
