"""Our part of a vLLM worker, mixed into its class: `collective_rpc` calls these methods on every rank of the engine.

vLLM imports this module in each worker before it builds the model, and that is our only hook that early. So the import
itself enters the engine's process (watchdog, log), applies the patches and registers the weight transfer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from alphaapollo.engines.vllm.patches import PACKED_DIGEST, apply_patches
from alphaapollo.engines.vllm.process import enter_engine_process
from alphaapollo.engines.vllm.settings import SHARED_MEMORY
from alphaapollo.weight_sync.vllm_digest import adapter_digest, held_digest, tied_layers


class WorkerExtension:
    """Methods of a worker; `self` is vLLM's own."""

    model_runner: Any

    def alphaapollo_confirm(self, repack: bool = True) -> int:
        """The weights have come: return the digest of what this rank computes with, leaving out what another rank
        counts. `repack` is false in the test that shows what would happen."""
        model = self.model_runner.get_model()
        if repack:
            repack_tied(model)
        return held_digest(model, PACKED_DIGEST)

    def alphaapollo_confirm_adapter(self) -> int:
        """The digest of the adapter that this rank computes with."""
        return adapter_digest(self.model_runner.get_model())

    def alphaapollo_unlink_shared_memory(self) -> None:
        """Remove the names of the memory that the CPU ranks of one engine share. They have opened it by now; vLLM
        itself leaves it behind."""
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
            path.unlink(missing_ok=True)


def repack_tied(model: torch.nn.Module) -> None:
    """On a CPU a tied output head computes with a packed copy of the embedding, which no reload renews: renew it."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in tied_layers(model):
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _enter() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    enter_engine_process()
    apply_patches()
    WeightTransferEngineFactory.register_engine(
        SHARED_MEMORY, "alphaapollo.weight_sync.vllm_shared_memory", "SharedMemoryWeightTransferEngine"
    )


_enter()
