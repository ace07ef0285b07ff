"""Fake workers that compute nothing but take realistic time, behind the controller's own RayRanks.

    RayRanks -- what Ray would send, pickled --> Actor: waits --> the answer, pickled --> unpickled by the controller

The controller's work for a call is real: it pickles arguments (`Latencies.ray_call` adds Ray's own time). The work of
the workers is not counted. Results are unpickled as work of other threads, because Ray does it in a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import cloudpickle

from alphaapollo.algorithms.mismatch import MismatchSums, sum_mismatch
from alphaapollo.batching.batch import Columns, MiniBatch, RankBatch
from alphaapollo.controller.ranks import await_if_awaitable
from alphaapollo.controller.ray_ranks import RayRanks
from alphaapollo.controller.remote_ranks import RemoteRanks
from alphaapollo.engines.weight_sync.transport import WeightReceipt, WeightUpdate
from alphaapollo.types import (
    Completion,
    EpisodeEnd,
    GroupRequest,
    ImageInput,
    Row,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from scripts.simulation.clock import Clock


@dataclass(frozen=True)
class Latencies:
    """Latencies of the cluster in seconds, and lengths in tokens. The defaults are assumptions for GPUs with a small
    model, except Ray's, which was measured (scripts/bench/results/scale_simulated.md)."""

    prompt: int = 256
    response: float = 512.0  # median; lengths are log-normal
    spread: float = 0.6  # standard deviation of the logarithm of a length
    longest: int = 2048
    tokens_per_second: float = 50.0  # sampled per sequence, independent of the batch
    grading: float = 0.05
    update: float = 1000.0  # tokens per second and training rank
    publish: float = 3.0
    hop: float = 0.002  # round trip
    # Processor time of Ray in the controller's main thread, in addition to the simulation's own pickling: for a single
    # call, and per rank for a call of all ranks; then the processor time of Ray's own threads for both.
    ray_call: float = 2.0e-4
    ray_call_of_all: float = 5.0e-5
    ray_threads: float = 3.1e-4
    # Processor time of the main thread per byte of a result, while one of Ray's threads receives and unpickles it.
    ray_receive: float = 7e-10


class Network:
    """Simulated network between the controller and the workers."""

    def __init__(self, clock: Clock, latencies: Latencies):
        self.clock, self.latencies = clock, latencies
        self.calls = 0
        self.received = 0  # bytes
        self.unpickling = 0.0  # processor seconds
        self.sent = 0

    def send(self, *arguments: Any) -> None:
        """The controller's work for one call, without Ray's."""
        self.sent += sum(len(pickle.dumps(argument)) for argument in arguments)
        self.calls += 1

    def put(self, item: Any) -> Any:
        """Copy arrays to the object store."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(item, protocol=5, buffer_callback=buffers.append)
        self.sent += len(head) + sum(len(bytes(buffer.raw())) for buffer in buffers)
        return StoredItem(item)

    async def answer(self, call: Callable[[], Any]) -> Any:
        """Result of a worker's method after its latency."""
        await asyncio.sleep(self.latencies.hop)
        value = await await_if_awaitable(call())
        with self.clock.elsewhere():
            packed = pickle.dumps(value, protocol=5)
            del value  # the worker frees its objects
            begin = time.thread_time()
            result = pickle.loads(packed)
            self.unpickling += time.thread_time() - begin
        self.received += len(packed)
        self.clock.charge(len(packed) * self.latencies.ray_receive)
        return result


@dataclass(frozen=True)
class StoredItem:
    """Item in the object store; only a reference is pickled."""

    item: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return (StoredItem, (None,))


class SimulatedRanks(RayRanks[Any]):
    """RayRanks with fake actors."""

    def __init__(self, role: str, network: Network, workers: Sequence[Any]):
        RemoteRanks.__init__(self, role, len(workers))
        self.network, self.workers = network, workers

    def _request(self, rank: int, method: str, *arguments: Any) -> Any:
        """Send a call of `call`."""
        self.network.send(*arguments)
        function, *items = [item.item if isinstance(item, StoredItem) else item for item in arguments]
        with self.network.clock.elsewhere():
            call = cloudpickle.loads(function)
            answer = asyncio.ensure_future(self.network.answer(lambda: call(self.workers[rank], *items)))
        self.network.clock.charge(self.network.latencies.ray_call_of_all)
        return answer

    async def _wait_for_call(self, rank: int, call: Any, call_name: str = "") -> Any:
        latencies = self.network.latencies
        self.network.clock.charge(latencies.ray_call - latencies.ray_call_of_all)
        return await super()._wait_for_call(rank, call, call_name)

    def _share(self, item: Any) -> Any:
        return self.network.put(item)

    async def close(self) -> None:
        pass


