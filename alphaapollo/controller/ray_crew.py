"""The crew over Ray: one actor a worker; started side by side, ended together. Which node and GPU: ray_placement.py."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from alphaapollo.controller.crew import Roles, started
from alphaapollo.controller.handles import CriticGroup, EngineGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.health.process_monitor import ProcessMonitor
from alphaapollo.controller.nodes import Wanted
from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_nodes import compare_nodes, wait_for_nodes
from alphaapollo.controller.ray_placement import check_reach, reserve, seats, visible_gpus
from alphaapollo.controller.ray_ranks import CriticActor, PolicyActor, RayRanks, RewardModelActor, RolloutActor
from alphaapollo.controller.ray_transfer import RayWeightSyncClient
from alphaapollo.controller.worker_counts import Machine, Placement, smallest_gpu
from alphaapollo.utils.heartbeat import read_process
from alphaapollo.utils.network import stay_on_loopback
from alphaapollo.utils.watchdog import RUN, end_processes
from alphaapollo.weight_sync.transport import assign_writers

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.reward_model import RewardModelWorker

OWN_TOKEN = secrets.token_hex(32)
"""The token of every Ray that this process starts, as Ray reads it only once. Without it Ray writes a token to ~/.ray,
which fails where the home directory is not writable."""


def connect(wanted: Wanted) -> Machine:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it) and wait for its nodes; what the largest has.
    ValueError: there is no such cluster, or nodes do not come."""
    try:
        init()
    except ConnectionError as error:
        raise ValueError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}. Start it (`ray start --head`), unset RAY_ADDRESS "
            "for a Ray of our own, or, where the cluster asks for a token, set RAY_AUTH_MODE=token."
        ) from None
    wait_for_nodes(wanted)
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Machine(
        num_cores=max(int(node.get("CPU", 0)) for node in resources),
        num_gpus=max(int(node.get("GPU", 0)) for node in resources),
        gpu_memory=smallest_gpu(),  # of the machine that we are on: a head without GPUs does not know
    )


def start_local_cluster() -> None:
    """A Ray of our own on this machine, which nobody outside reaches; it ends with this process. WorkerDied: it does
    not start."""
    patient = {  # a busy laptop answers late; a dead process is noticed by its exit, not by its silence
        "health_check_timeout_ms": 60_000,
        "health_check_failure_threshold": 10,
    }
    stay_on_loopback()
    os.environ.setdefault("RAY_AUTH_TOKEN", OWN_TOKEN)
    try:
        with _loopback_ray():
            init(address="local", include_dashboard=False, _system_config=patient)
    except Exception as error:  # Ray has no narrower one for a raylet that takes too long
        ray.shutdown()
        why = " ".join(str(error).split())
        raise WorkerDied(f"Ray does not start on this machine: {why}", "Ray's start") from error


@contextmanager
def _loopback_ray() -> Iterator[None]:
    """Ray takes this machine's address for a node of its own, as on a laptop without clusters 127.0.0.1, where all of
    its processes then listen. It has no argument for that: a loopback `_node_ip_address` it replaces."""
    constants = ray._private.ray_constants
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def init(**how: Any) -> None:
    """ray.init, after which SIGTERM means what it meant before: Ray would have it exit on the spot."""
    told = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level="ERROR", namespace=f"alphaapollo-{os.getpid()}", **how)
    signal.signal(signal.SIGTERM, told)


def session_logs() -> str:
    """The folder of Ray's logs on this machine. Of a Ray of our own that failed, the next command removes it."""
    return str(ray._private.worker._global_node.get_logs_dir_path())


def own_processes() -> dict[str, int]:
    """Those of a Ray of our own with which it ends; of a cluster that was joined, none: pid by name."""
    return {name: process.pid for name, process in _own_ray().items()}


def own_ray_silent() -> bool:
    """Of a Ray of our own one of them has died, or is stopped."""
    found = [read_process(process.pid) for process in _own_ray().values() if process.poll() is None]
    return len(found) < len(_own_ray()) or any(one is None or one.stopped for one in found)


def _own_ray() -> dict[str, subprocess.Popen[bytes]]:
    named = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
    started = ray._private.worker._global_node.all_processes if ray.is_initialized() else {}
    return {name: started[kind][0].process for kind, name in named.items() if kind in started}


@asynccontextmanager
async def starting(timeout: float) -> AsyncIterator[None]:
    """Around the start of all workers. TimeoutError: it takes longer. WorkerDied: a Ray of our own has died."""
    async with asyncio.timeout(timeout), ProcessMonitor(own_processes(), lambda what: None):
        yield


async def launch_ray(
    placement: Placement, roles: Roles, timeout: float, paths: Mapping[str, str] | None = None
) -> RayCrew:
    """Place all workers and start them side by side. A ValueError or TimeoutError names what could not be had.

    paths: key -> path of what every node of a cluster must have; None: the cluster is our own."""
    nodes, engine_gpus = await reserve(placement, timeout)
    if paths is not None:
        await compare_nodes([group for group in (nodes, engine_gpus) if group], paths)
    crew = RayCrew(nodes, engine_gpus, placement, roles)
    try:
        async with starting(timeout):
            await crew.start()
    except TimeoutError:
        waiting, logs = ", ".join(crew.still_starting()), session_logs()
        await crew.close()
        raise TimeoutError(
            f"not all workers started within trainer.start_timeout={timeout:.0f} s; still starting: {waiting}. "
            f"Their logs lie in the run's logs/ and in {logs}; a large model may need a larger value."
        ) from None
    except BaseException:
        await crew.close()
        raise
    return crew


