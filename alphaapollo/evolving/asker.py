"""The one way to a model: every call is answered from the pool if it holds the reply, else let in by the budget, made,
and noted, whatever comes of it.

    ask(model, role, key, messages, sampling) -> Said       pool -> budget -> client -> pool
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from alphaapollo.config.schema import ServedModel
from alphaapollo.evolving.budget import Budget, Halt
from alphaapollo.evolving.client import CallFailed, Client, Reply
from alphaapollo.evolving.pool import Pool, Spent
from alphaapollo.evolving.records import Call
from alphaapollo.types import Message, Sampling
from alphaapollo.utils.heartbeat import PULSE
from alphaapollo.utils.seeds import derive_seed

MILLION = 1e6


class ModelDown(ConnectionError):
    """A model's server does not answer: to go on would only count failures."""


@dataclass(frozen=True)
class Said:
    """A reply, and the seed that it was drawn with."""

    text: str
    seed: int


class Asker:
    """Args:
    clients: and their prices and limits, by the models' names.
    seed: the run's.
    max_failures: in a row, of one model, for want of its server: then ModelDown.
    """

    def __init__(
        self,
        pool: Pool,
        budget: Budget,
        clients: Mapping[str, Client],
        models: Mapping[str, ServedModel],
        seed: int,
        max_failures: int,
    ):
        self._pool, self._budget, self._clients, self._models = pool, budget, clients, models
        self._seed, self._max_failures = seed, max_failures
        self._turns = {name: asyncio.Semaphore(models[name].max_concurrent) for name in clients}
        self._down: Counter[str] = Counter()

    def fits(self, model: str, messages: Sequence[Message]) -> bool:
        return self._clients[model].fits(messages)

    def seed_of(self, key: str) -> int:
        """What a call is drawn with: what it is for, and nothing else."""
        return derive_seed(self._seed, "evolve", key)

    async def ask(self, model: str, role: str, key: str, messages: Sequence[Message], sampling: Sampling) -> Said:
        """The reply.

        Raises:
            CallFailed: there is none; noted.
            Halt: the call may not be made.
            ModelDown: too many have failed in a row.
        """
        sampling = replace(sampling, seed=self.seed_of(key))
        asked = digest(model, messages, sampling)
        known = self._pool.calls.get(key)
        if known and known.asked == asked and not known.failure:
            return Said(known.text, sampling.seed)
        async with self._turns[model]:
            promise = self._promise(model, messages, sampling)
            await self._budget.admit(promise)
            took = Spent()
            try:
                call, failure = await self._call(model, role, key, messages, sampling, asked)
                took = Spent(1, call.prompt_tokens + call.tokens, call.money)
            finally:
                await self._budget.settle(promise, took)
        self._pool.append(call)
        if failure is None:
            self._down[model] = 0
            return Said(call.text, sampling.seed)
        self._down[model] += failure.down
        if self._down[model] >= self._max_failures:
            raise ModelDown(
                f"models.{model}: {self._down[model]} calls in a row found nobody who answers, the last: {failure}. "
                "Nothing is lost: mend the server, and give the same command again."
            ) from failure
        raise failure

    async def _call(
        self, model: str, role: str, key: str, messages: Sequence[Message], sampling: Sampling, asked: str
    ) -> tuple[Call, CallFailed | None]:
        started, failure, reply = time.perf_counter(), None, Reply("", 0, 0, "")
        try:
            client = self._clients[model]
            with PULSE.doing("a reply", f"models.{model}", client.limit):
                async with asyncio.timeout(self._budget.seconds_left):
                    reply = await client.generate(messages, sampling, key)
        except CallFailed as error:
            failure = error
        except TimeoutError as error:
            raise Halt("budget.seconds ran out while a call was in flight") from error
        prices = self._models[model]
        call = Call(
            key=key,
            role=role,
            model=model,
            asked=asked,
            seed=sampling.seed,
            at=round(self._budget.seconds, 3),
            seconds=round(time.perf_counter() - started, 4),
            text=reply.text,
            prompt_tokens=reply.prompt_tokens,
            tokens=reply.tokens,
            money=(reply.prompt_tokens * prices.price_in + reply.tokens * prices.price_out) / MILLION,
            stop=reply.stop,
            failure=str(failure) if failure else "",
        )
        return call, failure

    def _promise(self, model: str, messages: Sequence[Message], sampling: Sampling) -> Spent:
        """The most that the call may take. A token has a character at least, so the texts' lengths bound the prompt,
        but for what the template adds and for scripts of several tokens a character."""
        read, prices = sum(len(message["content"]) for message in messages), self._models[model]
        money = (read * prices.price_in + sampling.max_tokens * prices.price_out) / MILLION
        return Spent(1, read + sampling.max_tokens, money)


def digest(model: str, messages: Sequence[Message], sampling: Sampling) -> str:
    """Of what is asked: a reply in the pool answers just that."""
    asked = msgspec.json.encode([model, list(messages), sampling])
    return hashlib.blake2b(asked, digest_size=8).hexdigest()
