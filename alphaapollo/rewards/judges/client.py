"""Client of the judge model, shared by all judges of a rollout worker.

    ask -> cache, or the same judgement in flight -> free connection -> request, with retries -> verdict

The openai package retries a request MAX_RETRIES times, with growing pauses, after status 408, 409, 429 or 5xx and
after a broken connection. A reply without a verdict is requested once more.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from alphaapollo.config.schema import Judge
from alphaapollo.rewards.openai_connection import MALFORMED_RESPONSE_ERRORS, make_connection_options
from alphaapollo.types import JudgeUsage
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.redaction import redact, replace_surrogates

MAX_RETRIES = 4  # retries of one request
MAX_REPLIES = 2  # replies to read, of which the first has no verdict
DEADLINE = 3  # time limit of a request with all its retries, as a multiple of reward.judge.timeout
ValueT = TypeVar("ValueT")
CompleteMessage = Callable[[str], Awaitable[str | None]]


def remove_thoughts(text: str) -> str:
    return text.rpartition("</think>")[2]


class JudgeError(ValueError):
    """Error for a judgement that failed after all retries."""


class JudgeServer:
    """Model behind an OpenAI-compatible server.

    Raises ValueError if no model is set, the openai package is missing, or no API key is set for OpenAI's own server.
    """

    def __init__(self, judge: Judge):
        if not judge.model:
            raise ValueError("reward.judge.model is empty. Set it to the name of the model that judges answers.")
        connection = make_connection_options("reward.judge", judge.base_url, judge.api_key_env)
        import openai

        self._judge = judge
        self._client = openai.AsyncOpenAI(**connection, timeout=judge.timeout, max_retries=MAX_RETRIES)

    async def complete(self, content: str) -> str | None:
        """Return the reply to a user message. Raises JudgeError after all retries, or if the reply is malformed."""
        import openai

        judge, deadline = self._judge, DEADLINE * self._judge.timeout
        try:
            with HEARTBEAT.record_call("judge", timeout=deadline):
                async with asyncio.timeout(deadline):
                    reply = await self._client.chat.completions.create(
                        model=judge.model,
                        messages=[{"role": "user", "content": content}],
                        temperature=judge.temperature,
                        max_tokens=judge.max_tokens,
                    )
                    return reply.choices[0].message.content
        except TimeoutError as error:
            raise JudgeError(f"the judge gave no answer within {deadline:g} s") from error
        except openai.APIError as error:
            raise JudgeError(redact(f"the judge gave no answer: {type(error).__name__}: {error}")) from error
        except MALFORMED_RESPONSE_ERRORS as error:
            reason = f"the judge's server is not OpenAI-compatible: {type(error).__name__}: {error}"
            raise JudgeError(redact(reason)) from error

    async def close(self) -> None:
        await self._client.close()


class JudgeClient:
    """Client of a judge model, with a limit of concurrent judgements and a cache. Belongs to one event loop.

    complete: returns the model's reply to a user message, or raises JudgeError.
    """

    def __init__(self, judge: Judge, complete: CompleteMessage):
        self._judge, self._complete = judge, complete
        self._free_connections: asyncio.LifoQueue[int] = asyncio.LifoQueue()  # numbers, which name lanes in a trace
        for number in reversed(range(judge.max_connections)):
            self._free_connections.put_nowait(number)
        self._verdicts: OrderedDict[object, asyncio.Task[Any]] = OrderedDict()  # by message; the oldest use first
        self._running: set[asyncio.Task[Any]] = set()

    async def ask(self, content: str, read_verdict: Callable[[str], ValueT]) -> tuple[ValueT, JudgeUsage]:
        """Send a user message. Returns what `read_verdict` reads in the reply, without its thoughts, and the usage.

        `read_verdict` raises ValueError if it finds none. Equal messages get the same verdict, unless
        reward.judge.cache_size is 0. Failures are not cached. Raises JudgeError if the judgement fails.
        """
        content = replace_surrogates(content)  # completions may contain them
        start, key = time.perf_counter(), content if self._judge.cache_size else object()
        task, is_cached = self._verdicts.get(key), key in self._verdicts
        if task is None:
            task = self._verdicts[key] = asyncio.create_task(self._ask_model(content, read_verdict))
            self._running.add(task)
            task.add_done_callback(partial(self._end_judgement, key))
        self._verdicts.move_to_end(key)
        value = await _wait_for_shared(task)
        return value, JudgeUsage(1, int(is_cached), time.perf_counter() - start)

    def clear_cache(self) -> None:
        """Forget all verdicts, because the judge model has changed."""
        self._verdicts.clear()

    async def close(self) -> None:
        """End the judgements in flight, which raise JudgeError."""
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end_judgement(self, key: object, task: asyncio.Task[Any]) -> None:
        """Forget a failure, and the least recently used verdicts beyond reward.judge.cache_size."""
        self._running.discard(task)
        if self._verdicts.get(key) is task and (task.cancelled() or task.exception()):
            del self._verdicts[key]
        done = [name for name, one in self._verdicts.items() if one.done()]
        for name in done[: max(0, len(done) - self._judge.cache_size)]:
            del self._verdicts[name]

    async def _ask_model(self, content: str, read_verdict: Callable[[str], ValueT]) -> ValueT:
        number = await self._free_connections.get()
        try:
            with HEARTBEAT.use_track(lane=f"judge {number}"):
                return await self._read_reply(content, read_verdict)
        finally:
            self._free_connections.put_nowait(number)

    async def _read_reply(self, content: str, read_verdict: Callable[[str], ValueT]) -> ValueT:
        for _ in range(MAX_REPLIES):
            reply = remove_thoughts(await self._complete(content) or "")
            try:
                return read_verdict(reply)
            except ValueError as error:
                problem = str(error)
        raise JudgeError(f"{problem} (in {MAX_REPLIES} replies)")


async def wait_for_all(judgements: Iterable[Awaitable[ValueT]]) -> list[ValueT]:
    """Wait for all judgements and return their results. If one fails, raise its error after the others have ended, so
    that no request is in flight any more, e.g. at the engine of a policy that judges itself."""
    results = await asyncio.gather(*judgements, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _wait_for_shared(task: asyncio.Task[ValueT]) -> ValueT:
    """Wait for a task that others may wait for, too: if the caller is cancelled, the task continues."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if task.cancelled() and current is not None and not current.cancelling():
            raise JudgeError("the judge was closed before it gave a verdict") from None
        raise