class RayCrew:
    """All actors of a run."""

    policy: PolicyGroup
    critic: CriticGroup | None
    reward_model: RewardModelGroup | None
    engines: EngineGroup

    def __init__(self, nodes: PlacementGroup, engine_gpus: PlacementGroup | None, placement: Placement, roles: Roles):
        self.placement, self.roles = placement, roles
        self.groups = [group for group in (nodes, engine_gpus) if group]
        places = seats(placement, nodes, engine_gpus)
        self._policy: RayRanks[PolicyWorker] = RayRanks(PolicyActor, places.policy)
        self._critic: RayRanks[CriticWorker] | None = RayRanks(CriticActor, places.beside) if roles.critic else None
        self._reward_model: RayRanks[RewardModelWorker] | None = (
            RayRanks(RewardModelActor, places.beside) if roles.reward_model else None
        )
        self._engines: RayRanks[RolloutWorker] = RayRanks(RolloutActor, places.engines)
        sharing = placement.sequence_parallel
        self.policy = PolicyGroup(self._policy, sharing)
        self.critic = CriticGroup(self._critic, sharing) if self._critic else None
        self.reward_model = RewardModelGroup(self._reward_model, sharing) if self._reward_model else None
        self.engines = EngineGroup(self._engines, roles.samples_in_flight)
        self._starting: dict[str, asyncio.Task[Any]] = {}

    async def start(self) -> None:
        """All roles side by side: importing torch and vLLM is most of a start. On shared GPUs vLLM takes its share of
        what it finds free, so there the trainers are built, and rest, before an engine does more than import."""
        placement, roles, cleanup = self.placement, self.roles, self.roles.cleanup
        ranks_at, engines_at = await self._policy.places(), await self._engines.places()
        if roles.through_memory:
            check_reach(ranks_at, engines_at)
        visible = visible_gpus(placement, [place.gpus for place in ranks_at])
        feeds = assign_writers([place.node for place in ranks_at], [place.node for place in engines_at])
        client = RayWeightSyncClient(self._engines.actors) if placement.device == "cuda" else None
        factory = prepared_engine if placement.shares_gpus else engine_factory
        engines = [factory(partial(roles.engine, index, place.node)) for index, place in enumerate(engines_at)]
        starts = {
            "policy": self._policy.start(
                [partial(roles.policy, one, client) for one in await self._rank_placements(self._policy, feeds)],
                cleanup,
            ),
            "rollout": self._engines.start(engines, cleanup, visible.engines),
        }
        if self._critic and roles.critic:
            starts["critic"] = self._critic.start(
                [partial(roles.critic, one) for one in await self._rank_placements(self._critic, feeds)],
                cleanup,
                visible.beside,
            )
        if self._reward_model and roles.reward_model:
            starts["reward model"] = self._reward_model.start(
                [partial(roles.reward_model, one) for one in await self._rank_placements(self._reward_model, feeds)],
                cleanup,
                visible.beside,
            )
        await self._side_by_side(starts)
        if placement.shares_gpus:
            await self._side_by_side({"rollout": self._engines.call(lambda worker: worker.start())})

    async def _rank_placements(self, role: RayRanks[Any], feeds: Sequence[str | None]) -> list[RankPlacement]:
        from alphaapollo.workers.process_group import RankPlacement

        at, address = self.placement, await role.meeting_point()
        return [
            RankPlacement(rank, at.num_ranks, address, at.device, at.threads, at.sequence_parallel, node)
            for rank, node in enumerate(feeds)
        ]

    async def _side_by_side(self, starts: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        self._starting = {role: asyncio.ensure_future(start) for role, start in starts.items()}
        try:
            await asyncio.gather(*self._starting.values())
        finally:
            for task in self._starting.values():
                task.cancel()

    def still_starting(self) -> list[str]:
        return [role for role, task in self._starting.items() if not task.done() or task.cancelled()]

    @property
    def ranks(self) -> list[Any]:
        return [ranks for ranks in (self._policy, self._critic, self._reward_model, self._engines) if ranks]

    @property
    def needed(self) -> dict[str, int]:
        return own_processes()

    @property
    def replaces_engines(self) -> bool:
        """Not on GPUs: there the trainers hold handles of the engines' memory, or share it with them."""
        return self.placement.device == "cpu"

    async def replace_engine(self, index: int) -> None:
        roles = self.roles
        await self._engines.replace(
            index, lambda place: engine_factory(partial(roles.engine, index, place.node)), roles.cleanup
        )

    async def close(self) -> None:
        await end_actors(self.engines, self.ranks, self.groups, self.roles.cleanup)


async def end_actors(
    engines: EngineGroup | None,
    every: Sequence[RayRanks[Any]],
    groups: Sequence[PlacementGroup],
    cleanup: Sequence[str],
) -> None:
    """Engines first, for their cores are processes of their own; what does not end by itself is killed. Then Ray, if it
    is ours."""
    if own_ray_silent():  # nobody answers, and its client would wait
        end_processes(os.environ[RUN])
    else:
        with suppress(TimeoutError, WorkerDied, WorkerFailed, ValueError):  # who cannot answer any more is killed below
            if engines:
                await asyncio.wait_for(engines.close(cleanup), timeout=5)
        for ranks in every:
            await ranks.close()
        for group in groups:
            remove_placement_group(group)
    ray.shutdown()
    for folder in cleanup:
        shutil.rmtree(folder, ignore_errors=True)


def engine_factory(build: Callable[[], RolloutWorker]) -> Callable[[], Any]:
    """Builds and starts the rollout worker in its own process."""

    async def make() -> RolloutWorker:
        return await started(build())

    return make


def prepared_engine(build: Callable[[], RolloutWorker]) -> Callable[[], Any]:
    """Builds the rollout worker in its own process and imports what its start needs."""

    async def make() -> RolloutWorker:
        worker = build()
        await worker.prepare()
        return worker

    return make
