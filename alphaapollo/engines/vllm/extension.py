"""Worker extension: methods mixed into vLLM's worker class, called on every rank by `collective_rpc`.

vLLM imports this module in each worker before it builds the model, and has no other hook that runs so early. The import
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
    """Mixin with the methods added to vLLM's worker class; `self` is the worker."""

    model_runner: Any

    def alphaapollo_confirm(self, repack: bool = True) -> int:
        """Return the digest of the received weights, without the parts that another rank counts. Only a test uses
        `repack=False`, to show that the packed copy is stale without repacking."""
        model = self.model_runner.get_model()
        if repack:
            repack_tied_heads(model)
        return compute_loaded_digest(model, PACKED_DIGEST)

    def alphaapollo_confirm_adapter(self) -> int:
        """Return the digest of the LoRA adapter that this rank uses."""
        return compute_adapter_digest(self.model_runner.get_model())

    def alphaapollo_unlink_shared_memory(self) -> None:
        """Unlink the shared memory of the CPU ranks, because vLLM never removes it. Call after all ranks opened it."""
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}*"):
            path.unlink(missing_ok=True)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Repack tied output heads on a CPU, where they use a packed copy of the embedding that a weight update does not
    change."""
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
