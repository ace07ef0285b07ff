"""Handle to the rollout workers (see handles.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from alphaapollo.controller.errors import EngineCoreDied, WorkerDied
from alphaapollo.controller.handles import WorkerGroup
from alphaapollo.controller.load_balancer import LoadBalancer
from alphaapollo.controller.ranks import Ranks
from alphaapollo.engines.types import EngineDied, HttpAnswer, HttpSampling
from alphaapollo.engines.weight_sync.transport import WeightReceipt
from alphaapollo.engines.weight_sync.verification import Probe
from alphaapollo.processes.watchdog import remove_paths
from alphaapollo.types import Adapter, Completion, GroupRequest, Sampling, TrajectoryGroup

if TYPE_CHECKING:
    from alphaapollo.rollout.suites import Suite, SuiteResult
    from alphaapollo.rollout.worker import RolloutWorker


async def answer_requests(
    worker: RolloutWorker, token_ids: list[int], requests: Sequence[HttpSampling]
) -> list[HttpAnswer]:
    return await worker.answer(token_ids, requests)


async def load_adapter(
    worker: RolloutWorker, adapter: Adapter, probe_ids: list[int]
) -> tuple[str, list[dict[int, float]]]:
    digest = await worker.engine.load_adapter(adapter)
    if not probe_ids:
        return digest, []
    scoring = HttpSampling(Sampling(1, adapter=adapter), scores_prompt=True)
    (answer,) = await worker.answer(probe_ids, [scoring])
    return digest, answer.prompt_logprobs


async def generate_group(worker: RolloutWorker, request: GroupRequest) -> TrajectoryGroup:
    """Generate a group on a rollout worker. A module's function is pickled by name, unlike a lambda."""
    return await worker.generate(request)


async def sleep(worker: RolloutWorker, pauses_requests: bool) -> None:
    if pauses_requests:
        with suppress(EngineDied):  # a dead engine has no requests; the next weight sync starts it again
            await worker.pause()
    await worker.engine.sleep()


async def prepare_weight_sync(worker: RolloutWorker, pauses_requests: bool) -> None:
    if pauses_requests and not worker.engine.updates_in_flight:
        await worker.pause()
    await worker.engine.wake_weights()


async def finish_weight_sync(
    worker: RolloutWorker, probe: Probe, resumes_requests: bool
) -> tuple[tuple[list[float], Completion], dict[str, float]]:
    await worker.engine.wake_cache()
    if resumes_requests:
        await worker.resume()
    logprobs = await worker.engine.log_probs(probe.token_ids, probe.images)
    token_ids, sampling = probe.make_sample_request()
    sample = await worker.engine.generate(token_ids, sampling, "probe", probe.images)
    return (logprobs, sample), worker.get_memory_metrics()


async def raise_death(death: WorkerDied) -> None:
    raise death


