"""Model calls: resume from the pool, budget, concurrency limit, price, and the log record of each call."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from alphaapollo.config.schema import ServedModel
from alphaapollo.evolving.budget import Budget, EvolutionStopped, compute_price
from alphaapollo.evolving.model_clients import ModelCallError, ModelClient
from alphaapollo.evolving.pool import ModelCall, Pool, Usage
from alphaapollo.evolving.roles import ModelReply
from alphaapollo.types import Message, Sampling
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.seeds import derive_seed


class ModelUnavailableError(ConnectionError):
    """evolving.max_failures calls in a row failed because a model's server is down."""


class ModelCaller:
    """Calls models by name and logs every call.

    Args:
        clients: by model name.
        models: the `models` section: price_in, price_out and max_concurrent of each client.
        seed: trainer.seed; each call derives its own seed from it and the call's key.
        max_failures: consecutive server failures of one model after which ModelUnavailableError is raised.
    """

    def __init__(
        self,
        pool: Pool,
        budget: Budget,
        clients: Mapping[str, ModelClient],
        models: Mapping[str, ServedModel],
        seed: int,
        max_failures: int,
    ):
        self._pool, self._budget, self._clients, self._models = pool, budget, clients, models
        self._seed, self._max_failures = seed, max_failures
        self._concurrency = {name: asyncio.Semaphore(models[name].max_concurrent) for name in clients}
        self._failures_in_a_row: Counter[str] = Counter()

    def fits(self, model: str, messages: Sequence[Message]) -> bool:
        """Whether the messages fit into the model's prompt limit."""
        return self._clients[model].fits(messages)

    def call_seed(self, key: str) -> int:
        """Seed of a call: a function of the run's seed and the call's key alone."""
        return derive_seed(self._seed, "evolve", key)

    async def call(
        self, model: str, role: str, key: str, messages: Sequence[Message], sampling: Sampling
    ) -> ModelReply:
        """The model's reply, from the pool if the same call has succeeded before.

        Raises:
            ModelCallError: the call failed; the failure is logged.
            EvolutionStopped: the budget does not admit the call.
            ModelUnavailableError: too many calls in a row failed.
        """
        sampling = replace(sampling, seed=self.call_seed(key))
        digest = _digest(model, messages, sampling)
        logged = self._pool.calls.get(key)
        if logged and logged.digest == digest and not logged.failure:
            return ModelReply(logged.text, logged.seed, logged.prompt_tokens, logged.tokens, logged.stop)
        async with self._concurrency[model]:
            maximum = self._maximum(model, messages, sampling)
            await self._budget.admit(maximum)
            used = Usage()
            try:
                started = time.perf_counter()
                reply, error = await self._generate(model, key, messages, sampling)
                price = compute_price(self._models[model], reply.prompt_tokens, reply.tokens)
                used = Usage(1, reply.prompt_tokens + reply.tokens, price)
                record = ModelCall(
                    key=key,
                    role=role,
                    model=model,
                    digest=digest,
                    seed=sampling.seed,
                    at=round(self._budget.seconds, 3),
                    seconds=round(time.perf_counter() - started, 4),
                    text=reply.text,
                    prompt_tokens=reply.prompt_tokens,
                    tokens=reply.tokens,
                    money=price,
                    stop=reply.stop,
                    failure=str(error) if error else "",
                )
            finally:
                await self._budget.settle(maximum, used)
        self._pool.append(record)
        if error is not None:
            self._count_failure(model, error)
            raise error
        self._failures_in_a_row[model] = 0
        return reply

    async def _generate(
        self, model: str, key: str, messages: Sequence[Message], sampling: Sampling
    ) -> tuple[ModelReply, ModelCallError | None]:
        """The reply, or an empty one and the error."""
        client = self._clients[model]
        try:
            with HEARTBEAT.call("a reply", f"models.{model}", client.time_limit):
                async with asyncio.timeout(self._budget.seconds_left):
                    return await client.generate(messages, sampling, key), None
        except ModelCallError as error:
            return ModelReply("", sampling.seed), error
        except TimeoutError as error:
            raise EvolutionStopped("budget.seconds ran out while a call was in flight") from error

    def _count_failure(self, model: str, error: ModelCallError) -> None:
        self._failures_in_a_row[model] += error.server_down
        count = self._failures_in_a_row[model]
        if count >= self._max_failures:
            raise ModelUnavailableError(
                f"models.{model}: {count} calls in a row failed; the last error: {error}. No result is lost. Fix the "
                "server, then run the same command again."
            ) from error

    def _maximum(self, model: str, messages: Sequence[Message], sampling: Sampling) -> Usage:
        """Upper bound of the call's usage. The number of characters bounds the prompt tokens, except for the chat
        template and for scripts with several tokens per character."""
        characters = sum(len(message["content"]) for message in messages)
        price = compute_price(self._models[model], characters, sampling.max_tokens)
        return Usage(1, characters + sampling.max_tokens, price)


def _digest(model: str, messages: Sequence[Message], sampling: Sampling) -> str:
    request = msgspec.json.encode([model, list(messages), sampling])
    return hashlib.blake2b(request, digest_size=8).hexdigest()
