"""The workers of a fine-tuning over Ray: one actor a training rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ray.util.placement_group import PlacementGroup

from alphaapollo.controller.ranks import Ranks
from alphaapollo.controller.ray_crew import end_actors, own_processes, starting
from alphaapollo.controller.ray_nodes import compare_nodes
from alphaapollo.controller.ray_placement import rank_seats, reserve_nodes
from alphaapollo.controller.ray_ranks import RayRanks, TrainerActor
from alphaapollo.controller.tuning_crew import TunedGroup, TuningPlan
from alphaapollo.data.batch import TunedBatch

if TYPE_CHECKING:
    from alphaapollo.workers.finetuning_worker import TunedWorker

B = TypeVar("B", bound=TunedBatch)


class RayTuning(Generic[B]):
    """All actors of a fine-tuning."""

    def __init__(self, nodes: PlacementGroup, plan: TuningPlan[B]):
        self._nodes, self._plan = nodes, plan
        self._ranks: RayRanks[TunedWorker[B]] = RayRanks(TrainerActor, rank_seats(plan.counts, nodes))
        self.trainer: TunedGroup[B] = TunedGroup(self._ranks, plan.counts.sequence_parallel)

    async def start(self) -> None:
        """All ranks at once: they meet while they load."""
        from alphaapollo.workers.process_group import RankPlacement

        counts, address = self._plan.counts, await self._ranks.meeting_point()
        places = [
            RankPlacement(rank, counts.num_ranks, address, counts.device, counts.threads, counts.sequence_parallel)
            for rank in range(counts.num_ranks)
        ]
        await self._ranks.start([partial(self._plan.build, place) for place in places], cleanup=[])

    @property
    def ranks(self) -> list[Ranks[Any]]:
        return [self._ranks]

    @property
    def needed(self) -> dict[str, int]:
        return own_processes()

    async def close(self) -> None:
        await end_actors(None, [self._ranks], [self._nodes], [])


async def launch_ray_tuning(
    plan: TuningPlan[B], timeout: float, paths: Mapping[str, str] | None = None
) -> RayTuning[B]:
    """Place and start the ranks. A ValueError says what could not be placed, a TimeoutError that they do not start.
    paths: as of launch_ray."""
    nodes = await reserve_nodes(plan.counts, timeout)
    if paths is not None:
        await compare_nodes([nodes], paths)
    crew = RayTuning(nodes, plan)
    try:
        async with starting(timeout):
            await crew.start()
    except TimeoutError:
        await crew.close()
        raise TimeoutError(
            f"not all ranks started within trainer.start_timeout={timeout:.0f} s. Their logs lie in Ray's session "
            "folder; a large model may need a larger value."
        ) from None
    except BaseException:
        await crew.close()
        raise
    return crew