class EngineGroup(WorkerGroup["RolloutWorker"]):
    """Handle to the rollout workers. All samples of a group run on one engine and share their prompt's prefill."""

    def __init__(self, ranks: Ranks[RolloutWorker], samples_in_flight: int, shares_gpus: bool = True):
        """shares_gpus: whether trainers use the engines' GPUs."""
        super().__init__(ranks)
        self._shares_gpus = shares_gpus
        self.samples_in_flight = samples_in_flight  # maximum per engine; more samples would wait in the engine's queue
        self._balancer = LoadBalancer(ranks.size, samples_in_flight)
        self.replace_engine: Callable[[WorkerDied], Awaitable[None]] = raise_death
        """Replaces an engine that died, or raises its death. A WeightPublisher sets it."""

    async def generate_group(self, request: GroupRequest) -> TrajectoryGroup:
        """Generate all samples of one prompt on the least loaded engine, as soon as the engine has capacity."""
        async with self._balancer.reserve_engine(request.num_samples) as rank:
            return await self.ranks.call_rank(rank, generate_group, request)

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        """Generate all groups concurrently and yield (index of the request, its group) as each group is complete. If an
        engine dies, it is replaced after the groups on all other engines are complete, and its groups are generated
        again, with the same seeds. Raises WorkerDied if it cannot be replaced."""

        async def generate_indexed(index: int, request: GroupRequest) -> tuple[int, TrajectoryGroup]:
            return index, await self.generate_group(request)

        unfinished = dict(enumerate(requests))
        while unfinished:
            tasks = [asyncio.ensure_future(generate_indexed(index, request)) for index, request in unfinished.items()]
            death: WorkerDied | None = None
            try:
                for completed in asyncio.as_completed(tasks):
                    try:
                        index, group = await completed
                    except WorkerDied as error:
                        death = death or error
                    else:
                        del unfinished[index]
                        yield index, group
            finally:
                for task in tasks:
                    task.cancel()
            if death:
                await self.replace_engine(death)

    async def answer(self, token_ids: list[int], requests: Sequence[HttpSampling]) -> list[HttpAnswer]:
        """Sample an answer for each request with the same prompt, on the least loaded engine, or on several if one has
        no capacity for all."""
        part_size = self.samples_in_flight

        async def answer_part(part: Sequence[HttpSampling]) -> list[HttpAnswer]:
            while True:
                try:
                    async with self._balancer.reserve_engine(len(part)) as rank:
                        answers: list[HttpAnswer] = await self.ranks.call_rank(rank, answer_requests, token_ids, part)
                        return answers
                except EngineCoreDied as death:
                    await self.replace_engine(death)

        parts = [requests[start : start + part_size] for start in range(0, len(requests), part_size)]
        return list(chain.from_iterable(await asyncio.gather(*map(answer_part, parts))))

    async def load_adapter(self, adapter: Adapter, probe_ids: list[int]) -> list[tuple[str, list[float]]]:
        """Load a LoRA adapter on every engine. Returns for each engine the digest of the adapter's weights, and the
        log-probs of `probe_ids[1:]` with the adapter. An engine that died is replaced first. The new engine reads other
        adapters from their folders when requests name them."""
        while True:
            try:
                loaded = await self.ranks.call(lambda worker: load_adapter(worker, adapter, probe_ids))
                break
            except EngineCoreDied as death:
                await self.replace_engine(death)
        return [
            (digest, [logprobs[token] for token, logprobs in zip(probe_ids[1:], positions, strict=True)])
            for digest, positions in loaded
        ]

    async def run_suites(self, suites: Sequence[Suite], folder: Path) -> list[SuiteResult]:
        """Run evaluation suites, one after the other on each engine. folder: receives a folder of results per suite."""

        async def run_on_rank(rank: int) -> list[SuiteResult]:
            run = lambda worker, suite: worker.run_suite(suite, folder / suite.name)  # noqa: E731
            return [await self.ranks.call_rank(rank, run, suite) for suite in suites[rank :: self.ranks.size]]

        return list(chain.from_iterable(await asyncio.gather(*map(run_on_rank, range(self.ranks.size)))))

    async def has_dead_engine(self) -> bool:
        """Return whether an engine's core has died, or has restarted and still awaits its weights."""
        return any(
            await self.ranks.call(lambda worker: worker.engine.is_dead or worker.engine.awaits_weights_after_restart)
        )

    async def restart_dead_engines(self) -> int:
        """Restart the engines whose cores have died, and return their number. They then need a weight sync."""
        return sum(await self.ranks.call(lambda worker: worker.restart_dead_engine()))

    async def prepare_weight_sync(self, pauses_requests: bool) -> None:
        """Allocate GPU memory for the weights after `sleep`. pauses_requests: first pause the requests that run."""
        await self.ranks.call(lambda worker: prepare_weight_sync(worker, pauses_requests))

    async def confirm_weights(self, version: int, shared_folder: str = "") -> list[WeightReceipt]:
        """Load the weights on every engine. Returns a receipt of each engine that has weights (fake engines do not).

        shared_folder: shared-memory folder from which the engines first load the weights; "": the trainer sent them."""
        receipts = await self.ranks.call(lambda worker: worker.confirm_weights(version, shared_folder))
        return [receipt for receipt in receipts if receipt is not None]

    async def finish_weight_sync(self, probe: Probe, resumes_requests: bool) -> list[tuple[list[float], Completion]]:
        """Allocate the KV cache after `sleep`, and resume requests. Returns each engine's log-probs of the probe, and
        the tokens that it samples after the start of the probe."""
        results = await self.ranks.call(lambda worker: finish_weight_sync(worker, probe, resumes_requests))
        self._set_memory_metrics(results)
        return [probed for probed, _ in results]

    async def sleep(self, pauses_requests: bool = False) -> None:
        """Free the engines' GPU memory until the next weight sync. pauses_requests: first pause requests until then."""
        await self.ranks.call(lambda worker: sleep(worker, pauses_requests))

    @asynccontextmanager
    async def release_kv_cache_temporarily(self) -> AsyncIterator[None]:
        """Context manager that frees the engines' KV caches, but not their weights, while a trainer uses the GPUs. Does
        nothing if the engines have GPUs of their own."""
        if self._shares_gpus:
            await self.ranks.call(lambda worker: worker.engine.release_cache())
        yield
        if self._shares_gpus:
            await self.ranks.call(lambda worker: worker.engine.wake_cache())

    async def close(self, cleanup_folders: Sequence[str] = ()) -> None:
        """Shut down the engines, whose cores are separate processes, and then end the workers.

        cleanup_folders: folders that each worker removes on its node."""
        await self.ranks.call(lambda worker: worker.close())
        await self.ranks.call(lambda _: remove_paths(map(Path, cleanup_folders)))
        await self.ranks.close()
