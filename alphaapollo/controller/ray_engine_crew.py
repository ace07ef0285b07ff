"""Rollout workers alone, over Ray: one actor an engine, each with a bundle of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ray.util.placement_group import PlacementGroup, placement_group

from alphaapollo.controller.engine_crew import EnginePlan
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.controller.ray_crew import end_actors, engine_factory, session_logs, starting
from alphaapollo.controller.ray_nodes import compare_nodes
from alphaapollo.controller.ray_placement import CPU_SHARE, wait_until_placed
from alphaapollo.controller.ray_ranks import RayRanks, RolloutHost, Seat

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker


class RayEngines:
    """All actors of a generation."""

    def __init__(self, bundles: PlacementGroup, plan: EnginePlan):
        gpus = float(plan.tensor_parallel) if plan.device == "cuda" else 0.0
        self._plan, self._bundles = plan, bundles
        self._ranks: RayRanks[RolloutWorker] = RayRanks(
            RolloutHost, [Seat(bundles, index, CPU_SHARE, gpus) for index in range(plan.num_engines)]
        )
        self.engines = EngineGroup(self._ranks, plan.samples_in_flight)

    async def start(self) -> None:
        """All engines side by side."""
        factories = [engine_factory(partial(self._plan.build, index)) for index in range(self._plan.num_engines)]
        await self._ranks.start(factories, self._plan.cleanup)

    async def close(self) -> None:
        await end_actors(self.engines, [self._ranks], [self._bundles], self._plan.cleanup)


async def launch_ray_engines(plan: EnginePlan, timeout: float, paths: Mapping[str, str] | None = None) -> RayEngines:
    """Place and start the engines. A ValueError says what could not be placed, a TimeoutError who does not start.
    paths: as of launch_ray."""
    bundle = {"CPU": CPU_SHARE} | ({"GPU": float(plan.tensor_parallel)} if plan.device == "cuda" else {})
    wanted = [bundle] * plan.num_engines
    bundles = placement_group(wanted, strategy="SPREAD")
    await wait_until_placed(bundles, wanted, timeout, "lower rollout.num_engines")
    if paths is not None:
        await compare_nodes([bundles], paths)
    crew = RayEngines(bundles, plan)
    try:
        async with starting(timeout):
            await crew.start()
    except TimeoutError:
        logs = session_logs()
        await crew.close()
        raise TimeoutError(
            f"not all engines started within trainer.start_timeout={timeout:.0f} s. Their logs lie in the run's logs/ "
            f"and in {logs}; a large model may need a larger value."
        ) from None
    except BaseException:
        await crew.close()
        raise
    return crew
