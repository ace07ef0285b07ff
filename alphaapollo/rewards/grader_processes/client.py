"""Client of the grader processes. It isolates a run from reward functions that hang or crash.

    score(prompt, text) -> judges, if any -> free slot -> idle process -> Score; a failure is retried once

When grading a completion exceeds the time limit or its process dies, only this completion fails. The next completion is
graded by a new process. A timeout is not retried. If a built-in grader fails on a completion but can grade another
answer to the same prompt, the completion is at fault, and its score is 0. There are reward.num_workers slots. A
completion that is slow to grade gives up its slot, so that it does not delay other completions. Judges run in this
process, because they call no code of users.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from alphaapollo.config.schema import CustomRewardFunction, Reward
from alphaapollo.processes.host import (
    EXIT_GRACE,
    ProcessDiedError,
    ProcessError,
    ProcessHost,
    ProcessTimeoutError,
    make_subprocess_environ,
)
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.rewards.base import get_question, make_failed_score, make_wrong_format_score
from alphaapollo.rewards.components import TASK
from alphaapollo.rewards.grader_processes.protocol import LoadReport, decode_reply, encode_request
from alphaapollo.rewards.judges.client import CompleteMessage, JudgeClient, JudgeServer, wait_for_all
from alphaapollo.rewards.judges.graders import JUDGES
from alphaapollo.rewards.registry import assign_judges
from alphaapollo.types import JudgeUsage, Prompt, Score, Turn
from alphaapollo.utils.heartbeat import HEARTBEAT

START_TIMEOUT = 120.0  # seconds to start a process, or to import a grader's libraries
MAX_ATTEMPTS = 2  # attempts per completion
ORDINARY_ANSWER = "<answer>0</answer>"  # if a grader fails on this, too, the ground truth or the machine is at fault
WORKER = "alphaapollo.rewards.grader_processes.worker"
SLOW_SECONDS = 0.5  # seconds after which a completion counts as slow
MAX_SLOW = 8  # slow completions that do not count towards reward.num_workers
MAX_OVERLAPPING = 64  # completions that an async reward function grades at the same time


class RewardClient:
    """Client that computes rewards in grader processes, with the user's reward function or the built-in grader of the
    prompt's data source.

    The client adds the rewards of reward.components (see `add_component_rewards`). It belongs to one event loop.
    """

    def __init__(self, reward: Reward, custom: CustomRewardFunction):
        self._reward, self._custom = reward, custom
        self.policy: CompleteMessage | None = None  # the model of reward.judge.backend=policy, set by a rollout worker
        self.render: Callable[[Prompt], str] = get_question  # text of a prompt for OpenRLHF's functions
        self.max_steps = 0  # iterations of the run, for functions of TRL
        self.fails_incomplete = False  # whether a score that lacks a component is a failure
        self.loaded = LoadReport()  # the functions; known once a process has started
        self._slots = asyncio.Semaphore(reward.num_workers)
        self._slow_slots = asyncio.Semaphore(MAX_SLOW)
        self._overlapping_slots = asyncio.Semaphore(MAX_OVERLAPPING)
        self._processes: set[ProcessHost] = set()
        self._idle: list[ProcessHost] = []
        self._imported: WeakKeyDictionary[ProcessHost, set[str]] = (
            WeakKeyDictionary()
        )  # data sources with an imported grader
        self._starting = asyncio.Lock()  # of the process of an async reward function
        self._tasks: set[asyncio.Task[tuple[Score, bool]]] = set()
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
        """Score one completion. After a timeout or MAX_ATTEMPTS failures, the outcome is GRADER_FAILED with reward NaN,
        or WRONG_FORMAT with reward 0 if the completion is at fault; errors in a reward function are never raised.

        `turns`: turns of the episode, for reward functions that take a trajectory. Empty: the text is the only turn.
        """
        try:
            with exclude_from_time_limit():
                judged = await self._ask_judges(prompt, text)
        except ValueError as error:
            return make_failed_score(str(error))
        if TASK in judged and not (self._reward.components or self._reward.required):
            return judged[TASK]
        score = await self._grade_completion(prompt, text, turns, judged)
        if score.skipped_components and self.fails_incomplete:
            return make_failed_score(f"{', '.join(score.skipped_components)}: NaN or infinite. Return a finite number.")
        return replace(score, judge_usage=sum((one.judge_usage for one in judged.values()), JudgeUsage()))

    async def score_ground_truth(self, prompt: Prompt) -> Score:
        """Score an answer that the built-in grader makes from the ground truth. Not 1: no answer can be right."""
        return await self._try_grading(prompt, None, (), {})

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

    async def _grade_completion(
        self, prompt: Prompt, text: str, turns: Sequence[Turn], judged: dict[str, Score]
    ) -> Score:
        score = await self._try_grading(prompt, text, turns, judged)
        if not score.outcome.failed or TASK in judged or self._custom.path or self._reward.custom_module:
            return score
        if (await self._try_grading(prompt, ORDINARY_ANSWER, turns, judged)).outcome.failed:
            return score
        return await self._try_grading(prompt, text, turns, judged | {TASK: make_wrong_format_score(score.reason)})

    async def _try_grading(
        self, prompt: Prompt, text: str | None, turns: Sequence[Turn], judged: dict[str, Score]
    ) -> Score:
        try:
            shown = self.render(prompt) if self.loaded.takes_prompt_text else ""
            turns = turns if self.loaded.takes_turns else ()
            request = encode_request(prompt, text, turns, judged, shown, self.max_steps)
        except (TypeError, ValueError) as error:
            return make_failed_score(f"the trajectory cannot be sent to the reward function as JSON: {error}")
        for _ in range(MAX_ATTEMPTS):
            with (
                exclude_from_time_limit(),
                HEARTBEAT.record_call("grade", timeout=max(self._reward.timeout, START_TIMEOUT)),
            ):
                source = "" if TASK in judged or self._custom.path else prompt.data_source
                task = asyncio.create_task(self._grade_completion_once(request, source))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                # If the caller is cancelled, the process finishes its work.
                score, is_final = await asyncio.shield(task)
            if is_final:
                break
        return score

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
        process = await ProcessHost.start(WORKER, settings, make_subprocess_environ())
        self._processes.add(process)
        if self._is_closed:
            process.kill()
        try:
            report = LoadReport(**json.loads(await process.read_first_reply(START_TIMEOUT)))
        except ProcessError as error:
            path = self._custom.path or self._reward.custom_module
            raise type(error)(f"{path}: " * bool(path) + f"the grader process does not start: {error}") from error
        except BaseException:
            await process.close()
            raise
        if report.error:
            await process.close()
            raise ValueError(report.error)
        self.loaded = report
        return process

    async def _grade_completion_once(self, request: bytes, data_source: str) -> tuple[Score, bool]:
        """Send a request to an idle or a new grader process. Returns the score and whether it is final: a second
        attempt is useless after a score or a timeout. `data_source`: whose grader it needs; empty: none."""
        if self.loaded.is_async:
            return await self._grade_overlapping(request)
        await self._slots.acquire()
        slots = self._slots
        try:
            if self._is_closed:
                return make_failed_score("the graders are closed"), True
            process = self._idle.pop() if self._idle else await self._start_process()
            imported = self._imported.setdefault(process, {""})
            if data_source not in imported:
                await process.request(pickle.dumps(data_source), START_TIMEOUT)
                imported.add(data_source)
            answer = asyncio.create_task(process.request(request, self._reward.timeout))
            await asyncio.wait({answer}, timeout=SLOW_SECONDS)
            if not answer.done() and not self._slow_slots.locked():
                await self._slow_slots.acquire()
                self._slots.release()
                slots = self._slow_slots
            score = decode_reply(await answer)
            is_final = not score.outcome.failed
            self._idle.append(process)
        except (ValueError, OSError) as error:  # ProcessError, or an import that no longer works
            score, is_final = _describe_missing_reward(error)
        finally:
            slots.release()
        await self._end_surplus_processes()
        return score, is_final

    async def _grade_overlapping(self, request: bytes) -> tuple[Score, bool]:
        """Send a request to the process of an async reward function, like `_grade_completion_once`."""
        async with self._overlapping_slots:
            try:
                async with self._starting:
                    self._idle = [process for process in self._idle if process.is_running and not self._is_closed]
                    self._idle = self._idle or [await self._start_process()]
                timeout = self._reward.timeout  # the process itself stops the function
                reply = await self._idle[0].request(request, timeout, EXIT_GRACE)
                if not reply.strip():
                    raise ProcessTimeoutError(f"the process gave no answer within {timeout:g} s")
                score = decode_reply(reply)
            except (ValueError, OSError) as error:
                return _describe_missing_reward(error)
            return score, not score.outcome.failed

    async def _end_surplus_processes(self) -> None:
        """End idle grader processes above reward.num_workers, unless completions are waiting for a slot."""
        self._processes = {process for process in self._processes if process.is_running}
        while self._idle and len(self._processes) > self._reward.num_workers and not self._slots.locked():
            process = self._idle.pop()
            self._processes.discard(process)
            await process.close()


def _describe_missing_reward(error: Exception) -> tuple[Score, bool]:
    """Return the score of a completion for which a process gave no reply, and whether it is final."""
    score = make_failed_score(f"the reward function gave no reward: {error}")
    return score, isinstance(error, ProcessTimeoutError)


def check_reward_function(reward: Reward, custom: CustomRewardFunction) -> None:
    """Check at startup that a grader process can load the user's reward function and all reward components. Raises
    ValueError if one of them cannot be loaded, or if importing it hangs or exits the process."""

    async def check_client_starts() -> None:
        client = RewardClient(reward, custom)
        await client.start()  # if it raises, its processes have ended
        await client.close()

    asyncio.run(check_client_starts())
