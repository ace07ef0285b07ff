"""Worker extension: methods mixed into vLLM's worker class, called on every rank by `collective_rpc`.

vLLM imports this module in each worker before it builds the model, which is the only hook that early. The import
therefore sets up the process (watchdog, log), applies the patches and registers the weight transfer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from alphaapollo.engines.vllm.patches import PACKED_DIGEST, apply_patches
from alphaapollo.engines.vllm.process import enter_engine_process
from alphaapollo.engines.vllm.settings import SHARED_MEMORY
from alphaapollo.weight_sync.vllm_digest import compute_adapter_digest, compute_loaded_digest, find_tied_layers


class WorkerExtension:
    """Worker methods; `self` is vLLM's worker."""

    model_runner: Any

    def alphaapollo_confirm(self, repack: bool = True) -> int:
        """Return the digest of the received weights, without parts that another rank counts. `repack=False` is for the
        test that shows the stale packed copy."""
        model = self.model_runner.get_model()
        if repack:
            repack_tied_heads(model)
        return compute_loaded_digest(model, PACKED_DIGEST)

    def alphaapollo_confirm_adapter(self) -> int:
        """Return the digest of the adapter that this rank computes with."""
        return compute_adapter_digest(self.model_runner.get_model())

    def alphaapollo_unlink_shared_memory(self) -> None:
        """Unlink the shared memory of the engine's CPU ranks, which have opened it by now. vLLM never removes it."""
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
            path.unlink(missing_ok=True)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack tied output heads. On a CPU they compute with a packed copy of the embedding that a reload does not
    update."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in find_tied_layers(model):
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _set_up_process() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    enter_engine_process()
    apply_patches()
    WeightTransferEngineFactory.register_engine(
        SHARED_MEMORY, "alphaapollo.weight_sync.vllm_shared_memory", "SharedMemoryWeightTransferEngine"
    )


_set_up_process()