class FakePolicy:
    """Fake training rank."""

    def __init__(self, latencies: Latencies, clock: Clock):
        self.latencies, self.clock = latencies, clock
        self.logprob_check_warnings: tuple[str, ...] = ()

    def load_batch(self, batch: RankBatch) -> None:
        self.batch = batch

    async def update(self, columns: Columns[np.ndarray], steps: Sequence[MiniBatch], *_: object) -> dict[str, float]:
        assert columns.advantages is not None and columns.trajectory_ids is not None
        self.trajectory_ids = columns.trajectory_ids
        await asyncio.sleep(self.batch.rows.lengths.sum() / self.latencies.update)
        return {"actor/pg_loss": float(columns.advantages.sum()), "actor/entropy": 0.5}

    async def compute_surprises(self) -> np.ndarray:
        """The entropies are those of samples whose surprises are 0."""
        await asyncio.sleep(self.batch.rows.lengths.sum() / (3 * self.latencies.update))  # a forward pass
        logprobs = self.batch.rows.rollout_logprobs
        return np.stack([logprobs, -logprobs, np.ones_like(logprobs)], axis=1)

    def sum_logprob_mismatch(self) -> MismatchSums:
        """As PolicyWorker does, for all tokens."""
        with self.clock.elsewhere():
            rows = self.batch.rows
            row = np.repeat(np.arange(len(rows)), rows.response_lengths)
            positions = np.arange(len(row)) - rows.response_offsets[row]
            return sum_mismatch(rows.rollout_logprobs, rows.rollout_logprobs, self.trajectory_ids[row], positions)

    def get_old_log_probs(self) -> np.ndarray:
        return self.batch.rows.rollout_logprobs

    async def send_weights(self, version: int) -> WeightUpdate:
        await asyncio.sleep(self.latencies.publish)
        return WeightUpdate(version, "digest", "folder")

    def release_sent_weights(self) -> None:
        pass

    def offload(self) -> None:
        pass

    def compute_probe_log_probs(self, token_ids: list[int], images: Sequence[ImageInput]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    def get_memory_metrics(self) -> dict[str, float]:
        return {"rss_gib": 1.0}


class FakeRollout:
    """Fake rollout worker: groups have random tokens and take as long as their longest sample."""

    updates_in_flight = False

    def __init__(self, latencies: Latencies, clock: Clock):
        self.engine, self.latencies, self.clock = self, latencies, clock
        self.version = 0
        self.pauses = 0.0  # total seconds
        self.paused_since: float | None = None
        self.goes_on = asyncio.Event()

    async def generate(self, request: Any, *of_the_engine: Any) -> Any:
        """Make a group; with the arguments of the engine, the sample that verifies a weight sync."""
        if of_the_engine:
            count = of_the_engine[0].max_tokens
            return Completion([1] * count, [-1.0] * count, StopReason.LENGTH, self.version)
        with self.clock.elsewhere():
            draws = np.random.default_rng([request.sampling.seed, request.stream_position])
            lengths = self._lengths(draws, request.num_samples)
        seconds = float(lengths.max()) / self.latencies.tokens_per_second + self.latencies.grading
        end = self._time() + seconds
        while (left := end - self._time()) > 1e-6:
            await (asyncio.sleep(left) if self.paused_since is None else self.goes_on.wait())
        with self.clock.elsewhere():
            prompt = draws.integers(1, 150_000, self.latencies.prompt).tolist()
            samples = [self._sample(request, index, prompt, int(n), draws) for index, n in enumerate(lengths)]
            return TrajectoryGroup(request.prompt, samples)

    def _lengths(self, draws: np.random.Generator, count: int) -> np.ndarray:
        drawn = draws.lognormal(math.log(self.latencies.response), self.latencies.spread, count)
        return drawn.astype(np.int64).clip(1, self.latencies.longest)

    def _sample(
        self, request: GroupRequest, sample: int, prompt: list[int], length: int, draws: np.random.Generator
    ) -> Trajectory:
        action: list[int] = draws.integers(1, 150_000, length).tolist()
        logprobs: list[float] = (-draws.exponential(1.0, length)).tolist()
        cut = length == self.latencies.longest
        reason = StopReason.LENGTH if cut else StopReason.STOP
        reward = float(draws.integers(2))
        return Trajectory(
            prompt_id=request.prompt.id,
            sample=sample,
            turns=[Turn(list(prompt), Completion(action, logprobs, reason, self.version), TEXT[: 4 * length])],
            rows=[
                Row(
                    token_ids=prompt + action,
                    action_mask=[0] * len(prompt) + [1] * length,
                    logprobs=[0.0] * len(prompt) + logprobs,
                    turn_ends=[len(prompt) + length - 1],
                    weight_versions=[(self.version, length)],
                )
            ],
            score=Score(reward, {"accuracy": reward}),
            end=EpisodeEnd.TOKEN_LIMIT if cut else EpisodeEnd.DONE,
            seconds=length / self.latencies.tokens_per_second,
            first_observation=request.prompt.content,
        )

    def _time(self) -> float:
        """Seconds for which the engine was not paused."""
        return (self.clock() if self.paused_since is None else self.paused_since) - self.pauses

    async def pause(self) -> None:
        if self.paused_since is None:
            self.paused_since = self.clock()
            self.goes_on.clear()

    async def resume(self) -> None:
        if self.paused_since is not None:
            self.pauses += self.clock() - self.paused_since
            self.paused_since = None
            self.goes_on.set()

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def confirm_weights(self, version: int, folder: str) -> WeightReceipt:
        self.version = version
        return WeightReceipt(version, "digest")

    async def sleep(self) -> None:
        pass

    async def wake_weights(self) -> None:
        pass

    async def wake_cache(self) -> None:
        pass

    async def release_cache(self) -> None:
        pass

    def get_memory_metrics(self) -> dict[str, float]:
        return {"memory/rollout_gib": 1.0, "memory/engine_gib": 1.0}


TEXT = "".join(random.Random(0).choice("abcdefghij klmno pqrst") for _ in range(4 * 32_768))
