"""Engine side of vLLM's own weight transfer, called by rank 0 of the trainer (CUDA IPC and NCCL only)."""

from __future__ import annotations

from typing import Any

import ray

from alphaapollo.controller.ray_ranks import pickle_function
from alphaapollo.engines.protocol import EngineDied, EngineError


class RayWeightSyncClient:
    """Implementation of vLLM's `VLLMWeightSyncClient` over Ray. Each method runs on every engine and waits for all."""

    def __init__(self, engines: list[Any]):
        self.engines = engines  # actors (ray_ranks.WorkerActor)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(lambda worker: worker.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._call(lambda worker: worker.start_weight_update())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call(lambda worker: worker.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(lambda worker: worker.finish_weight_update(weight_version))

    def _call(self, function: Any) -> None:
        code = pickle_function(function)
        pending = [engine.call.remote(code) for engine in self.engines]
        try:
            ray.get(pending)
        except ray.exceptions.RayTaskError as error:
            kind = EngineDied if isinstance(error.cause, EngineDied) else EngineError
            raise kind(f"a weight transfer failed: {error.cause}") from None
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineDied(f"a rollout worker died during a weight transfer: {reason}") from None
