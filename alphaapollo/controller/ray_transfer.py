"""Weight transfers over Ray: remote calls of vLLM's own transfer (CUDA IPC, NCCL), and copies of files in shared memory
to nodes without training ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ray

from alphaapollo.controller.ray_ranks import pickle_function
from alphaapollo.engines.protocol import EngineDied, EngineError


class RayWeightSyncClient:
    """Implementation of vLLM's `VLLMWeightSyncClient` over Ray: each method calls all engines and waits for them."""

    def __init__(self, engine_actors: list[ray.actor.ActorHandle]):
        self.engine_actors = engine_actors  # of class ray_ranks.WorkerActor

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._call_engines(lambda worker: worker.engine.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._call_engines(lambda worker: worker.engine.start_weight_update())

    def update_weights(self, update_info: dict[str, object] | list[dict[str, object]]) -> None:
        self._call_engines(lambda worker: worker.engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_engines(lambda worker: worker.engine.finish_weight_update(weight_version))

    def _call_engines(self, function: Callable[..., object]) -> None:
        code = pickle_function(function)
        pending = [engine.call.remote(code) for engine in self.engine_actors]
        try:
            ray.get(pending)
        except ray.exceptions.RayTaskError as error:
            kind = EngineDied if isinstance(error.cause, EngineDied) else EngineError
            raise kind(f"a weight transfer failed: {error.cause}") from None
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineDied(f"a rollout worker died during a weight transfer: {reason}") from None


class RayFileReader:
    """Copies the weights that rank 0 has written to the shared memory of its node, for an engine on another node."""

    def __init__(self, rank_0: ray.actor.ActorHandle):
        self.rank_0 = rank_0  # of class ray_ranks.WorkerActor

    async def copy(self, folder: str, target: Path) -> None:
        """Copy the files of the sent folder, e.g. `v7`, to the folder `target`."""
        files = await self.rank_0.call.remote(pickle_function(lambda worker: worker.sender.read_files(folder)))
        target.mkdir(parents=True)
        for name, content in files.items():
            content.tofile(target / name)
