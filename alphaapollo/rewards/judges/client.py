"""Client of the judge model, shared by all judges of a rollout worker.

    ask -> cache, or the same judgement in flight -> free connection -> request, with retries -> verdict

The openai package retries a request MAX_RETRIES times, with growing pauses, after status 408, 409, 429 or 5xx and
after a broken connection. A reply without a verdict is requested once more.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
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
        self._cache: OrderedDict[str, Any] = OrderedDict()  # request key -> value; the least recently used first
        self._running: dict[str, asyncio.Task[Any]] = {}  # request key -> judgement in flight
        self._numbers = itertools.count()
        self._num_models = 0  # models before the current one, whose verdicts in flight are not used again

    async def ask(self, content: str, read_verdict: Callable[[str], ValueT]) -> tuple[ValueT, JudgeUsage]:
        """Send a user message. Returns what `read_verdict` reads in the reply, without its thoughts, and the usage.

        `read_verdict` raises ValueError if it finds none. Equal messages get the same verdict, unless
        reward.judge.cache_size is 0. Failures are not cached. Raises JudgeError if the judgement fails.
        """
        content = replace_surrogates(content)  # completions may contain them
        start, key = time.perf_counter(), self._make_key(content)
        is_cached = key in self._cache or key in self._running
        if key in self._cache:
            self._cache.move_to_end(key)
            value = self._cache[key]
        else:
            if key not in self._running:
                self._running[key] = asyncio.create_task(self._judge_and_cache(key, content, read_verdict))
            value = await _wait_for_shared(self._running[key])
        return value, JudgeUsage(1, int(is_cached), time.perf_counter() - start)

    def clear_cache(self) -> None:
        """Forget all verdicts, because the judge model has changed."""
        self._cache.clear()
        self._num_models += 1

    async def close(self) -> None:
        """End the judgements in flight, which raise JudgeError."""
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _make_key(self, content: str) -> str:
        """Return a digest of the complete request. Without a cache, it is unique."""
        number = None if self._judge.cache_size else next(self._numbers)
        parts = [self._judge.model, self._judge.temperature, self._judge.max_tokens, content, number, self._num_models]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    async def _judge_and_cache(self, key: str, content: str, read_verdict: Callable[[str], ValueT]) -> ValueT:
        try:
            number = await self._free_connections.get()
            try:
                with HEARTBEAT.use_track(lane=f"judge {number}"):
                    value = await self._read_reply(content, read_verdict)
            finally:
                self._free_connections.put_nowait(number)
        finally:
            del self._running[key]
        self._cache[key] = value
        if len(self._cache) > self._judge.cache_size:
            self._cache.popitem(last=False)
        return value

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
